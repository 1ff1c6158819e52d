"""Poisson sampling of privacy units, and the loader that turns a draw into physical chunks.

One step of DP-SGD includes each of the ``N`` privacy units independently with probability
``q = B/N``. The draw is made without visiting all units: their number is Binomial(N, q) and,
given the number, every subset of that size is equally likely. A draw is a pure function of the
key and the step, so every rank makes the same one and takes a disjoint share of it.

A draw may be empty, or too large for one forward pass: it is handed out in *physical chunks* of
whole units, at least one per step. Units are never cut: a unit clipped in two chunks would count
twice.

>>> units = PrivacyUnits(["ann", "bob", "ann", "cid"])
>>> units.num_units, units.records(0).tolist()
(3, [0, 2])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from tptopk_pl.records import RecordReader
from tptopk_pl.rng import Stream

IntArray = NDArray[np.int64]


class PrivacyUnits:
    """Which records belong to which privacy unit.

    Args:
        unit_ids: one hashable id for each record, in data set order.
        max_records_per_unit: keep only the first that many records of each unit. The rule looks at
            the unit alone, so one unit's presence never changes another's records.

    Raises:
        ValueError: if an id is NaN or not hashable.
    """

    def __init__(
        self,
        unit_ids: Sequence[Any] | NDArray[Any],
        *,
        max_records_per_unit: int | None = None,
    ) -> None:
        self.unit_of_record: IntArray = _numbered(unit_ids)
        self._by_unit: IntArray = np.argsort(self.unit_of_record, kind="stable")
        counts = np.bincount(self.unit_of_record)
        self._starts: IntArray = np.concatenate(([0], np.cumsum(counts)))
        self._cap = max_records_per_unit

    @classmethod
    def one_per_record(cls, num_records: int) -> PrivacyUnits:
        """Each record is a unit of its own."""
        return cls(range(num_records))

    @property
    def num_units(self) -> int:
        """``N``."""
        return len(self._starts) - 1

    @property
    def largest(self) -> int:
        """Most records of one unit, after the cap."""
        largest = int(np.diff(self._starts).max())
        return largest if self._cap is None else min(largest, self._cap)

    def records(self, unit: int) -> IntArray:
        """Data set indices of one unit's records, int64."""
        records = self._by_unit[self._starts[unit] : self._starts[unit + 1]]
        return records if self._cap is None else records[: self._cap]


def _numbered(unit_ids: Sequence[Any] | NDArray[Any]) -> IntArray:
    """The units' numbers from 0, int64 ``[n]``; records share one if their ids are equal."""
    if isinstance(unit_ids, range):
        return np.arange(len(unit_ids))
    if isinstance(unit_ids, np.ndarray):
        if unit_ids.ndim == 1 and unit_ids.dtype.kind in "iuSU":
            return np.unique(unit_ids, return_inverse=True)[1].astype(np.int64)
        unit_ids = unit_ids.tolist()
    numbers: dict[Any, int] = {}
    try:
        found = [numbers.setdefault(uid, len(numbers)) for uid in unit_ids]
    except TypeError as error:
        raise ValueError(f"Expected privacy_units that are hashable: {error}.") from error
    if any(uid != uid for uid in numbers):
        raise ValueError("Expected privacy_units with an id for every record, got NaN.")
    return np.array(found, dtype=np.int64)


