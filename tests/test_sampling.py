"""Poisson sampling of units: rate, shares, chunks, and what a loader may not be."""

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from toys import Numbers
from tptopk_pl.rng import seeded_key
from tptopk_pl.sampling import PoissonLoader, PoissonSampler, loader_refusals
from tptopk_pl.units import PrivacyUnits

KEY = seeded_key(5)


def sampler(
    units: PrivacyUnits | int,
    expected: float,
    *,
    step: Callable[[], int] = lambda: 0,
    physical: int = 8,
    last: int = 10**9,
    steps_per_pass: int = 10,
    **kwargs: Any,
) -> PoissonSampler:
    units = PrivacyUnits.one_per_record(units) if isinstance(units, int) else units
    return PoissonSampler(
        units,
        sampling_rate=expected / units.num_units,
        steps_per_pass=steps_per_pass,
        physical_batch_size=physical,
        key=kwargs.pop("key", KEY),
        next_step=step,
        last_step=last,
        **kwargs,
    )


# ---------------------------------------------------------------------- the draw


def test_each_unit_is_drawn_independently_at_rate_b_over_n() -> None:
    """Mean, variance and shape of the batch sizes, units' shares, and pairs of neighbours."""
    n, expected, steps = 40, 10, 4000
    q, draws = expected / n, sampler(n, expected)
    drawn = np.zeros((steps, n), dtype=bool)
    for step in range(steps):
        drawn[step, draws.draw(step).numpy()] = True
    assert stats.binomtest(int(drawn.sum()), steps * n, q).pvalue > 1e-3
    sizes = drawn.sum(1)
    # (steps − 1) s² / σ² is nearly χ² for a binomial of this size.
    spread = (steps - 1) * sizes.var(ddof=1) / (n * q * (1 - q))
    assert 1e-3 < stats.chi2.cdf(spread, steps - 1) < 1 - 1e-3
    expected_counts = steps * stats.binom.pmf(np.arange(4, 18), n, q)
    counts = np.array([(sizes == size).sum() for size in range(4, 18)])
    rest = [steps - counts.sum(), steps - expected_counts.sum()]
    assert stats.chisquare([*counts, rest[0]], [*expected_counts, rest[1]]).pvalue > 1e-3
    shares = ((drawn.sum(0) - steps * q) ** 2).sum() / (steps * q * (1 - q))
    assert 1e-3 < stats.chi2.cdf(shares, n) < 1 - 1e-3
    pairs = int((drawn[:, ::2] & drawn[:, 1::2]).sum())
    assert stats.binomtest(pairs, steps * n // 2, q * q).pvalue > 1e-3
    in_a_row = int((drawn[1:] & drawn[:-1]).sum())
    assert stats.binomtest(in_a_row, (steps - 1) * n, q * q).pvalue > 1e-3


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_one_draw_without_overlap(world: int) -> None:
    """Each drawing its own sample of its own shard would be another mechanism."""
    for step in range(20):
        whole = sampler(200, 31).draw(step)
        shares = [sampler(200, 31, rank=rank, world_size=world).draw(step) for rank in range(world)]
        for rank, share in enumerate(shares):
            assert share.equal(whole[rank::world])
        assert torch.cat(shares).sort().values.equal(whole)


def test_a_draw_depends_on_key_and_step_alone() -> None:
    """Not on what was drawn before, nor on global generators; other steps and keys differ."""
    one, other = sampler(1000, 50), sampler(1000, 50)
    torch.manual_seed(3)
    forwards = [one.draw(step) for step in range(8)]
    torch.manual_seed(4)
    np.random.seed(4)
    backwards = [other.draw(step) for step in reversed(range(8))][::-1]
    assert all(a.equal(b) for a, b in zip(forwards, backwards, strict=True))
    assert all(not a.equal(b) for a, b in itertools.combinations(forwards, 2))
    assert not sampler(1000, 50, key=seeded_key(6)).draw(0).equal(forwards[0])


def test_drawing_leaves_global_generators_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(sampler(100, 10))
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_a_draw_from_millions_costs_what_it_draws() -> None:
    """An array of N bytes would be 10 MB; a mask drawn unit by unit, 80 MB and a second."""
    millions = sampler(10**7, 1000)
    millions.draw(0)  # scipy sets itself up
    tracemalloc.start()
    start = time.process_time()
    for step in range(1, 6):
        assert 800 < len(millions.draw(step)) < 1200
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert seconds < 0.5


def test_every_unit_is_drawn_at_rate_one() -> None:
    assert sampler(12, 12).draw(3).tolist() == list(range(12))


# ---------------------------------------------------------------------- chunks

FAMILIES = ["a"] * 3 + ["b"] + ["c"] * 2 + ["a", "d", "e", "e", "c"]  # a: 4 records, c: 3


def test_chunks_hold_whole_units_and_no_more_records_than_fit() -> None:
    units = PrivacyUnits(FAMILIES)
    of = sampler(units, 4, physical=4)
    for step in range(50):
        chunks = of.chunks(step)
        drawn = of.draw(step).tolist()
        assert sorted(r for chunk in chunks for r in chunk) == [
            record for record, unit in enumerate(units.unit_of_record) if unit in drawn
        ]
        assert all(0 < len(chunk) <= 4 for chunk in chunks) or (chunks == [[]] and not drawn)
        owners = [set(units.unit_of_record[chunk]) for chunk in chunks]
        assert sum(len(own) for own in owners) == len(set().union(*owners))


def test_an_empty_draw_is_one_empty_chunk() -> None:
    of = sampler(1000, 1e-6)
    assert len(of.draw(0)) == 0
    assert of.chunks(0) == [[]]


def test_a_pass_has_its_steps_and_ends_at_the_plans_last() -> None:
    at = 0
    of = sampler(100, 10, step=lambda: at, last=25, steps_per_pass=10)
    assert len(of) == 10

    def steps() -> int:
        list(of)
        return sum(of.pending)

    assert steps() == 10
    at = 20
    assert steps() == 5
    assert next(iter(of)) == of.chunks(20)[0]
    at = 25
    assert steps() == 0
    assert list(of) == []


def test_iterating_again_starts_at_the_step_under_way() -> None:
    """What was drawn ahead and not run is drawn again, as it was, and not counted twice."""
    of = sampler(100, 20, physical=8, step=lambda: 3, steps_per_pass=4)
    first = iter(of)
    ahead = [next(first) for _ in range(7)]
    again = list(of)
    assert again[:7] == ahead
    assert again == [chunk for step in range(3, 7) for chunk in of.chunks(step)]
    assert len(of.pending) == len(again)


# ---------------------------------------------------------------------- the loader


def poisson(of: PoissonSampler, n: int, **kwargs: Any) -> PoissonLoader:
    return PoissonLoader(DataLoader(Numbers(n), batch_size=8, **kwargs), of, worker_seed=1)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 4}]
)
def test_loader_hands_out_every_chunk_and_knows_each_steps_last(options: dict[str, Any]) -> None:
    of = sampler(60, 15, physical=4, steps_per_pass=6)
    loader = poisson(of, 60, **options)
    assert len(loader) == 6
    steps = 0
    for step, (placeholder, _) in enumerate(loader):
        steps += 1
        assert placeholder.equal(torch.zeros(1, 2))  # hooks and callbacks see nobody's record
        taken = [loader.take_chunk()]
        while not taken[-1].is_last:
            loader.fetch_chunk()
            taken.append(loader.take_chunk())
        assert [chunk.records for chunk in taken] == of.chunks(step)
        for chunk in taken:
            if chunk.records:
                assert chunk.batch[1].tolist() == chunk.records
    assert steps == 6


