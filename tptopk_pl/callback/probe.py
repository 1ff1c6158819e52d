"""A look at the module before the first step, on synthetic records: are examples independent?

Clipping bounds one unit's influence only if a record's gradient depends on that record alone. The
probe runs ``training_step`` on made-up records, through the loader's collate function and the
transfer hooks, and compares one record's gradient in changing company and alone. It also compares
the engine's gradients with autograd's. It can find coupling; it cannot prove that there is none.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tptopk_pl.gradients import GradientEngine
from tptopk_pl.synthetic import synthetic_record

_COMPANY = 4  # records in a synthetic batch
_TOLERANCE = 1e-3  # relative; rounding is 1e-6, coupling is of the order of 1
_LOW_PRECISION_TOLERANCE = 0.1  # bfloat16 has 8 bits
_ROUNDING = 1e-5  # of the largest gradient: what a gradient that is truly 0 may show
IGNORED_LABEL = -100  # torch's default ignore_index
_RETURN_LOSSES = 'return {"loss": losses.mean(), "losses": losses} with losses of shape [n]'


@dataclass
class ProbeResult:
    """What the probe saw.

    Attributes:
        refusals: one sentence for each finding; empty means "no coupling found".
        ignored_labels_couple: a label of -100 in one record changes the others' gradients.
    """

    refusals: list[str] = field(default_factory=list)
    ignored_labels_couple: bool = False


class Probe:
    """Compares gradients of synthetic records.

    Args:
        module: the module under training.
        engine: attached, on dense support.
        template: a record to imitate in structure, shapes and types.
        batch_of: records to a batch on the device (collate and transfer hooks).
        summed_loss: batch and number of records to the sum of their losses.
        low_precision: gradients carry bfloat16 rounding.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: GradientEngine,
        template: Any,
        batch_of: Callable[[list[Any]], Any],
        summed_loss: Callable[[Any, int], Tensor],
        *,
        low_precision: bool = False,
    ) -> None:
        self._module, self._engine, self._template = module, engine, template
        self._batch_of, self._summed_loss = batch_of, summed_loss
        self._tolerance = _LOW_PRECISION_TOLERANCE if low_precision else _TOLERANCE
        self._num_labels = _num_labels(module)

    def run(self) -> ProbeResult:
        """Probe and leave RNG, buffers, metrics, attributes and gradients as they were."""
        with _undone(self._module):
            try:
                self._gradients(self._records())
            except Exception as first:
                self._num_labels = 2  # the guess may have been wrong; two classes always exist
                try:
                    self._gradients(self._records())
                except Exception:
                    return ProbeResult(
                        [
                            "training_step fails on synthetic records, so that coupled examples "
                            f"cannot be found: {type(first).__name__}: {first}"
                        ]
                    )
            return self._compare()

    def _compare(self) -> ProbeResult:
        result = ProbeResult()
        buffers = {n: b.clone() for n, b in self._module.named_buffers()}
        company = self._gradients(self._records())
        result.refusals += self._changed_buffers(buffers)
        others = self._gradients(self._records(shift=1))
        if not self._close(company[0], others[0]):
            result.refusals.append(_coupled("changes with the other examples of the batch"))
        if not self._close(company, self._gradients(self._records(), seed=1)):
            self._module.eval()  # random layers draw anew when the batch size changes
            company = self._gradients(self._records())
        result.refusals += self._changed_by_size(company[0])
        result.refusals += self._bypassed(company.sum(0))
        if not result.refusals:
            self._try_ignored_labels(company, result)
        return result

    def _records(self, shift: int = 0) -> list[Any]:
        """Synthetic records; all but the first change with ``shift``."""
        stride = max(1, self._num_labels // _COMPANY)
        records = []
        for position in range(_COMPANY):
            change = shift if position else 0
            generator = torch.Generator().manual_seed(position + _COMPANY * change)
            label = (position * stride + change) % self._num_labels
            records.append(synthetic_record(self._template, fill=_filler(generator, label)))
        return records

    def _gradients(self, records: Sequence[Any], seed: int = 0) -> Tensor:
        """One gradient for each record, ``[n, d]``."""
        n = len(records)
        _seed_everything(seed)
        batch = self._batch_of(list(records))
        device = next(self._module.parameters()).device
        self._engine.begin(torch.arange(n, device=device), n)
        try:
            loss = self._summed_loss(batch, n)
            if loss.requires_grad:
                loss.backward()
            self._engine.norms()
            rows = torch.eye(n, device=device)
            return torch.stack([self._engine.weighted_sum(row) for row in rows])
        finally:
            self._engine.end()

    def _close(self, a: Tensor, b: Tensor, rounding: float = 1e-12) -> bool:
        scale = max(float(a.abs().max()), float(b.abs().max()))
        return float((a - b).abs().max()) <= self._tolerance * scale + rounding

    def _changed_by_size(self, in_company: Tensor) -> list[str]:
        try:
            alone = self._gradients(self._records()[:1])[0]
        except Exception as error:
            return [
                "training_step fails on a batch of one example, which Poisson sampling draws: "
                f"{type(error).__name__}: {error}"
            ]
        if self._close(in_company, alone):
            return []
        return [_coupled("changes with the number of examples in the batch")]

    def _changed_buffers(self, before: dict[str, Tensor]) -> list[str]:
        return [
            f"Buffer {name} changes while training: it would carry raw data into checkpoints. "
            "Make it a constant."
            for name, buffer in self._module.named_buffers()
            if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before[name]))
        ]

    def _bypassed(self, engine_sum: Tensor) -> list[str]:
        """Compare the engine's summed gradient with autograd's, parameter by parameter."""
        parameters = self._engine.parameters
        _seed_everything(0)
        loss = self._summed_loss(self._batch_of(self._records()), _COMPANY)
        truth = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        found, start = [], 0
        rounding = _ROUNDING * float(engine_sum.abs().max())
        for (name, parameter), gradient in zip(parameters.items(), truth, strict=True):
            ours = engine_sum[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            known = torch.zeros_like(ours) if gradient is None else gradient.to(ours.dtype)
            if name in self._engine.bypassed or not self._close(ours, known, rounding):
                found.append(
                    f"{name} is used outside its own layer's forward, where its per-example "
                    "gradient cannot be seen: use it through its layer only."
                )
        return found

    def _try_ignored_labels(self, company: Tensor, result: ProbeResult) -> None:
        """Put the label that torch ignores into another record, leaf by leaf."""
        leaves, structure = tree_flatten(self._records()[1])
        for place, leaf in enumerate(leaves):
            integer = torch.as_tensor(leaf) if isinstance(leaf, int | Tensor | np.generic) else None
            if integer is None or integer.dtype not in (torch.int64, torch.int32):
                continue
            ignored: Any = torch.full_like(integer, IGNORED_LABEL)
            ignored = ignored if isinstance(leaf, Tensor) else type(leaf)(ignored.item())
            records = self._records()
            records[1] = tree_unflatten([*leaves[:place], ignored, *leaves[place + 1 :]], structure)
            try:
                gradients = self._gradients(records)
            except Exception:  # not a label, or one that torch does not ignore
                continue
            if self._close(company[0], gradients[0]):
                continue
            if integer.ndim:
                result.refusals.append(_coupled("changes with the others' ignored labels (-100)"))
            result.ignored_labels_couple = True


def _coupled(how: str) -> str:
    return (
        f"One example's gradient {how} (a sum, a class-weighted mean, ignored labels, batch "
        f"statistics, MixUp or padding): make examples independent, or {_RETURN_LOSSES}."
    )


def _num_labels(module: nn.Module) -> int:
    """Labels that are probably valid: outputs of the last layer, within every embedding."""
    outputs = [m.out_features for m in module.modules() if isinstance(m, nn.Linear)]
    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return max(2, min([*outputs[-1:], *tables], default=2))


def _filler(generator: torch.Generator, label: int) -> Callable[[Tensor], Tensor]:
    """Values for a synthetic record: floats in [0, 1), images, and one label."""

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype)
        if not leaf.ndim:
            return torch.tensor(label).to(leaf.dtype)
        high = 256 if leaf.dtype == torch.uint8 and leaf.ndim > 1 else 2
        return torch.randint(high, leaf.shape, generator=generator).to(leaf.dtype)

    return fill


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Restore generators, buffers, train modes, gradients and plain attributes afterwards."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    modes = [(m, m.training) for m in module.modules()]
    attributes = [(m, _plain_attributes(m)) for m in module.modules()]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for m, training in modes:
                m.training = training
            for m, plain in attributes:
                m.__dict__.update(plain)
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.data.copy_(buffers[name])
            for parameter in module.parameters():
                parameter.grad = None


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Copies of what a training step may have counted or collected (metrics keep states so)."""
    kinds = (bool, int, float, str, list, dict, set, tuple, Tensor, type(None))
    internal = nn.Module().__dict__.keys()
    return {
        name: _copy(value)
        for name, value in module.__dict__.items()
        if name not in internal and isinstance(value, kinds)
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value)
