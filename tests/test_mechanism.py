"""Clip, sum, noise, reduce, scale: against the equations in plain loops."""

import inspect
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from reference import private_gradient, record_gradients, unit_gradients
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.mechanism import CLIP_MARGIN, GaussianMechanism, clip_factors
from tptopk_pl.rng import gaussian_noise, seeded_key
from tptopk_pl.support import Support

KEY = seeded_key(2)
CPU = torch.device("cpu")

# ---------------------------------------------------------------------- clip factors


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), st.floats(1e-3, 1e3))
@example([1.0], 1.0)
@example([1e-30] * 3, 0.5)
@example([0.6, 0.8], 1.0)
def test_clipped_norms_are_below_c_in_float32(values: list[float], max_grad_norm: float) -> None:
    """Whatever the length was before: much, slightly or not at all too long."""
    direction = torch.tensor(values, dtype=torch.float32)
    length = direction.norm()
    if length <= 1e-20:
        return
    for stretch in (0.5, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + CLIP_MARGIN, 3.7, 1e6):
        gradient = direction / length * (max_grad_norm * stretch)
        factor = clip_factors(gradient.norm()[None], max_grad_norm)
        clipped = factor * gradient
        assert float(clipped.double().norm()) <= max_grad_norm
        assert 0 < float(factor) <= 1


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
def test_rounding_of_the_operands_stays_within_the_margin(operands: torch.dtype) -> None:
    """A norm from rounded operands is off by the rounding; the sum's sensitivity is still C."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(200, 300, generator=generator) * 5
    norms = gradients.to(operands).float().norm(dim=1)
    clipped = clip_factors(norms, 1.0)[:, None] * gradients
    assert float(clipped.double().norm(dim=1).max()) <= 1.0
    assert float(clipped.norm(dim=1).min()) > 1 - 2 * CLIP_MARGIN  # and little is given away


def test_short_gradients_are_left_alone() -> None:
    assert clip_factors(torch.tensor([0.0, 1e-38, 0.5, 0.999]), 1.0).tolist() == [1.0] * 4


@pytest.mark.parametrize("max_grad_norm", [1.0, math.inf])
def test_units_without_a_finite_norm_contribute_nothing(max_grad_norm: float) -> None:
    norms = torch.tensor([math.nan, math.inf, -math.inf, 0.5])
    assert clip_factors(norms, max_grad_norm).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_infinite_c_clips_nothing() -> None:
    assert clip_factors(torch.tensor([0.0, 1.0, 1e38]), math.inf).tolist() == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- release


def begin(
    mechanism: GaussianMechanism,
    k: int,
    *,
    step: int = 0,
    sigma: float = 1.0,
    max_grad_norm: float = 0.4,
) -> None:
    mechanism.begin_step(
        step, noise_multiplier=sigma, max_grad_norm=max_grad_norm, num_active=k, device=CPU
    )


def released(
    k: int = 20_000,
    *,
    sigma: float = 2.0,
    max_grad_norm: float = 0.5,
    batch_size: int = 8,
    step: int = 0,
    key: bytes | None = KEY,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
    secure_rng: bool = True,
) -> Tensor:
    mechanism = GaussianMechanism(batch_size, key, reduce=reduce, secure_rng=secure_rng)
    begin(mechanism, k, step=step, sigma=sigma, max_grad_norm=max_grad_norm)
    return mechanism.release()


def fits(noise: Tensor) -> float:
    return float(stats.kstest(noise.double().numpy(), "norm").pvalue)


@pytest.mark.parametrize("secure_rng", [True, False])
def test_noise_has_standard_deviation_sigma_c_over_expected_batch_size(secure_rng: bool) -> None:
    noise = released(secure_rng=secure_rng) * 8 / (2.0 * 0.5)
    assert fits(noise) > 1e-3
    assert fits(noise * 2 / 3) < 1e-6
    assert fits(noise * 3 / 2) < 1e-6


def test_each_step_has_noise_of_its_own() -> None:
    """The same noise twice would cancel in a difference of two releases."""
    first, second = released(step=0), released(step=1)
    assert fits((first - second) * 8 / math.sqrt(2)) > 1e-3
    assert released(step=1).equal(second)
    assert not released(step=1, key=seeded_key(3)).equal(second)


@pytest.mark.parametrize("max_grad_norm", [1.0, math.inf])
def test_no_noise_multiplier_no_noise(max_grad_norm: float) -> None:
    """0 · inf would be NaN."""
    assert released(sigma=0.0, max_grad_norm=max_grad_norm).equal(torch.zeros(20_000))


def test_only_rank_zero_adds_noise() -> None:
    """Each rank adding its own would add up; the reduced total has that of one."""
    ranks = [
        GaussianMechanism(8, KEY if rank == 0 else None, reduce=lambda total: total)
        for rank in range(3)
    ]
    for rank in ranks:
        begin(rank, 20_000, sigma=2.0, max_grad_norm=0.5)
    totals = [rank.release() for rank in ranks]
    assert totals[1].equal(torch.zeros(20_000))
    assert totals[2].equal(torch.zeros(20_000))
    assert fits(torch.stack(totals).sum(0) * 8) > 1e-3


def test_noise_is_in_before_anything_leaves_the_rank_and_scaling_comes_after() -> None:
    sent = []

    def reduce(total: Tensor) -> Tensor:
        sent.append(total.clone())
        return total + 16.0  # what the other ranks had

    result = released(reduce=reduce)
    assert fits(sent[0]) > 1e-3
    torch.testing.assert_close(result, (sent[0] + 16.0) / 8)


# ---------------------------------------------------------------------- a whole step


class Data:
    """Seven records of four units; unit 3 has none."""

    inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 3
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    units = (0, 1, 1, 2, 0, 2, 1)
    num_units = 4


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture
def engine(network: nn.Module) -> Iterator[GradientEngine]:
    engine = GradientEngine(network, dict(network.named_parameters()))
    engine.attach()
    yield engine
    engine.detach()


def run_chunk(
    engine: GradientEngine, network: nn.Module, units: tuple[int, ...], inputs: Tensor = Data.inputs
) -> None:
    """Forward and backward over the records of these units; the engine then holds them."""
    places = [place for place, unit in enumerate(Data.units) if unit in units]
    owners = torch.tensor([units.index(Data.units[place]) for place in places])
    takes_mean = "mean_loss" in inspect.signature(engine.begin).parameters
    engine.begin(owners, len(units), **({"mean_loss": False} if takes_mean else {}))
    F.cross_entropy(network(inputs[places]), Data.labels[places], reduction="sum").backward()


def naive(
    network: nn.Module, mask: Tensor, *, sigma: float, max_grad_norm: float, batch_size: int
) -> Tensor:
    parameters = list(network.parameters())
    rows = record_gradients(
        lambda i: F.cross_entropy(network(Data.inputs[i]), Data.labels[i]), parameters, 7
    )
    noise = torch.zeros(mask.shape)
    k = int(mask.sum())
    noise[mask.bool()] = gaussian_noise(KEY, 4, k).float()  # one draw for each active coordinate
    return private_gradient(
        unit_gradients(rows, Data.units, Data.num_units),
        mask,
        noise,
        max_grad_norm=min(max_grad_norm, 1e30),  # the equations' 0 · inf is NaN
        noise_multiplier=sigma,
        expected_batch_size=batch_size,
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunks", [[(0, 1, 2, 3)], [(2, 0, 3), (1,)]])
@pytest.mark.parametrize(("sigma", "max_grad_norm"), [(1.5, 0.4), (0.0, 0.4), (0.0, math.inf)])
def test_a_step_equals_the_equations(
    network: nn.Module,
    engine: GradientEngine,
    sparse: bool,
    chunks: list[tuple[int, ...]],
    sigma: float,
    max_grad_norm: float,
) -> None:
    """Mean over a unit's records, mask, clip, sum over chunks, noise, expected batch size."""
    sizes = tuple(parameter.numel() for parameter in network.parameters())
    support = Support.dense(sizes)
    if sparse:
        support = Support(torch.tensor([0, 3, 11, 21, 25, 30, 37]), sizes)
        engine.set_support(support)
    mechanism = GaussianMechanism(6, KEY)
    begin(mechanism, support.num_active, step=4, sigma=sigma, max_grad_norm=max_grad_norm)
    for units in chunks:
        run_chunk(engine, network, units)
        mechanism.add_chunk(engine)
    result = mechanism.release()
    engine.end()
    mask = torch.zeros(support.num_total)
    mask[support.indices] = 1
    # The reference clips to C itself, the mechanism to C less its margin.
    bound = max_grad_norm * (1 - CLIP_MARGIN)
    expected = naive(network, mask, sigma=0.0, max_grad_norm=bound, batch_size=6)
    if sigma:
        noised = naive(network, mask, sigma=sigma, max_grad_norm=max_grad_norm, batch_size=6)
        clipped = naive(network, mask, sigma=0.0, max_grad_norm=max_grad_norm, batch_size=6)
        expected = expected + noised - clipped
    torch.testing.assert_close(result, expected[support.indices], rtol=1e-4, atol=1e-6)
    assert expected[support.indices].abs().max() > 1e-3


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e38])
def test_a_poisoned_unit_adds_nothing_and_a_huge_one_at_most_c(poison: float) -> None:
    """0 · NaN is NaN: its rows must be left out, not weighed with 0."""
    inputs = Data.inputs.clone()
    inputs[1] = poison  # a record of unit 1
    network = nn.Sequential(nn.Linear(5, 3))
    engine = GradientEngine(network, dict(network.named_parameters()))
    engine.attach()
    sums = []
    for units in ((0, 1, 2), (0, 2)):
        mechanism = GaussianMechanism(6, None)
        begin(mechanism, 18)
        run_chunk(engine, network, units, inputs)
        mechanism.add_chunk(engine)
        sums.append(mechanism.release())
    assert torch.isfinite(sums[0]).all()
    influence = float((sums[0] - sums[1]).norm()) * 6
    if math.isfinite(poison):
        assert influence <= 0.4  # C
    else:
        assert influence < 1e-6
    engine.detach()


def test_what_an_interrupted_step_summed_is_discarded(
    network: nn.Module, engine: GradientEngine
) -> None:
    """Joined to the next step, a unit drawn in both would count twice."""
    results = []
    for interrupted in (True, False):
        mechanism = GaussianMechanism(6, None)
        if interrupted:
            begin(mechanism, engine.num_active)
            run_chunk(engine, network, (0, 1))
            mechanism.add_chunk(engine)
        begin(mechanism, engine.num_active)
        run_chunk(engine, network, (0, 2))
        mechanism.add_chunk(engine)
        results.append(mechanism.release())
    assert results[0].equal(results[1])
    assert results[0].abs().max() > 0


def test_no_sum_without_noise_is_kept(network: nn.Module, engine: GradientEngine) -> None:
    mechanism = GaussianMechanism(6, KEY)
    begin(mechanism, engine.num_active)
    run_chunk(engine, network, (0, 1))
    mechanism.add_chunk(engine)
    assert mechanism._sum.any()
    assert mechanism.release().any()
    assert not mechanism._sum.any()


def test_a_sum_is_released_once() -> None:
    mechanism = GaussianMechanism(6, None)
    begin(mechanism, 3)
    mechanism.release()
    with pytest.raises(AssertionError):
        mechanism.release()
