"""ε, δ and calibration against dp_accounting, Opacus, a closed form, and hand-checked values."""

import math
import time
import warnings
from functools import partial

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from tptopk_pl.accounting import (
    Segment,
    calibrate,
    delta,
    epsilon,
    epsilon_rdp,
    epsilon_replace_one,
)

WORKED = [Segment(1.0, 0.01, 500), Segment(0.8, 0.01, 1500)]
# 30 epochs of CIFAR-10 at B = 1024: ⌈50,000 / 1024⌉ = 49 steps each
CIFAR_RATE, CIFAR_STEPS = 1024 / 50_000, 30 * 49


def two_phases(sigma, rate=0.01, steps=1500, ratio=1.0):
    warmup = steps * 3 // 10
    return [Segment(sigma, rate, warmup), Segment(ratio * sigma, rate, steps - warmup)]


def event(segments):
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    s.sampling_rate, dp_accounting.GaussianDpEvent(s.noise_multiplier)
                ),
                s.num_steps,
            )
            for s in segments
        ]
    )


def gaussian_epsilon(mu, target):
    """ε of the Gaussian mechanism with sensitivity ÷ noise = mu; Balle and Wang 2018, Theorem 8."""

    def excess(eps):
        second = math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
        return norm.cdf(mu / 2 - eps / mu) - second - target

    return brentq(excess, 0, 1000, xtol=1e-12)


# --- outside oracles ---------------------------------------------------------------------------


def test_worked_example():
    assert epsilon(WORKED, 1e-5) == pytest.approx(3.967, abs=0.004)
    assert epsilon_rdp(WORKED, 1e-5) == pytest.approx(4.517, abs=0.002)


@pytest.mark.parametrize(
    "segments",
    [WORKED, [Segment(4.0, 0.05, 300)], [Segment(0.6, 0.005, 50), Segment(2.0, 0.1, 20)]],
)
def test_agrees_with_dp_accounting(segments):
    composed = event(segments)

    def pld(relation):
        accountant = PLDAccountant(relation, value_discretization_interval=5e-4)
        return accountant.compose(composed).get_epsilon(1e-5)

    relations = dp_accounting.NeighboringRelation
    assert epsilon(segments, 1e-5) == pytest.approx(pld(relations.ADD_OR_REMOVE_ONE), rel=2e-3)
    assert epsilon_replace_one(segments, 1e-5) == pytest.approx(
        pld(relations.REPLACE_ONE), rel=2e-3
    )
    rdp = RdpAccountant().compose(composed).get_epsilon(1e-5)
    assert epsilon_rdp(segments, 1e-5) == pytest.approx(rdp, rel=2e-3)
    assert epsilon(segments, 1e-5) < epsilon_rdp(segments, 1e-5)


