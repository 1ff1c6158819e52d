"""The engine: puts itself into a module's layers, and answers for one physical chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tptopk_pl.gradients.chunk import Chunk
from tptopk_pl.gradients.composite import composite
from tptopk_pl.gradients.contributions import Selection
from tptopk_pl.gradients.layers import find_layers
from tptopk_pl.gradients.tap import Layer, tapped
from tptopk_pl.gradients.tuning import fastest
from tptopk_pl.support import Support


class GradientEngine:
    """Norms and weighted sums of the gradients of privacy units, restricted to a support.

    Between :meth:`begin` and :meth:`end` stand one forward and one backward pass over ``n`` records
    (several calls of a layer add up). Outside, and where gradients are disabled, the layers run as
    if the engine were not there. ``parameter.grad`` is never set.

    Args:
        module: the model.
        parameters: the trained parameters by name; their order is that of the flat coordinates.

    Attributes:
        bypassed: names of parameters that autograd reached directly while attached: their weight
            was used outside its layer, and that part of the gradient is lost.

    Raises:
        ValueError: naming every parameter or module that cannot be served, with an edit.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._layers = find_layers(module, self._parameters)
        self._handles: list[RemovableHandle] = []
        self._forwards: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._chunk: Chunk | None = None
        self.bypassed: set[str] = set()
        self.set_support(None)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name, in the order of the flat coordinates."""
        return self._parameters

    @property
    def num_active(self) -> int:
        """``k``: coordinates that norms and sums are over; ``d`` without a support."""
        return sum(selection.num_active for selection in self._selections)

    def attach(self) -> None:
        """Replace the layers' forwards, on the instances, until :meth:`detach`."""
        assert not self._forwards, "already attached"
        for layer in self._layers:
            self._forwards.append((layer.module, layer.module.__dict__.get("forward")))
            layer.module.__dict__["forward"] = partial(self._forward, layer, layer.module.forward)
        for name, parameter in self._parameters.items():
            drop = partial(self._drop_gradient, name)
            handle = parameter.register_post_accumulate_grad_hook(drop)
            self._handles.append(handle)

    def detach(self) -> None:
        """Leave the module exactly as it was before :meth:`attach`."""
        for handle in self._handles:
            handle.remove()
        for module, forward in self._forwards:
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
        self._handles.clear()
        self._forwards.clear()

    def set_support(self, support: Support | None) -> None:
        """Restrict norms and sums to ``support``; None for all coordinates.

        Backpropagation then stops below the lowest layer that has an active coordinate.

        Raises:
            ValueError: if the support was made for parameters of other sizes.
        """
        assert self._chunk is None, "the support cannot change within a chunk"
        parameters = list(self._parameters.values())
        sizes = tuple(parameter.numel() for parameter in parameters)
        if support is not None and support.sizes != sizes:
            raise ValueError(f"Expected a support over parameters of sizes {sizes}.")
        self.choices = {}
        self._selections = [
            Selection(None if index is None or len(index) == p.numel() else index, p.shape)
            for index, p in zip(
                [None] * len(parameters) if support is None else support.split(),
                parameters,
                strict=True,
            )
        ]

    def tune(self, records_to_come: float) -> None:
        """Choose, by a short measurement, how each layer that has been called gets its gradients.

        The choice holds until the support changes; it alters results by rounding at most.

        Args:
            records_to_come: for how many records the choice will be used.
        """
        assert self._chunk is None, "in the middle of a chunk"
        for layer in self._layers:
            if layer.rule is not None and layer.signals:
                selections = [item.to(layer.signals[1].device) for item in self._selections]
                layer.choices.update(fastest(layer, selections, records_to_come))
                for selection in selections:
                    selection.forget()

    @property
    def choices(self) -> dict[str, str]:
        """What :meth:`tune` chose, by layer and parameter; may be set instead of tuning."""
        return {
            f"{layer.name}.{local}": choice
            for layer in self._layers
            for local, choice in layer.choices.items()
        }

    @choices.setter
    def choices(self, choices: Mapping[str, str]) -> None:
        for layer in self._layers:
            layer.choices.clear()
            for item in layer.owned:
                if choice := choices.get(f"{layer.name}.{item.local}"):
                    layer.choices[item.local] = choice

    def begin(self, unit_of_record: Tensor, num_units: int) -> None:
        """Arm for one physical chunk of ``n`` records; the loss to come is the sum of theirs.

        Args:
            unit_of_record: int64 ``[n]``, each in ``[0, num_units)``, on the model's device.
            num_units: units of the chunk; those without records have gradient 0.
        """
        assert self._forwards, "not attached"
        self.end()
        self._selections = [item.to(unit_of_record.device) for item in self._selections]
        self._chunk = Chunk(unit_of_record, num_units, self._selections)

    def norms(self) -> Tensor:
        """After the backward pass, ‖m ⊙ mean over the unit's records of their gradients‖.

        Returns:
            float32 ``[num_units]`` (float64 for a float64 model); not finite for a unit with a
            record whose gradient is not, or overflows.
        """
        assert self._chunk is not None, "not armed"
        return self._chunk.norms()

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """Sum over the units of ``factors`` times the masked gradient whose norm is above.

        Args:
            factors: ``[num_units]``; a unit of factor 0 adds exactly 0, be its gradient NaN.
            total: ``[k]``; the sum is added to it in place.

        Returns:
            float32 ``[k]`` (float64 for a float64 model), in the order of the support.
        """
        assert self._chunk is not None, "not armed"
        return self._chunk.weighted_sum(factors, total)

    def end(self) -> None:
        """Disarm and free everything held for the chunk."""
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None

    def _forward(
        self, layer: Layer, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._chunk is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        run = composite if layer.rule is None else tapped
        return run(layer, self._chunk, original, *args, **kwargs)

    def _drop_gradient(self, name: str, parameter: Tensor) -> None:
        self.bypassed.add(name)
        parameter.grad = None
