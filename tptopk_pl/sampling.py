"""Poisson sampling of privacy units, and the loader that turns a draw into physical chunks.

One step of DP-SGD includes each of the ``N`` privacy units independently with probability
``q = B/N``. The draw is made without visiting all units: their number is Binomial(N, q) and,
given the number, every subset of that size is equally likely. A draw is a pure function of the
key and the step, so every rank makes the same one and takes a disjoint share of it.

A draw may be empty, or too large for one forward pass: it is handed out in *physical chunks* of
whole units, at least one per step. Units are never cut: a unit clipped in two chunks would count
twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tptopk_pl.records import RecordReader
from tptopk_pl.rng import Stream
from tptopk_pl.units import PrivacyUnits


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
        records, ends = self.units.records(self.draw(step).numpy())
        cuts, first = [0], 0  # first: of the units that have no chunk yet
        while first < len(ends):
            most = np.searchsorted(ends, cuts[-1] + self.physical_batch_size, side="right")
            first = max(int(most), first + 1)
            cuts.append(int(ends[first - 1]))
        return [records[a:b].tolist() for a, b in pairwise(cuts)] or [[]]

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

    Iterating yields one synthetic batch a step, so that no hook or callback sees raw records:
    ``take_chunk`` gives the step's first chunk, ``fetch_chunk`` fetches the others.

    Args:
        loader: where data set, collate function and workers come from.
        sampler: the draws.
        worker_seed: seeds the workers' generators.
    """

    def __init__(self, loader: DataLoader[Any], sampler: PoissonSampler, worker_seed: int) -> None:
        self.reader = RecordReader(
            loader.dataset,
            loader.collate_fn,
            sampler.units.unit_of_record,
            units_share_chunks=sampler.physical_batch_size > 1,
        )
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
            yield self.reader.collate([])[0]

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
    dataset: Any = loader.dataset
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
    elif len(getattr(sampler, "data_source", dataset)) != len(dataset):
        found.append(
            f"{type(sampler).__name__} draws from other data than the loader's data set: give both "
            "the same."
        )
    elif isinstance(sampler, RandomSampler) and sampler.replacement:
        found.append("RandomSampler(replacement=True) would be dropped: remove it.")
    return found
