"""Random streams: distributions, replay, independence, and no effect on global generators."""

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from tptopk_pl import rng
from tptopk_pl.rng import Stream, fresh_key, gaussian_noise, seeded_key

KEY = seeded_key(1)


def stream(step=0, purpose="test", key=KEY):
    return Stream(key, purpose, step)


def draws(noise):
    """Every kind of draw from one stream, as one array of float64."""
    parts = [
        noise.words(3),
        noise.uniform(3),
        noise.integers(1000, 3),
        noise.gaussian(3),
        [noise.binomial(1000, 0.3)],
        noise.subset(1000, 5),
    ]
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])


def test_keys():
    assert len(fresh_key()) == len(seeded_key(0)) == 32
    assert fresh_key() != fresh_key()
    assert seeded_key(5) == seeded_key(5)
    assert len({seeded_key(seed) for seed in (0, 1, -1, 10, 2**70)}) == 5


def test_same_address_replays_and_calls_go_on():
    assert np.array_equal(draws(stream(3)), draws(stream(3)))
    in_parts = stream()
    parts = np.concatenate([in_parts.words(n) for n in (1, 7, 0, 100)])
    assert np.array_equal(parts, stream().words(108))
    assert len(set(parts.tolist())) == 108


def test_keystream_is_the_cipher_of_the_standard(monkeypatch):
    # RFC 8439, appendix A.1, test vector 1: zero key, zero nonce, counter 0.
    monkeypatch.setattr(rng, "_derived_key", lambda *_: bytes(32))
    expected = np.frombuffer(bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28"), dtype="<u8")
    assert np.array_equal(stream().words(2), expected)


@pytest.mark.parametrize(
    "other",
    [
        stream(1),
        stream(2**32),
        stream(purpose="test2"),
        stream(purpose=""),
        stream(key=seeded_key(2)),
        stream(key=fresh_key()),
    ],
)
def test_other_addresses_are_independent(other):
    mine, theirs = stream().gaussian(20_000), other.gaussian(20_000)
    correlation = float(torch.corrcoef(torch.stack([mine, theirs]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(20_000)


def test_global_generators_are_left_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    draws(stream())
    gaussian_noise(KEY, 0, 10)
    gaussian_noise(KEY, 0, 10, secure=False)
    fresh_key()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_no_global_seed_changes_a_draw():
    torch.manual_seed(1)
    first = gaussian_noise(KEY, 0, 10, secure=False)
    torch.manual_seed(2)
    assert torch.equal(first, gaussian_noise(KEY, 0, 10, secure=False))


@pytest.mark.parametrize("secure", [True, False])
def test_noise_is_standard_normal(secure):
    noise = gaussian_noise(KEY, 7, 50_001, secure=secure)
    assert noise.dtype == torch.float64 and noise.shape == (50_001,)

    def p_value(scale):
        return stats.kstest(noise.numpy(), "norm", args=(0, scale)).pvalue

    assert p_value(1.0) > 1e-3
    assert p_value(2 / 3) < 1e-9 and p_value(3 / 2) < 1e-9


@pytest.mark.parametrize("secure", [True, False])
def test_noise_depends_on_key_and_step_alone(secure):
    noise = gaussian_noise(KEY, 7, 100, secure=secure)
    assert torch.equal(noise, gaussian_noise(KEY, 7, 100, secure=secure))
    assert not torch.equal(noise, gaussian_noise(KEY, 8, 100, secure=secure))
    assert not torch.equal(noise, gaussian_noise(seeded_key(2), 7, 100, secure=secure))


def test_gaussian_over_chunks(monkeypatch):
    """Chunks bound the memory; each, also an odd last one, is filled with fresh numbers."""
    monkeypatch.setattr(rng, "_CHUNK", 1000)
    noise = stream().gaussian(20_999)
    assert noise.unique().numel() == 20_999
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 0.035


def test_the_two_halves_of_a_pair_are_uncorrelated():
    noise = stream().gaussian(40_000)
    pairs = torch.stack([noise[:20_000], noise[20_000:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / math.sqrt(20_000)
    assert abs(float(torch.corrcoef(pairs**2)[0, 1])) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("edge", [0.0, 1 - 2.0**-53])
def test_gaussian_is_finite_at_the_ends_of_the_uniform(monkeypatch, edge):
    monkeypatch.setattr(Stream, "uniform", lambda self, n: np.full(n, edge))
    assert stream().gaussian(10).isfinite().all()


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_small_sizes(n):
    noise = stream()
    assert noise.words(n).shape == noise.uniform(n).shape == noise.integers(5, n).shape == (n,)
    assert noise.gaussian(n).shape == noise.subset(3, n).shape == (n,)


def test_uniform():
    values = stream().uniform(50_000)
    assert values.dtype == np.float64 and values.min() >= 0 and values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert np.array_equal(values * 2.0**53 % 1, np.zeros(50_000))


def test_integers_are_uniform():
    counts = np.bincount(stream().integers(7, 70_000), minlength=7)
    assert counts.sum() == 70_000 and stats.chisquare(counts).pvalue > 1e-3
    assert stream().integers(1, 5).tolist() == [0] * 5
    assert stream().integers(2**63, 1000).min() >= 0


def test_integers_reject_the_incomplete_last_interval():
    # 2^64 = 8·2^61 and bound = 3·2^61: without rejection the residues below 2^62 come from 6 of 8
    # intervals, with it from 4 of 6.
    below = (stream().integers(3 * 2**61, 20_000) < 2**62).mean()
    assert abs(below - 4 / 6) < 5 * math.sqrt(2 / 9 / 20_000)


def test_binomial():
    counts = [stream(step).binomial(20, 0.3) for step in range(3000)]
    expected = stats.binom.pmf(np.arange(21), 20, 0.3) * 3000
    observed = np.bincount(counts, minlength=21)
    kept = expected > 5
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    assert stats.chi2.sf(statistic, kept.sum() - 1) > 1e-3


def test_binomial_limits():
    for step in range(20):
        assert stream(step).binomial(50, 0.0) == 0
        assert stream(step).binomial(50, 1.0) == 50
        assert stream(step).binomial(0, 0.5) == 0
        assert stream(step).binomial(10**7, 1e-13) == 0
        # mean 100,000, deviation 315
        assert abs(stream(step).binomial(10**7, 0.01) - 100_000) < 6 * 315
    assert isinstance(stream().binomial(10, 0.5), int)


@pytest.mark.parametrize(("population", "size"), [(10, 0), (10, 3), (10, 5), (10, 8), (10, 10)])
def test_subset_is_sorted_and_every_member_equally_likely(population, size):
    counts = np.zeros(population)
    for step in range(2000):
        subset = stream(step).subset(population, size)
        assert subset.dtype == torch.int64 and subset.shape == (size,)
        assert (subset[1:] > subset[:-1]).all()
        counts[subset.numpy()] += 1
    share = size / population
    deviation = math.sqrt(2000 * share * (1 - share))
    assert np.abs(counts - 2000 * share).max() <= 5 * deviation


def test_subset_pairs_are_uniform():
    pairs = [tuple(stream(step).subset(5, 2).tolist()) for step in range(2000)]
    counts = [pairs.count((i, j)) for i in range(5) for j in range(i + 1, 5)]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_small_subset_of_a_huge_population_costs_its_size():
    subset = stream().subset(10**15, 1000)  # a population that no array could hold
    assert subset.unique().numel() == 1000 and subset.min() >= 0 and subset.max() < 10**15


@pytest.mark.parametrize("size", [-1, 11])
def test_subset_refuses_impossible_sizes(size):
    with pytest.raises(ValueError, match=rf"Expected size={size} in \[0, 10\]"):
        stream().subset(10, size)