def unit_ids(dataset: Dataset[Any]) -> Sequence[Any] | NDArray[Any] | None:
    """The ids that a data set names in ``privacy_units``, also through Subset and ConcatDataset.

    Returns:
        One id for each record, or None if no data set inside names units.

    Raises:
        ValueError: if a wrapper of unknown kind hides a data set that names units, or if only some
            parts of a ConcatDataset name them: records would silently be units of their own.
    """
    named = getattr(dataset, "privacy_units", None)
    if named is not None:
        if len(named) != len(dataset):  # type: ignore[arg-type]
            raise ValueError(
                f"Expected privacy_units with one id for each of the {len(dataset)} records, "  # type: ignore[arg-type]
                f"got {len(named)}."
            )
        # Items of a tensor compare by identity, those of a table are found by its own index.
        return np.asarray(named) if isinstance(named, Tensor | np.ndarray) else list(named)
    if isinstance(dataset, Subset):
        inner = unit_ids(dataset.dataset)
        return None if inner is None else [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [unit_ids(part) for part in dataset.datasets]
        if any(part is None for part in parts) and any(part is not None for part in parts):
            raise ValueError("Only some parts of the ConcatDataset have privacy_units: name all.")
        return None if parts[0] is None else [uid for part in parts for uid in part or ()]
    if _hides_units(dataset):
        raise ValueError(
            f"{type(dataset).__name__} wraps a data set with privacy_units but has none itself: "
            "give it an attribute privacy_units, one id for each record."
        )
    return None


def _hides_units(dataset: Dataset[Any]) -> bool:
    """Whether a data set that names units is held in an attribute, at whatever depth."""
    seen: set[int] = set()
    found = [dataset]
    while found:
        holder = found.pop()
        if getattr(holder, "privacy_units", None) is not None:
            return True
        seen.add(id(holder))
        for value in getattr(holder, "__dict__", {}).values():
            items = value.values() if isinstance(value, dict) else value
            parts = items if isinstance(value, dict | list | tuple) else [value]
            found += [p for p in parts if isinstance(p, Dataset) and id(p) not in seen]
    return False


class PoissonSampler:
    """Batch sampler: the physical chunks of one logical Poisson batch after another.

    Args:
        units: the privacy units.
        sampling_rate: ``q``.
        steps_per_pass: logical batches in one iteration.
        physical_batch_size: most records in a chunk, of whole units.
        key: sampling key, the same on every rank.
        next_step: the step at which an iteration starts.
        last_step: iterations end here, whatever is asked: the plan's last step.
        rank, world_size: this process' share of each draw.
    """

    def __init__(
        self,
        units: PrivacyUnits,
        *,
        sampling_rate: float,
        steps_per_pass: int,
        physical_batch_size: int,
        key: bytes,
        next_step: Callable[[], int],
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.units = units
        self.sampling_rate = sampling_rate
        self.steps_per_pass = steps_per_pass
        self.physical_batch_size = physical_batch_size
        self.pending: deque[bool] = deque()  # per chunk handed out: is it its step's last?
        self._key, self._next_step, self._last_step = key, next_step, last_step
        self._share = slice(rank, None, world_size)

    def draw(self, step: int) -> Tensor:
        """This rank's share of step ``step``'s units, int64 ``[n]``, increasing."""
        stream = Stream(self._key, "sampling", step)
        size = stream.binomial(self.units.num_units, self.sampling_rate)
        return stream.subset(self.units.num_units, size)[self._share]

    def chunks(self, step: int) -> list[list[int]]:
        """Record indices of the step's chunks, at least one (perhaps empty)."""
        chunks: list[list[int]] = [[]]
        for unit in self.draw(step).tolist():
            records = self.units.records(unit).tolist()
            if chunks[-1] and len(chunks[-1]) + len(records) > self.physical_batch_size:
                chunks.append([])
            chunks[-1].extend(records)
        return chunks

    def __len__(self) -> int:
        return self.steps_per_pass

    def __iter__(self) -> Iterator[list[int]]:
        self.pending.clear()
        first = self._next_step()
        for step in range(first, min(first + self.steps_per_pass, self._last_step)):
            chunks = self.chunks(step)
            self.pending.extend(chunk is chunks[-1] for chunk in chunks)
            yield from chunks


class Chunk(NamedTuple):
    """One physical chunk: a collated batch and the data set indices of its records."""

    batch: Any
    records: list[int]
    is_last: bool


class PoissonLoader(DataLoader[Any]):
    """The user's loader with Poisson sampling. Its length is the number of logical steps.

    Iterating yields the batch of each step's *first* chunk; ``take_chunk`` then describes it and
    ``fetch_chunk`` fetches the step's others. A chunk without records carries a synthetic record in
    its batch, so that transfer hooks never see an empty one.

    Args:
        loader: where data set, collate function and workers come from.
        sampler: the draws.
        worker_seed: seeds the workers' generators.
    """

    def __init__(self, loader: DataLoader[Any], sampler: PoissonSampler, worker_seed: int) -> None:
        units = sampler.units.unit_of_record
        self.reader = RecordReader(loader.dataset, loader.collate_fn, units)
        super().__init__(
            self.reader,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=self.reader.collate,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator().manual_seed(worker_seed),
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
        )
        self.poisson = sampler

    def __len__(self) -> int:
        return self.poisson.steps_per_pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._physical = super().__iter__()
        return self._logical()

    def _logical(self) -> Iterator[Any]:
        while True:
            try:
                self.fetch_chunk()
            except StopIteration:
                return
            yield self._chunk.batch

    def fetch_chunk(self) -> Chunk:
        """Fetch the next chunk and make it the current one."""
        batch, records = next(self._physical)
        self._chunk = Chunk(batch, records, self.poisson.pending.popleft())
        self._taken = False
        return self._chunk

    def take_chunk(self) -> Chunk:
        """The current chunk, once.

        Raises:
            ValueError: on a second call: running a chunk again would count its units twice.
        """
        if self._taken:
            raise ValueError(
                "The optimizer evaluated one batch several times, which is not private: use a "
                "first-order optimizer."
            )
        self._taken = True
        return self._chunk

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is the step, which the callback keeps."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load; the method marks the loader as resumable."""


def loader_refusals(loader: Any, world_size: int = 1) -> list[str]:
    """What in a training loader would break the sampling assumption, one sentence each."""
    if not isinstance(loader, DataLoader):
        return [f"Expected one torch DataLoader for training, got {type(loader).__name__}."]
    if isinstance(loader.dataset, IterableDataset):
        return ["An IterableDataset cannot be sampled by units: use a map-style data set."]
    found = []
    if type(loader).__iter__ is not DataLoader.__iter__:
        found.append(
            f"{type(loader).__name__} overrides DataLoader.__iter__, which Poisson sampling would "
            "drop: use a plain torch DataLoader."
        )
    if loader.batch_size is None:
        found.append(
            "A batch_sampler (or batch_size=None) would be dropped by Poisson sampling: "
            "give the training DataLoader a batch_size instead."
        )
    allowed: tuple[type, ...] = (RandomSampler, SequentialSampler)
    if world_size > 1:  # Lightning injects one; every rank's share of the global draw replaces it
        allowed = (*allowed, DistributedSampler)
    sampler = loader.sampler
    if loader.batch_size is not None and not isinstance(sampler, allowed):
        found.append(
            f"{type(sampler).__name__} samples at a rate that the accounting does not know: remove "
            "it from the training DataLoader."
        )
    elif isinstance(sampler, RandomSampler) and sampler.replacement:
        found.append("RandomSampler(replacement=True) would be dropped: remove it.")
    return found
