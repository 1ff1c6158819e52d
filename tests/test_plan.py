"""The plan: its schedule, its budget, its refusals, and its way through a checkpoint."""

import dataclasses
import json
import math
from fractions import Fraction

import pytest
import torch

from tptopk_pl import accounting
from tptopk_pl.accounting import Segment
from tptopk_pl.plan import METHODS, TwoPhasePlan

SIZES = {"num_units": 1000, "expected_batch_size": 30, "num_steps": 100, "target_delta": 1e-5}


def make(**changes):
    arguments = {**SIZES, "noise_multiplier": 1.5, **changes}
    return TwoPhasePlan.calibrate(**arguments)


# --- schedule ------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "fraction"), [(10, 0.25), (100, 0.07), (100, 0.3), (7, 0.3), (2, 0.01), (10, 0.9)]
)
def test_warmup_is_the_ceiling_of_its_share(num_steps, fraction):
    """0.07 · 100 is 7.000000000000001 in floating point, and 7 steps nevertheless."""
    plan = make(num_steps=num_steps, warmup_fraction=fraction)
    assert plan.warmup_steps == math.ceil(Fraction(str(fraction)) * num_steps)


def test_warmup_steps_override_the_fraction():
    assert make(warmup_steps=1, warmup_fraction=0.5).warmup_steps == 1
    assert make(warmup_steps=99).warmup_steps == 99


def test_phases_and_noise_by_step():
    plan = make(warmup_steps=40, noise_multiplier_ratio=2.0)
    assert [plan.phase_at(step) for step in (0, 39, 40, 99)] == [1, 1, 2, 2]
    assert [plan.noise_multiplier_at(step) for step in (0, 39, 40, 99)] == [1.5, 1.5, 3.0, 3.0]
    for step in range(101):  # what was planned is what the steps do
        first, second = plan.segments_until(step)
        assert first.num_steps == sum(plan.phase_at(t) == 1 for t in range(step))
        assert first.num_steps + second.num_steps == step
    assert plan.segments == [Segment(1.5, 0.03, 40), Segment(3.0, 0.03, 60)]


def test_sampling_rate_is_batch_over_units():
    """Not one over the number of batches of an epoch, which rounds: here 1/34 or 1/33."""
    assert make().sampling_rate == 30 / 1000


@pytest.mark.parametrize("step", [-1, 1.0])
def test_steps_are_counted_in_whole_numbers(step):
    with pytest.raises(ValueError, match=f"Expected step={step}"):
        make().epsilon_at(step)


def test_steps_beyond_the_plan_are_charged():
    """A run without a budget may make them; they must not be free."""
    plan = make(warmup_steps=40)
    assert [segment.num_steps for segment in plan.segments_until(150)] == [40, 110]
    assert plan.epsilon_at(150) > plan.epsilon


@pytest.mark.parametrize("method", ["tp_topk", "tp_rand"])
def test_two_phase_methods_share_one_schedule(method):
    """Methods are compared under the same budget and the same steps."""
    assert METHODS[method].has_warmup
    assert make(method=method).segments == make().segments


def test_one_phase_methods():
    plan = make(method="dp_sgd")
    assert plan.warmup_steps == 0 and plan.phase_at(0) == 2
    assert plan.segments == [Segment(1.5, 0.03, 0), Segment(1.5, 0.03, 100)]
    assert plan.epsilon == pytest.approx(make().epsilon, rel=1e-6)


def test_no_noise_is_allowed_and_gives_no_guarantee():
    for plan in (
        make(noise_multiplier=0),
        make(noise_multiplier=0, method="dp_sgd"),
        make(noise_multiplier=None, method="non_private"),
        make(noise_multiplier=0, method="non_private"),
    ):
        assert plan.noise_multiplier == plan.phase2_noise_multiplier == 0.0
        assert plan.epsilon == plan.epsilon_rdp == plan.epsilon_at(1) == math.inf
        assert plan.epsilon_at(0) == plan.epsilon_rdp_at(0) == 0.0


