"""A look at the module before the first step, on synthetic records: are examples independent?

Clipping bounds one unit's influence only if a record's gradient depends on that record alone. The
probe runs ``training_step`` on made-up records, through the loader's collate function and the
transfer hooks, and compares each record's gradient in changing company, in hostile company and
alone. It also compares the engine's gradients with autograd's. It can find coupling; it cannot
prove that there is none.

It costs at most some 45 forward and backward passes of 8 records, and 6 more for each integer of a
record (half as many if nothing is random).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tptopk_pl.callback import company, findings
from tptopk_pl.callback.company import Planted, Values
from tptopk_pl.callback.losses import IGNORED_LABEL, LossWatch, ignored_places
from tptopk_pl.callback.rehearsal import generators, seed_everything, state, tensors, undone
from tptopk_pl.gradients import GradientEngine

_SEEDS = 8  # MixUp in one batch of three is missed with probability 0.7^8 = 6%
_SEEDS_WITHOUT_DRAWS = 3  # enough if training_step draws nothing
_TOLERANCE = 1e-3  # relative; rounding is 1e-6, coupling is of the order of 1
_LOW_PRECISION_TOLERANCE = 0.1  # bfloat16 has 8 bits
_ROUNDING = 1e-5  # of the largest gradient: what a gradient that is truly 0 may show
# Their draws hang on the batch, and each on its own element: without them more can be compared.
_INNOCENT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.RReLU)
_COORDINATES = 2**20  # of a gradient, of which all are compared up to that many
_SIMILAR = 2.0  # factor between mean sizes of gradients that differ by random draws alone
_HOSTILE = (math.nan, 1e6, -3.0)  # factors of the others' floating-point values


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
        templates: a synthetic record of each layout to imitate, the commonest first.
        batch_of: records to a batch on the device (collate and transfer hooks).
        summed_loss: batch, number of records and batch index to the sum of the records' losses.
        low_precision: gradients carry bfloat16 rounding.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: GradientEngine,
        templates: Sequence[Any],
        batch_of: Callable[[list[Any]], Any],
        summed_loss: Callable[[Any, int, int], Tensor],
        *,
        low_precision: bool = False,
    ) -> None:
        self._module, self._engine, self._templates = module, engine, templates
        self._batch_of, self._summed_loss = batch_of, summed_loss
        self._tolerance = _LOW_PRECISION_TOLERANCE if low_precision else _TOLERANCE
        self._values = Values()
        self._draws = False
        self._found: dict[str, None] = {}  # by the watch over losses, in order
        self._ignored: set[int] = set()

    def run(self) -> ProbeResult:
        """Probe and leave RNG, weights, buffers, metrics and attributes as they were."""
        with undone(self._module):
            before = state(self._module)
            for layer in self._module.modules():
                if type(layer) in _INNOCENT:
                    layer.eval()
            # Shows the engine what is not one row per record.
            with suppress(Exception), undone(self._module):
                self._gradients(self._records()[:1])
            try:
                self._learn_values()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return ProbeResult([findings.fails("synthetic records", error)])
            # Caches that are made on the first batch, from shapes alone, are no data.
            before = {
                name: before[name] if name in before and before[name].shape == made.shape else made
                for name, made in state(self._module).items()
            }
            result = ProbeResult(self._dependence())
            result.refusals += self._found
            result.refusals += self._changed_state(before)
            if not result.refusals:
                self._try_ignored_labels(result)
            return result

    def _dependence(self) -> list[str]:
        """The first finding of each kind of comparison; later ones would follow from it."""
        first = self._gradients(self._records())
        if not self._close(first, self._gradients(self._records())):
            return [findings.NOT_REPEATABLE]
        if found := self._changed_by_company():
            return found
        if not self._close(first, self._gradients(self._records())):
            return [findings.NOT_REPEATABLE]
        found = self._changed_by_hostile_company(first)
        if self._draws:  # random layers draw anew when the batch size changes
            self._module.eval()
        found += self._changed_by_size()
        return found + self._bypassed()

    # ------------------------------------------------------------------ records and gradients

    def _learn_values(self) -> None:
        """Find the widest range of values that the module takes."""
        watch = LossWatch()
        self._gradients(self._records(), watch=watch)
        self._ignored = watch.ignored
        heads = [m.out_features for m in self._module.modules() if isinstance(m, nn.Linear)]
        labels = max(2, min(watch.num_classes or heads[-1:], default=2))
        rows = watch.num_rows or {labels}
        least = max(2, min(labels, *rows))
        padding = tuple(sorted(watch.padding))
        safe = self._values
        for values in (
            Values(labels, max(rows), 256, padding),
            Values(labels, min(rows), 256, padding),
            Values(least, least, 256, padding),
            Values(least, least, least, padding),
        ):
            self._values = values
            try:
                self._gradients(self._records())
                return
            except Exception:  # out of range somewhere
                self._values = safe

    def _records(self, seed: int = 0, **options: Any) -> list[Any]:
        return company.company(self._templates, self._values, seed, **options)

    def _gradients(
        self, records: Sequence[Any], seed: int = 0, watch: LossWatch | None = None
    ) -> Tensor:
        """A part of each record's gradient, ``[n, <= 2^20]``; the seed is the batch's index too."""
        return self._run(records, seed, watch or LossWatch(), self._rows)

    def _rows(self, n: int) -> Tensor:
        # Every so many coordinates of a large model: coupling shows in all of them.
        step = self._engine.num_active // _COORDINATES | 1
        device = next(self._module.parameters()).device
        rows = torch.eye(n, device=device)
        return torch.stack([self._engine.weighted_sum(row)[::step].clone() for row in rows])

    def _sum(self, n: int) -> Tensor:
        device = next(self._module.parameters()).device
        return self._engine.weighted_sum(torch.ones(n, device=device))

    def _run(
        self, records: Sequence[Any], seed: int, watch: LossWatch, read: Callable[[int], Tensor]
    ) -> Tensor:
        n = len(records)
        device = next(self._module.parameters()).device
        seed_everything(seed)
        fresh = generators(device)
        batch = self._batch_of(list(records))
        self._engine.begin(torch.arange(n, device=device), n)
        try:
            with watch:
                loss = self._summed_loss(batch, n, seed)
            if loss.requires_grad:
                loss.backward()
            self._draws |= fresh != generators(device)
            if n > 1:
                self._found |= dict.fromkeys(watch.couplings(n))
            self._engine.norms()
            return read(n)
        finally:
            self._engine.end()

    def _close(self, a: Tensor, b: Tensor, rounding: float = 1e-12) -> bool:
        scale = max(float(a.abs().max()), float(b.abs().max()))
        return float((a - b).abs().max()) <= self._tolerance * scale + rounding

    # ------------------------------------------------------------------ comparisons

    def _changed_by_company(self) -> list[str]:
        """Change half of the records, then the other half, and look at those kept."""
        for seed in range(_SEEDS):
            if seed >= _SEEDS_WITHOUT_DRAWS and not self._draws:
                break
            gradients = self._gradients(self._records(seed), seed)
            for changed, kept in _halves(seed):
                others = self._gradients(self._records(seed, changed=changed), seed)
                if not self._all_close(gradients[kept], others[kept]):
                    return [findings.coupled("changes with the other examples of the batch")]
        return []

    def _changed_by_hostile_company(self, gradients: Tensor) -> list[str]:
        """An overflow in one record must not reach another."""
        for scale in _HOSTILE:
            for changed, kept in _halves(seed=0):
                hostile = self._records(changed=changed, scale=scale)
                try:
                    others = self._gradients(hostile)
                except MisconfigurationException as error:
                    return [f"With a value of NaN or 1e6 in some examples: {error}"]
                except Exception:  # the run leaves such a record out
                    continue
                if not self._all_close(gradients[kept], others[kept]):
                    return [
                        findings.coupled("changes when another example holds NaN or a value of 1e6")
                        + " Clamp or replace what belongs to one example, not a mean."
                    ]
        return []

    def _all_close(self, a: Tensor, b: Tensor) -> bool:
        rounding = _ROUNDING * float(a.abs().max())
        return all(self._close(*rows, rounding) for rows in zip(a, b, strict=True))

    def _changed_by_size(self) -> list[str]:
        """Each record alone, and in a company of all layouts."""
        try:
            records = self._records(mixed_layouts=True)
            together = self._gradients(records)
        except Exception:  # layouts that cannot be in one batch
            records = self._records()
            together = self._gradients(records)
        try:
            alone = torch.cat([self._gradients([record]) for record in records])
        except Exception as error:
            return [findings.fails("a batch of one example, which Poisson sampling draws", error)]
        if self._all_close(together, alone) or self._differ_by_draws_alone(records):
            return []
        return [
            findings.coupled("changes with the number of examples in the batch, or their layouts")
        ]

    def _differ_by_draws_alone(self, records: Sequence[Any]) -> bool:
        """Whether draws that ``eval()`` leaves on, as an augmentation's, hide the comparison.

        Then only the size of the gradients is compared: a sum would be ``SIZE`` times a mean.
        """
        if self._all_close(*[self._gradients(records, seed) for seed in (0, 1)]):
            return False
        seeds = range(_SEEDS_WITHOUT_DRAWS)
        together = [self._gradients(records, seed).norm(dim=1).mean() for seed in seeds]
        alone = [self._gradients([r], seed).norm() for seed in seeds for r in records]
        ratio = float(torch.stack(together).mean() / torch.stack(alone).mean())
        return 1 / _SIMILAR < ratio < _SIMILAR

    def _changed_state(self, before: dict[str, Tensor]) -> list[str]:
        buffers = {name for name, _ in self._module.named_buffers()}
        return [
            f"{'Buffer' if name in buffers else 'Parameter'} {name} changes in training_step: it "
            "would carry raw data into checkpoints. Make it a constant."
            for name, tensor in tensors(self._module).items()
            if name in before and not _same(tensor, before[name])
        ]

    def _bypassed(self) -> list[str]:
        """Compare the engine's summed gradient with autograd's, parameter by parameter."""
        engine_sum = self._run(self._records(), 0, LossWatch(), self._sum)
        parameters = self._engine.parameters
        seed_everything(0)
        loss = self._summed_loss(self._batch_of(self._records()), company.SIZE, 0)
        truth = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        bypassed, start = [], 0
        rounding = _ROUNDING * float(engine_sum.abs().max())
        for (name, parameter), gradient in zip(parameters.items(), truth, strict=True):
            ours = engine_sum[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            known = torch.zeros_like(ours) if gradient is None else gradient.to(ours.dtype)
            if name in self._engine.bypassed or not self._close(ours, known, rounding):
                bypassed.append(name)
        return [findings.outside(bypassed)] if bypassed else []

    def _try_ignored_labels(self, result: ProbeResult) -> None:
        """Put labels that are commonly ignored into one record, place by place."""
        records = self._records()
        gradients = self._gradients(records)
        for place, is_array in enumerate(company.integer_leaves(self._templates[0])):
            for value in dict.fromkeys([IGNORED_LABEL, -1, *sorted(self._ignored)]):
                planted = Planted(place, value)
                records[0] = company.with_planted(self._templates[0], self._values, planted)
                try:
                    others = self._gradients(records)
                except Exception:  # not a label, or one that is not ignored
                    continue
                if self._all_close(gradients[1:], others[1:]):
                    continue
                left_out = value == IGNORED_LABEL and (
                    ignored_places(self._batch_of(records), len(records)) == [0]
                )
                if is_array or not left_out:
                    result.refusals.append(findings.ignoring(value))
                else:
                    result.ignored_labels_couple = True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _halves(seed: int) -> list[tuple[list[int], list[int]]]:
    """Which positions to change and which to keep, and the reverse."""
    order = torch.randperm(company.SIZE, generator=torch.Generator().manual_seed(seed)).tolist()
    half, rest = order[: company.SIZE // 2], order[company.SIZE // 2 :]
    return [(half, rest), (rest, half)]
