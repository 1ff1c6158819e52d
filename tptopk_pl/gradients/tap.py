"""Calling a layer that has a rule: native forward and input gradient, weight gradient by the rule.

The layer runs with detached parameters under ordinary autograd, so every option, memory layout and
autocast mode behaves as always; a :class:`Tap` behind it hands input and output gradient over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tptopk_pl.gradients.chunk import Chunk
from tptopk_pl.gradients.contributions import Contribution, Options
from tptopk_pl.gradients.precision import exact, full_precision
from tptopk_pl.gradients.rules import Rule


@dataclass(frozen=True)
class Owned:
    """A trained parameter: attribute ``local`` of ``owner``, number ``position`` of the model's."""

    owner: nn.Module
    local: str
    position: int

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now."""
        parameter = self.owner._parameters[self.local]
        assert parameter is not None
        return parameter


class Signal(NamedTuple):
    """What one record's part of a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Signal:
        """That of ``[n, ...]``."""
        return cls(tensor.shape[1:], tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Layer:
    """A module that the engine serves as one whole; without a rule, by the composite path.

    ``by_record`` tells of each place (a call of a pass, or an argument of it) that was seen whether
    it holds one row for each record, or the same for all. ``signals`` are input and output gradient
    of the first call that was seen, ``choices`` the options to take, by local parameter name.
    """

    name: str
    module: nn.Module
    owned: tuple[Owned, ...]
    rule: Rule | None
    by_record: dict[str, bool] = field(default_factory=dict)
    signals: list[Signal] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)

    def contribution(self, local: str, options: Options) -> Contribution:
        """By the option that was chosen for a parameter; else by the first."""
        make = options.get(self.choices.get(local, "")) or next(iter(options.values()))
        return make()


@contextmanager
def substituted(owned: Sequence[Owned], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let the modules compute with ``tensors`` in place of their parameters ``owned``."""
    originals = [item.parameter for item in owned]
    try:
        for item, tensor in zip(owned, tensors, strict=True):
            item.owner._parameters[item.local] = tensor  # type: ignore[assignment]
        yield
    finally:
        for item, original in zip(owned, originals, strict=True):
            item.owner._parameters[item.local] = original


class Tap(torch.autograd.Function):
    """The identity on a layer's output; its backward delivers (input, output gradient).

    ``mark_dirty`` makes the result a full tensor instead of a view, so in-place activations and
    ``+=`` may follow. ``dummy`` is a scalar that requires a gradient: without it the output of a
    first layer, whose input and detached weight need none, would have no backward at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        dummy: Tensor,
        x: Tensor,
        deliver: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        """Return ``out``, keeping the input ``x`` and the callback."""
        ctx.deliver = deliver
        ctx.save_for_backward(x)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Deliver, and pass the gradient on unchanged."""
        (grad,) = grads
        (x,) = ctx.saved_tensors
        ctx.deliver(x, grad)
        return grad, None, None, None


def tapped(
    layer: Layer, chunk: Chunk, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """The output of ``layer``, whose ``forward`` is given, for the records of ``chunk``.

    Input of one row is everybody's (positions, say): each record gets that row. Where each record
    had its own before, it is one that was selected, and refused.

    Raises:
        ValueError: if the first dimension of the layer's input is not the number of records.
    """
    assert layer.rule is not None
    rule, module = layer.rule, layer.module
    active = [item for item in layer.owned if chunk.is_active(item.position)]
    name = next((name for name in ("x", "input") if name in kwargs), "")
    x: Tensor = args[0] if args else kwargs[name]
    call = f"call {chunk.calls[layer.name]}"
    chunk.calls[layer.name] += 1
    if len(x) == chunk.num_records > 1:
        layer.by_record[call] = True
    elif active and x.ndim >= rule.min_ndim(module) and len(x) == 1 and call not in layer.by_record:
        x = x.expand(chunk.num_records, *x.shape[1:])
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})
    with substituted(layer.owned, [item.parameter.detach() for item in layer.owned]):
        out = forward(*args, **kwargs)
    if not active:
        return out
    if x.ndim < rule.min_ndim(module) or len(x) != chunk.num_records:
        raise ValueError(
            f"{layer.name} ({type(module).__name__}) was called on an input of shape "
            f"{tuple(x.shape)}. Expected a first dimension of {chunk.num_records}, the number of "
            f"records, and at least {rule.min_ndim(module)} dimensions: keep one row per record "
            "and put other dimensions (patches, steps, crops) behind it."
        )

    def deliver(x: Tensor, grad: Tensor) -> None:
        with full_precision(grad.device):
            x, grad = exact(x), exact(grad)
            if not layer.signals:
                layer.signals.extend([Signal.of(x), Signal.of(grad)])
            gradients = rule.gradients(module, x, grad)
            for item in active:
                options = gradients[item.local](chunk.selections[item.position])
                chunk.add(item.position, layer.contribution(item.local, options))

    dummy = torch.zeros((), requires_grad=True)
    tap: Tensor = Tap.apply(out, dummy, x.detach(), deliver)
    return tap