# --- budget ------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.0])
def test_planned_spent_and_displayed_epsilon_agree(ratio):
    target = {"noise_multiplier": None, "target_epsilon": 2.0, "noise_multiplier_ratio": ratio}
    plan = make(**target)
    assert plan.phase2_noise_multiplier == pytest.approx(ratio * plan.noise_multiplier)
    assert 0.995 * 2.0 <= plan.epsilon <= 2.0
    assert plan.epsilon == plan.epsilon_at(100) == accounting.epsilon(plan.segments, 1e-5)
    assert plan.epsilon_rdp == plan.epsilon_rdp_at(100) > plan.epsilon
    spent = [plan.epsilon_at(step) for step in (0, 1, 10, 29, 30, 31, 60, 100)]
    assert spent == sorted(spent) and spent[0] == 0.0


def test_warmup_spends_its_share_of_rdp():
    """With equal σ and q every Rényi divergence of the warm-up is T1/T of the whole."""
    plan = make(warmup_fraction=0.3)
    first, second = plan.segments
    assert first.num_steps / (first.num_steps + second.num_steps) == 0.3
    assert plan.epsilon_rdp_at(30) < plan.epsilon_rdp


# --- refusals ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": None}, "exactly one of target_epsilon=None, noise_multiplier=None"),
        ({"target_epsilon": 1.0}, "exactly one of target_epsilon=1.0, noise_multiplier=1.5"),
        ({"method": "tp"}, r"method='tp' in \{tp_topk, tp_rand, dp_sgd, non_private\}"),
        ({"method": "non_private"}, "no privacy target for method='non_private'"),
        ({"method": "dp_sgd", "warmup_steps": 5}, "warmup_steps=5 to be 0 for method='dp_sgd'"),
        ({"warmup_steps": 0}, r"warmup_steps=0 in \[1, num_steps=100\]"),
        ({"warmup_steps": 101}, r"warmup_steps=101 in \[1, num_steps=100\]"),
        ({"warmup_fraction": 1.0}, r"warmup_fraction=1.0 in \(0, 1\)"),
        ({"warmup_fraction": 0.0}, r"warmup_fraction=0.0 in \(0, 1\)"),
        ({"noise_multiplier_ratio": 0.0}, r"noise_multiplier_ratio=0.0 in \(0, inf\)"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier=-1.0 in \[0, inf\)"),
        ({"target_epsilon": -1.0, "noise_multiplier": None}, "target_epsilon=-1.0"),
        ({"target_delta": 0.0}, r"target_delta=0.0 in \(0, 1\)"),
        ({"target_delta": "1e-5"}, "target_delta='1e-5'"),
        ({"num_units": 0}, "num_units=0"),
        ({"num_steps": 10.0}, "num_steps=10.0"),
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
        ({"expected_batch_size": 1001}, r"expected_batch_size=1001 in \[1, num_units=1000\]"),
    ],
)
def test_refusals_name_the_field(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_plan_never_changes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().noise_multiplier = 0.1


# --- checkpoint ------------------------------------------------------------


def test_plan_survives_a_checkpoint_and_json(tmp_path):
    plan = make(noise_multiplier=None, target_epsilon=5.0, warmup_steps=7)
    assert plan.epsilon <= 5.0  # a figure already worked out must not enter the state
    torch.save(plan.to_dict(), tmp_path / "plan.pt")
    state = torch.load(tmp_path / "plan.pt", weights_only=True)
    assert TwoPhasePlan.from_dict(state) == plan
    assert TwoPhasePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_from_dict_refuses_what_is_no_plan():
    state = make().to_dict()
    with pytest.raises(ValueError, match=r"missing or unknown: \['num_units'\]"):
        TwoPhasePlan.from_dict({k: v for k, v in state.items() if k != "num_units"})
    with pytest.raises(ValueError, match=r"missing or unknown: \['extra'\]"):
        TwoPhasePlan.from_dict({**state, "extra": 1})
    with pytest.raises(ValueError, match="phase2_noise_multiplier=-1"):
        TwoPhasePlan.from_dict({**state, "phase2_noise_multiplier": -1})
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.5 to be 0"):
        TwoPhasePlan.from_dict({**state, "method": "non_private", "warmup_steps": 0})
