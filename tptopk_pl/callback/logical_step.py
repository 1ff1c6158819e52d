"""One logical step over its physical chunks: forward, backward, clip, sum; faults add nothing.

A fault of one record (a label out of range, an image of another size) must neither end nor mark
the run: either would reveal the record. A chunk that fails is halved, unit by unit, until the
faulty units are alone; they contribute zero and are counted like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tptopk_pl.callback.losses import ignored_places
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.mechanism import GaussianMechanism
from tptopk_pl.records import MANY_UNITS
from tptopk_pl.sampling import Chunk, PoissonLoader


class _BypassedError(MisconfigurationException):
    """The module's fault, not a record's: the only one that ends a run at once."""


def summed_loss(output: Any, num_records: int) -> Tensor:
    """The sum of the records' losses, with its graph, from what ``training_step`` returned.

    Raises:
        MisconfigurationException: if there is no loss, or ``losses`` are not one for each record.
    """
    losses = output.get("losses") if isinstance(output, Mapping) else None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if losses is not None:
        if losses.shape != (num_records,):
            raise MisconfigurationException(
                f'Expected "losses" of shape ({num_records},), one for each record, got '
                f"{tuple(losses.shape)}."
            )
        return torch.as_tensor(losses.sum())
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) * num_records
    raise MisconfigurationException(
        f"training_step returned {type(output).__name__} without a loss: a step that depends on "
        "the data is not private. Return a loss for every batch."
    )


class LogicalStep:
    """Runs the chunks of one Poisson batch through a module and into the mechanism.

    Args:
        current_loader: the loader in use; its current chunk is the first to run.
        engine: attached to the module.
        mechanism: receives the clipped sums.
        training_step: ``(batch, batch_idx)`` to the module's output.
        to_device: the transfer hooks.
        exclude_ignored_labels: units with a label of -100 contribute zero (the loss is a mean over
            the other labels, which they would weigh on).
    """

    def __init__(
        self,
        current_loader: Callable[[], PoissonLoader],
        engine: GradientEngine,
        mechanism: GaussianMechanism,
        *,
        training_step: Callable[[Any, int], Any],
        to_device: Callable[[Any], Any],
        exclude_ignored_labels: bool,
    ) -> None:
        self._current_loader, self._engine, self._mechanism = current_loader, engine, mechanism
        self._training_step, self._to_device = training_step, to_device
        self._exclude_ignored_labels = exclude_ignored_labels
        self._failed: list[list[int]] = []  # the records of units since one was last added

    def run(self, batch_idx: int, device: torch.device) -> float:
        """Run all chunks of the step that the mechanism has begun.

        Returns:
            The sum of the losses: a function of raw data.

        Raises:
            Exception: whatever the module raised, if all of many units in a row fail.
            MisconfigurationException: if the module uses a weight outside its layer.
        """
        self._batch_idx, self._device = batch_idx, device
        self._loader = self._current_loader()
        self._unit_of_record = self._loader.poisson.units.unit_of_record
        self._loss = 0.0
        while True:
            chunk = self._loader.take_chunk()
            self._add_chunk(chunk)
            if chunk.is_last:
                return self._loss
            self._loader.fetch_chunk()

    def _add_chunk(self, chunk: Chunk) -> None:
        self._any_added = False
        self._add_or_halve(chunk.records, lambda: (chunk.batch, chunk.records))
        if self._any_added:
            self._failed.clear()
        # Small chunks count together: else a module that always fails would train on noise alone.
        elif len(self._failed) >= MANY_UNITS:
            self._add_units(*self._read(self._failed[-1]))  # once more, to raise what it raised
            self._failed.clear()

    def _add_or_halve(self, records: list[int], read: Callable[[], tuple[Any, list[int]]]) -> None:
        """Add these whole units; those that cannot be added contribute nothing."""
        try:
            self._add_units(*read())
            return
        except _BypassedError:
            raise
        except Exception:
            pass  # what follows stands outside: the traceback holds the failed pass's memory
        halves = self._halves(records)
        if not halves:
            self._failed.append(records)
        for half in halves:
            self._add_or_halve(half, partial(self._read, half))

    def _read(self, records: list[int]) -> tuple[Any, list[int]]:
        reader = self._loader.reader
        return reader.collate([reader[record] for record in records])

    def _halves(self, records: list[int]) -> list[list[int]]:
        """Two halves of whole units; nothing if there is but one unit."""
        units = list(dict.fromkeys(self._unit_of_record[records].tolist()))
        if len(units) == 1:
            return []
        first = set(units[: len(units) // 2])
        chosen = [record for record in records if self._unit_of_record[record] in first]
        return [chosen, [record for record in records if record not in set(chosen)]]

    def _add_units(self, batch: Any, records: list[int]) -> None:
        """Transfer, forward, backward, clip and add; nothing is added if anything raises."""
        if not records:
            return
        batch = self._to_device(batch)
        if ignored := self._with_ignored_label(batch, records):
            left_out = set(self._unit_of_record[ignored])
            rest = [record for record in records if self._unit_of_record[record] not in left_out]
            self._add_units(*self._read(rest))
            return
        ids = torch.from_numpy(self._unit_of_record[records])
        units, unit_of_record = ids.unique(return_inverse=True)
        self._engine.begin(unit_of_record.to(self._device), len(units))
        try:
            loss = summed_loss(self._training_step(batch, self._batch_idx), len(records))
            if loss.requires_grad:  # else no active coordinate took part
                loss.backward()
            self._refuse_bypassed()
            self._loss += float(loss.detach())
            self._mechanism.add_chunk(self._engine)
            self._any_added = True
        finally:
            self._engine.end()

    def _with_ignored_label(self, batch: Any, records: list[int]) -> list[int]:
        if not self._exclude_ignored_labels:
            return []
        return [records[place] for place in ignored_places(batch, len(records))]

    def _refuse_bypassed(self) -> None:
        if self._engine.bypassed:
            raise _BypassedError(
                f"{', '.join(sorted(self._engine.bypassed))}: used outside their own layers' "
                "forward, where per-example gradients cannot be seen."
            )