def test_agrees_with_opacus():
    history = [(s.noise_multiplier, s.sampling_rate, s.num_steps) for s in WORKED]
    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = history
    # PRV gives an upper bound whose error is at most eps_error on either side.
    assert epsilon(WORKED, 1e-5) == pytest.approx(prv.get_epsilon(1e-5, eps_error=0.01), abs=0.02)
    assert epsilon_rdp(WORKED, 1e-5) == pytest.approx(rdp.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("steps", [1, 1500, 100_000])
@pytest.mark.parametrize("mu", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("target", [1e-3, 1e-5, 1e-10])
def test_full_batches_are_the_gaussian_mechanism_and_never_below_it(mu, steps, target):
    """The discretization and the rounding of long compositions may only raise ε, and hardly do."""
    exact = gaussian_epsilon(mu, target)
    found = epsilon([Segment(math.sqrt(steps) / mu, 1.0, steps)], target)
    assert exact <= found <= 1.003 * exact


def test_delta_below_double_precision_gives_no_epsilon():
    """The FFT of 100,000 steps is wrong by some 1e-13 in δ: there it must not claim an ε."""
    segment = Segment(math.sqrt(1e5) / 3, 1.0, 10**5)
    assert epsilon([segment], 1e-12) == math.inf
    assert epsilon([segment], 2e-12) >= gaussian_epsilon(3.0, 2e-12)


@pytest.mark.parametrize(("target", "sigma"), [(1, 3.054), (2, 1.749), (3, 1.321), (8, 0.799)])
def test_cifar_table(target, sigma):
    found = calibrate(lambda s: two_phases(s, CIFAR_RATE, CIFAR_STEPS), target, 1e-5)
    assert found == pytest.approx(sigma, rel=3e-3)


def test_replace_one_is_not_twice_the_clip_norm():
    """Accounting replace-one by doubling the sensitivity would give 13.2 for this plan."""
    plan = two_phases(1.321, CIFAR_RATE, CIFAR_STEPS)
    assert epsilon(plan, 1e-5) == pytest.approx(3.0, rel=5e-3)
    assert epsilon_replace_one(plan, 1e-5) == pytest.approx(5.47, rel=5e-3)


# --- properties of the figures -------------------------------------------------------------------


def test_no_steps_and_no_noise():
    idle = [Segment(1.0, 0.01, 0), Segment(0.0, 0.01, 0)]
    for figure in (epsilon, epsilon_rdp, epsilon_replace_one):
        assert figure([], 1e-5) == figure(idle, 1e-5) == 0.0
        assert figure([Segment(1.0, 0.01, 10), Segment(0.0, 0.01, 1)], 1e-5) == math.inf
    assert delta([], 1.0) == delta(idle, 1.0) == 0.0
    assert delta([Segment(0.0, 0.01, 1)], 1.0) == 1.0


def test_a_segment_may_be_cut_without_changing_epsilon():
    whole = epsilon([Segment(1.0, 0.01, 900)], 1e-5)
    cut = epsilon([Segment(1.0, 0.01, 300), Segment(1.0, 0.01, 600)], 1e-5)
    assert cut == pytest.approx(whole, rel=1e-6)


def test_epsilon_never_falls_with_steps():
    for figure in (epsilon, epsilon_rdp):
        spent = [figure([Segment(1.0, 0.02, n)], 1e-5) for n in (1, 2, 3, 10, 100, 101)]
        assert spent == sorted(spent) and spent[0] > 0


def test_epsilon_does_not_fall_at_the_switch():
    """A grid chosen by the phase that runs would be finer in a noisy phase 2, and lower ε there."""
    prefixes = [
        [Segment(1.0, 0.02, min(n, 3000)), Segment(8.0, 0.02, max(n - 3000, 0))]
        for n in (2999, 3000, 3001)
    ]
    spent = [epsilon(prefix, 1e-5) for prefix in prefixes]
    assert spent == sorted(spent)


def test_epsilon_falls_with_noise_across_changes_of_grid():
    sigmas = [1.05**i for i in range(20)]
    spent = [epsilon([Segment(s, 0.02, 100)], 1e-5) for s in sigmas]
    assert spent == sorted(spent, reverse=True)


def test_delta_is_the_inverse_of_epsilon():
    for target in (1e-3, 1e-5, 1e-9):
        assert delta(WORKED, epsilon(WORKED, target)) == pytest.approx(target, rel=1e-3)


def test_extreme_schedules_give_no_warning():
    """Opacus warns when its best order is the last one; the orders here reach further."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for segment in (Segment(50.0, 0.001, 1), Segment(0.3, 0.5, 1000), Segment(1.0, 1e-3, 5)):
            tight, loose = epsilon([segment], 1e-5), epsilon_rdp([segment], 1e-5)
            assert 0 <= tight <= loose < math.inf


def test_figures_of_a_running_training_are_quick():
    """One step's distribution and the finished phase are cached: only the running phase is new."""
    plan = two_phases(1.0)
    epsilon(plan, 1e-5)
    start = time.process_time()
    for extra in range(1, 6):
        epsilon([plan[0], Segment(1.0, 0.01, 500 + extra)], 1e-5)
    assert (time.process_time() - start) / 5 < 0.2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((-1.0, 0.1, 1), r"noise_multiplier=-1.0 in \[0, inf\)"),
        ((math.nan, 0.1, 1), "noise_multiplier=nan"),
        ((1.0, 0.0, 1), r"sampling_rate=0.0 in \(0, 1\]"),
        ((1.0, 1.1, 1), "sampling_rate=1.1"),
        ((1.0, 0.1, -1), "num_steps=-1"),
        ((1.0, 0.1, 1.5), "num_steps=1.5"),
    ],
)
def test_segment_refuses(fields, words):
    with pytest.raises(ValueError, match=words):
        Segment(*fields)