def test_loader_counts_steps_without_records() -> None:
    """An empty step is noise alone; skipping it would change the rate and lose a charge."""
    loader = poisson(sampler(60, 1e-6, steps_per_pass=5), 60)
    steps = 0
    for images, labels in loader:
        steps += 1
        chunk = loader.take_chunk()
        assert (chunk.records, chunk.is_last) == ([], True)
        assert images.equal(torch.zeros(1, 2))  # transfer hooks see one record, nobody's
        assert labels.tolist() == [0]
    assert steps == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_may_be_iterated_anew_in_mid_pass(workers: int) -> None:
    """Prefetched chunks of the pass that was left must not be taken for those of the next."""
    of = sampler(60, 15, physical=4, steps_per_pass=4)
    loader = poisson(of, 60, num_workers=workers, persistent_workers=workers > 0)
    next(iter(loader))
    chunks = []
    for step, _ in enumerate(loader):
        chunks.append(loader.take_chunk())
        while not chunks[-1].is_last:
            loader.fetch_chunk()
            chunks.append(loader.take_chunk())
        assert chunks[-1].records == of.chunks(step)[-1]
    assert [c.records for c in chunks] == [c for step in range(4) for c in of.chunks(step)]


def test_a_chunk_cannot_be_taken_twice() -> None:
    loader = poisson(sampler(60, 15), 60)
    next(iter(loader))
    loader.take_chunk()
    with pytest.raises(ValueError, match=r"several times.*first-order optimizer"):
        loader.take_chunk()


def test_loader_keeps_no_position_of_its_own() -> None:
    """The step does, so that a resumed run draws what it would have drawn."""
    loader = poisson(sampler(60, 15), 60)
    assert loader.state_dict() == {}
    loader.load_state_dict({})


def test_loader_keeps_the_users_collate_and_data_set() -> None:
    of = sampler(60, 15)
    loader = PoissonLoader(
        DataLoader(Numbers(60), collate_fn=lambda records: ["mine", len(records)]), of, 1
    )
    assert next(iter(loader)) == ["mine", 1]
    assert loader.take_chunk().batch == ["mine", len(of.chunks(0)[0])]


# ---------------------------------------------------------------------- refusals


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Balanced(DataLoader):
    """A loader that picks batches itself."""

    def __iter__(self) -> Any:
        return super().__iter__()


DATA = Numbers(8)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(DATA, 2, sampler=WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandomSampler"),
        (DataLoader(DATA, 2, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (
            DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0)),
            "DistributedSampler samples at a rate",
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)),
            "batch_sampler",
        ),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(Stream(), 2), "IterableDataset"),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True)), "replacement=True"),
        (DataLoader(DATA, 2, sampler=SequentialSampler(range(4))), "draws from other data"),
        (Balanced(DATA, 2), "Balanced overrides"),
        ([DATA], "one torch DataLoader for training, got list"),
        (None, "one torch DataLoader for training, got NoneType"),
    ],
)
def test_what_would_be_dropped_or_sample_at_another_rate_is_refused(
    loader: Any, message: str
) -> None:
    found = loader_refusals(loader)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_plain_loaders_are_served(shuffle: bool) -> None:
    assert loader_refusals(DataLoader(DATA, 2, shuffle=shuffle, drop_last=True)) == []


def test_the_trainers_own_distributed_sampler_is_replaced() -> None:
    injected = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0))
    assert loader_refusals(injected, world_size=2) == []


def test_all_refusals_come_at_once() -> None:
    loader = Balanced(DATA, 2, sampler=SubsetRandomSampler([1, 2]))
    assert len(loader_refusals(loader)) == 2
