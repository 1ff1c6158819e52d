"""Scores from released gradients, against the paper's formula in plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import accumulate_score
from reference import top_k as naive_top_k
from tptopk_pl.selectors import SELECTORS, ScoreAccumulator, num_active, top_k

D, STEPS, WINDOW = 7, 11, 3
DEVIATIONS = [0.1 + 0.3 * (step % 4) for step in range(STEPS)]  # σ and C may follow a schedule


def gradients() -> torch.Tensor:
    return torch.randn(STEPS, D, generator=torch.Generator().manual_seed(1))


def accumulated(steps: range = range(STEPS)) -> ScoreAccumulator:
    warmup = ScoreAccumulator(D, WINDOW)
    for step in steps:
        warmup.add(gradients()[step], DEVIATIONS[step] ** 2)
    return warmup


def test_score_is_the_papers_formula_with_each_steps_own_variance() -> None:
    total = torch.zeros(D, dtype=torch.float64)
    for gradient, deviation in zip(gradients().double(), DEVIATIONS, strict=True):
        total = accumulate_score(total, gradient, noise_std=deviation)
    score = SELECTORS["score"](accumulated())
    torch.testing.assert_close(score.double(), total / STEPS, rtol=1e-5, atol=1e-6)


def test_negative_scores_survive_and_rank() -> None:
    """Clamped at zero, they would tie, and the choice would fall to the index."""
    warmup = ScoreAccumulator(3, 1)
    warmup.add(torch.tensor([0.1, 0.3, 0.2]), noise_variance=1.0)
    score = SELECTORS["score"](warmup)
    torch.testing.assert_close(score, torch.tensor([-0.99, -0.91, -0.96]))
    assert top_k(score, 2).tolist() == [1, 2]


def test_score_before_any_step_is_zero() -> None:
    assert SELECTORS["score"](ScoreAccumulator(D, 2)).equal(torch.zeros(D))


def test_sums_halves_and_windows_equal_plain_loops() -> None:
    """Step 0 and window 0 belong to half 0; the open window is in no half."""
    energy, windows = torch.zeros(2, D), torch.zeros(2, D)
    released = gradients()
    for step in range(STEPS):
        energy[step % 2] += released[step] ** 2 - DEVIATIONS[step] ** 2
    for window in range(STEPS // WINDOW):
        steps = range(window * WINDOW, (window + 1) * WINDOW)
        variance = sum(DEVIATIONS[step] ** 2 for step in steps)
        windows[window % 2] += sum(released[step] for step in steps) ** 2 - variance
    warmup = accumulated()
    torch.testing.assert_close(warmup.energy, energy)
    torch.testing.assert_close(warmup.window_energy, windows)
    torch.testing.assert_close(warmup.total, released.sum(0))
    torch.testing.assert_close(warmup.window_total, released[STEPS - STEPS % WINDOW :].sum(0))
    assert warmup.num_steps == STEPS


@pytest.mark.parametrize("done", range(STEPS))
def test_going_on_from_a_state_equals_never_having_stopped(done: int) -> None:
    """Also in the middle of a window."""
    resumed = ScoreAccumulator(D, window=99)  # the state's window counts
    resumed.load_state_dict(accumulated(range(done)).state_dict())
    for step in range(done, STEPS):
        resumed.add(gradients()[step], DEVIATIONS[step] ** 2)
    whole = accumulated()
    for name, value in whole.state_dict().items():
        other = resumed.state_dict()[name]
        assert other.equal(value) if isinstance(value, torch.Tensor) else other == value


def test_state_is_plain(tmp_path) -> None:
    """It goes into a checkpoint that is loaded with ``weights_only=True``."""
    torch.save(accumulated().state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert state["num_steps"] == STEPS


def test_gradients_of_low_precision_are_summed_in_float32() -> None:
    warmup = ScoreAccumulator(1, 100)
    for _ in range(300):
        warmup.add(torch.ones(1, dtype=torch.bfloat16), 0.0)  # bfloat16 counts to 256
    assert float(warmup.energy.sum()) == 300.0
    assert float(warmup.total) == 300.0


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), st.data())
def test_top_k_is_exact_and_breaks_ties_by_index(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values)))
    scores = torch.tensor(values, dtype=torch.float32)
    assert top_k(scores, k).tolist() == naive_top_k(scores, k)


def test_top_k_of_many_ties_takes_the_lowest_indices() -> None:
    """Short vectors are sorted stably by chance."""
    assert top_k(torch.zeros(10_000), 1000).equal(torch.arange(1000))


@pytest.mark.parametrize(
    ("ratio", "total", "k"),
    [(0.29, 100, 29), (0.1, 26_010, 2601), (0.1, 19, 1), (1.0, 7, 7), (0.999, 1000, 999)],
)
def test_num_active_is_the_floor_without_rounding_errors(ratio: float, total: int, k: int) -> None:
    """0.29 · 100 is 28.999999999999996 in floats."""
    assert num_active(ratio, total) == k


def test_a_ratio_that_keeps_nothing_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(ValueError, match=r"active_ratio=0\.001 .* 100 .* use at least 1\.0e-02"):
        num_active(0.001, 100)