@pytest.mark.parametrize("figure", [epsilon, epsilon_rdp, epsilon_replace_one])
@pytest.mark.parametrize("target", [0.0, 1.0, -1e-5, math.nan])
def test_delta_is_checked(figure, target):
    with pytest.raises(ValueError, match=r"Expected delta=.* in \(0, 1\)"):
        figure(WORKED, target)


# --- calibration ---------------------------------------------------------------------------------


def check_calibration(schedule, target, target_delta, waste=5e-3):
    spent = epsilon(schedule(calibrate(schedule, target, target_delta)), target_delta)
    assert (1 - waste) * target <= spent <= target


@pytest.mark.parametrize(
    ("rate", "steps", "target", "target_delta"),
    [
        (0.01, 1500, 0.05, 1e-5),
        (0.01, 1500, 50.0, 1e-3),
        (0.001, 1500, 1.0, 1e-10),
        (1.0, 1500, 1.0, 1e-10),
        (1.0, 2, 50.0, 1e-3),
        (0.1, 100_000, 8.0, 1e-6),
    ],
)
def test_calibration_over_the_range(rate, steps, target, target_delta):
    check_calibration(partial(two_phases, rate=rate, steps=steps), target, target_delta)


@settings(max_examples=6)
@given(
    rate=st.floats(0.01, 1.0),
    steps=st.integers(2, 3000),
    ratio=st.floats(0.5, 2.0),
    log_target=st.floats(math.log(0.1), math.log(20.0)),
    log_delta=st.floats(math.log(1e-8), math.log(1e-3)),
)
def test_calibrated_epsilon_never_exceeds_its_target(rate, steps, ratio, log_target, log_delta):
    """A root-finder alone may stop on either side of the target."""
    schedule = partial(two_phases, rate=rate, steps=steps, ratio=ratio)
    check_calibration(schedule, math.exp(log_target), math.exp(log_delta))


def test_phases_are_calibrated_jointly():
    """Calibrating 0.3 ε and 0.7 ε (δ/2 each) apart costs much more noise for the same guarantee."""
    joint = calibrate(lambda s: two_phases(s, CIFAR_RATE, CIFAR_STEPS), 3.0, 1e-5)
    first = calibrate(lambda s: [Segment(s, CIFAR_RATE, 441)], 0.9, 5e-6)
    second = calibrate(lambda s: [Segment(s, CIFAR_RATE, CIFAR_STEPS - 441)], 2.1, 5e-6)
    apart = [Segment(first, CIFAR_RATE, 441), Segment(second, CIFAR_RATE, CIFAR_STEPS - 441)]
    assert joint < min(first, second)
    assert epsilon(apart, 1e-5) == pytest.approx(2.2, abs=0.1)


@pytest.mark.parametrize(
    ("target", "target_delta", "words"),
    [
        (0.0, 1e-5, r"target_epsilon=0.0 in \(0, inf\)"),
        (math.inf, 1e-5, "target_epsilon=inf"),
        (1.0, 0.0, r"target_delta=0.0 in \(0, 1\)"),
        (1.0, 1e-14, "target_epsilon=1.0 within reach at target_delta=1e-14"),
        (1e9, 1e-5, "target_epsilon=1000000000.0 to need noise"),
    ],
)
def test_calibration_refuses(target, target_delta, words):
    with pytest.raises(ValueError, match=words):
        calibrate(two_phases, target, target_delta)
