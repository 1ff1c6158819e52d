"""The engine as a whole: chunks, units, supports, faults, what it leaves alone and refuses."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import reference
from tests.test_gradients_layers import Standardized, batch, check, random_support, trained
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.support import Support


def armed(model: nn.Module, n: int, support: Support | None = None) -> GradientEngine:
    engine = GradientEngine(model, trained(model))
    engine.set_support(support)
    engine.attach()
    engine.begin(torch.arange(n), n)
    return engine


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


# Models ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the output layer, and a block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        for _ in range(3):
            hidden = torch.tanh(self.block(hidden))
        return self.head(hidden)


class InPlace(nn.Module):
    """Activations and sums in place, directly behind layers of every saved kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, 3)
        self.steps = nn.Conv1d(3, 2, 3)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.conv1(x))
        y = self.norm(self.conv2(x))
        y += x
        z = self.steps(F.relu_(y).flatten(2))
        z += 1
        z = self.linear(z.transpose(1, 2))
        z *= 2
        return F.relu_(z)


TOKENS = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(0))


def test_tied_repeated_and_unused() -> None:
    """The norm is that of the sum over all calls; a layer that does not run contributes zero."""
    check(Tied(), TOKENS)


def test_in_place_operations_may_follow_a_layer() -> None:
    check(InPlace(), batch(3, 1, 5, 5))


def test_partly_frozen() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    check(model, batch(4, 4))


def test_two_modules_sharing_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    check(model, batch(4, 3))


@pytest.mark.parametrize(
    "units", [[0, 0, 1, 1, 1], [2, 0, 4, 0, 2], [4, 2, 0, 1, 3], [3, 1, 0, 5, 6]]
)
def test_units_of_several_records(units: list[int]) -> None:
    """Gradients are averaged over a unit's records; units come in any order, some without any."""
    check(mlp(), batch(5, 4), units=units)
    check(Tied(), TOKENS, units=units)
    check(nn.Conv2d(1, 2, 3), batch(5, 1, 4, 4), units=units)


def test_lstm_of_opacus() -> None:
    check(DPLSTM(3, 4, batch_first=True), batch(3, 4, 3), call=lambda m, x: m(x)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    """The recomputed forward of a checkpoint contributes once, not twice."""
    model, x = mlp(), batch(4, 4).requires_grad_()

    def norms(out: Any) -> Tensor:
        engine = armed(model, 4)
        out().square().sum().backward()
        result = engine.norms()
        engine.detach()
        return result

    expected = norms(lambda: model(x))
    found = norms(lambda: checkpoint(model, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, expected)


def test_against_opacus() -> None:
    """Opacus' own gradients by record, on a model where they are right."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)
    )
    x, y = batch(6, 1, 7, 7), torch.tensor([0, 1, 2, 0, 1, 2])
    theirs = GradSampleModule(copy.deepcopy(model), loss_reduction="mean")
    F.cross_entropy(theirs(x.clone().requires_grad_()), y).backward()
    expected = torch.cat([p.grad_sample.flatten(1) for p in theirs.parameters()], 1)
    engine = GradientEngine(model, trained(model))
    engine.attach()
    engine.begin(torch.arange(6), 6)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(engine.norms(), expected.norm(dim=1), rtol=1e-5, atol=1e-6)
    factors = torch.rand(6)
    ours = engine.weighted_sum(factors)
    torch.testing.assert_close(ours, factors @ expected, rtol=1e-5, atol=1e-5)


def test_a_private_step_from_the_equations() -> None:
    model, x, y = mlp(), batch(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    support, units = random_support(model, 0.4), [0, 1, 1, 2, 0, 3]
    plain = copy.deepcopy(model)
    rows = reference.record_gradients(
        lambda i: F.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]), list(plain.parameters()), 6
    )
    mask = torch.zeros(support.num_total).index_fill(0, support.indices, 1.0)
    noise = torch.randn(support.num_total)
    gradients = reference.unit_gradients(rows, units, 4)
    expected = reference.private_gradient(
        gradients, mask, noise, max_grad_norm=0.3, noise_multiplier=1.5, expected_batch_size=5
    )
    engine = GradientEngine(model, trained(model))
    engine.set_support(support)
    engine.attach()
    engine.begin(torch.tensor(units), 4)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    total = engine.weighted_sum((0.3 / engine.norms()).clamp(max=1))
    ours = (total + 1.5 * 0.3 * noise[support.indices]) / 5
    torch.testing.assert_close(ours, expected[support.indices], rtol=1e-5, atol=1e-6)
    assert not expected[mask == 0].any()


# Faults of a record ------------------------------------------------------------------------------


def faulty_models() -> list[tuple[nn.Module, Tensor]]:
    attention = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    return [
        (mlp(), batch(4, 4)),
        (InPlace(), batch(4, 1, 5, 5)),
        (nn.Sequential(attention), batch(4, 3, 4)),
        (nn.Sequential(nn.PReLU(3), nn.ConvTranspose1d(3, 2, 2)), batch(4, 3, 4)),
    ]


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("ratio", [None, 0.4])
@pytest.mark.parametrize("units", [[0, 1, 2, 3], [0, 1, 1, 0]])
def test_a_faulty_record_touches_its_own_unit_only(
    fault: float, case: int, ratio: float | None, units: list[int]
) -> None:
    """0 · NaN is NaN: a unit of factor 0 must be left out of both operands of every product."""
    model, x = faulty_models()[case]
    support = None if ratio is None else random_support(model, ratio)
    num_units = max(units) + 1

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        engine = GradientEngine(model, trained(model))
        engine.set_support(support)
        engine.attach()
        engine.begin(torch.tensor(units), num_units)
        model(x).square().sum().backward()
        norms = engine.norms()
        factors = torch.full((num_units,), 0.5)
        factors[1] = 0.0
        total = engine.weighted_sum(factors)
        engine.end()
        engine.detach()
        return norms, total

    norms, total = run(x)
    broken = x.clone()
    broken[1] = fault
    broken_norms, broken_total = run(broken)
    assert not broken_norms[1].isfinite()
    others = torch.arange(num_units) != 1
    torch.testing.assert_close(broken_norms[others], norms[others])
    torch.testing.assert_close(broken_total, total)


def test_norm_of_an_outer_product_of_extremes_is_never_understated() -> None:
    """(1e-30)² underflows, though 1e-30 · 1e30 = 1 is a gradient of norm 1."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1e30, 1e30], [1e-30, 0.0], [3.0, 4.0], [1e38, 1e-25]])
    g = torch.tensor([[1e-30], [1e30], [1.0], [1e-12]])
    for support, expected in (
        (None, [2**0.5, 1.0, 5.0, 1e26]),
        (Support(torch.tensor([1]), (2,)), [1.0, 0.0, 4.0, torch.inf]),
    ):
        engine = armed(model, 4, support)
        (model(x) * g).sum().backward()
        norms = engine.norms()
        assert bool((norms >= 0.999 * torch.tensor(expected)).all()), norms
        assert norms[2] == pytest.approx(expected[2])
        engine.end()
        engine.detach()


# What the engine leaves alone --------------------------------------------------------------------


def test_backpropagation_stops_below_the_lowest_active_layer() -> None:
    model = mlp()
    last = Support(torch.tensor([30 + 35]), tuple(p.numel() for p in model.parameters()))
    engine = armed(model, 3, last)
    hidden = model[:4](batch(3, 4))
    assert not hidden.requires_grad
    model[4](hidden).sum().backward()
    assert engine.weighted_sum(torch.ones(3)).shape == (1,)
    assert engine.num_active == 1


def test_detach_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(InPlace(), nn.TransformerEncoderLayer(4, 2, 4, batch_first=True))
    own = model[0].linear.forward
    model[0].linear.forward = lambda x: own(x)
    before = [dict(module.__dict__) for module in model.modules()]
    parameters = list(model.parameters())
    engine = GradientEngine(model, trained(model))
    engine.attach()
    engine.detach()
    assert before == [dict(module.__dict__) for module in model.modules()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    model[0](batch(3, 1, 5, 5)).sum().backward()
    assert model[0].conv1.weight.grad is not None
    copied = copy.deepcopy(model)
    copied[0](batch(3, 1, 5, 5)).sum().backward()
    assert copied[0].conv1.weight.grad is not None


def test_disarmed_or_without_gradients_the_original_forward_runs() -> None:
    model, x = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval(), batch(3, 5, 4)
    with torch.no_grad():
        expected = model(x)
    engine = armed(model, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    engine.end()
    torch.testing.assert_close(model(x), expected)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert not engine.bypassed


def test_the_output_is_that_of_the_plain_model() -> None:
    for model, x in faulty_models():
        expected = model(x)
        engine = armed(model, 4)
        torch.testing.assert_close(model(x), expected)
        engine.detach()


def test_user_precision_is_overridden_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 would let a unit exceed C; what the user has set is as before afterwards."""
    seen = []
    original = torch.Tensor.__matmul__

    def spy(a: Tensor, b: Tensor) -> Tensor:
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9 and later
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        else:
            seen.append(torch.get_float32_matmul_precision())
        assert not torch.is_autocast_enabled("cpu")
        return original(a, b)

    torch.set_float32_matmul_precision("medium")
    try:
        model = mlp()
        with torch.autocast("cpu", torch.bfloat16):
            engine = armed(model, 3, random_support(model, 0.5))
            model(batch(3, 4)).float().sum().backward()
            monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
            engine.weighted_sum(1 / engine.norms())
        assert set(seen) in ({"ieee"}, {"highest"})
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_bfloat16_autocast_gives_float32() -> None:
    for model, x in faulty_models():
        engine = armed(model, 4)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        norms, total = engine.norms(), engine.weighted_sum(torch.ones(4))
        assert norms.dtype == total.dtype == torch.float32
        assert norms.isfinite().all() and total.isfinite().all()
        engine.detach()
        loss = model(x).square().sum()
        expected = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in expected])
        assert (total - flat).norm() < 0.03 * flat.norm()


def test_float64() -> None:
    check(mlp().double(), batch(4, 4).double())
    model = mlp().double()
    engine = armed(model, 3)
    model(batch(3, 4).double()).sum().backward()
    assert engine.norms().dtype == torch.float64


# What the engine detects and refuses -------------------------------------------------------------


class Functional(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.linear(x), self.linear.weight)


def test_bypassed_weights_are_named_and_their_gradient_dropped() -> None:
    model = Functional()
    engine = armed(model, 4)
    model(batch(4, 3)).sum().backward()
    assert engine.bypassed == {"linear.weight"}
    assert model.linear.weight.grad is None
    engine.detach()


def test_a_graph_of_an_earlier_chunk_is_refused() -> None:
    """Its gradient would join the wrong units."""
    model = mlp()
    engine = armed(model, 4)
    stale = model(batch(4, 4)).sum()
    engine.begin(torch.arange(4), 4)
    with pytest.raises(ValueError, match="earlier physical chunk"):
        stale.backward()


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(3, 2), batch(3)),
        (nn.Linear(3, 2), batch(5, 4, 3)),
        (nn.Conv2d(4, 2, 3), batch(4, 5, 5)),
        (nn.LayerNorm(4), batch(4)),
        (nn.PReLU(), batch(5, 3)),
    ],
)
def test_an_input_without_a_dimension_of_records_is_refused(layer: nn.Module, x: Tensor) -> None:
    model = nn.Sequential(layer)
    armed(model, 4)
    with pytest.raises(ValueError, match=rf"0 \({type(layer).__name__}\).*4"):
        model(x)


class ClassToken(nn.Module):
    """A bare parameter beside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.token)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(2, 2), "weight", amount=1)


REFUSED: list[tuple[Any, str]] = [
    (ClassToken, r"0 \(ClassToken\): token sits beside .* submodule of its own"),
    (lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]), "submodule of its own"),
    (lambda: nn.BatchNorm2d(2), r"ModuleValidator\.fix"),
    (lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True), "track_running_stats=F"),
    (lambda: nn.LSTM(2, 2), r"opacus\.layers\.DPLSTM"),
    (lambda: nn.GRU(2, 2), r"opacus\.layers\.DPGRU"),
    (lambda: nn.RNN(2, 2), r"opacus\.layers\.DPRNN"),
    (lambda: nn.LSTMCell(2, 2), r"DPLSTMCell"),
    (lambda: nn.EmbeddingBag(2, 2), "Use nn.Embedding"),
    (lambda: nn.Embedding(2, 2, max_norm=1.0), "Set max_norm=None"),
    (lambda: nn.Embedding(2, 2, scale_grad_by_freq=True), "Set scale_grad_by_freq=False"),
    (lambda: nn.Embedding(2, 2, sparse=True), "Set sparse=False"),
    (lambda: nn.MultiheadAttention(2, 1), "Construct with batch_first=True"),
    (parametrized, "remove_parametrizations"),
    (pruned, r"prune\.remove"),
    (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), "remove_spectral_norm"),
    (lambda: nn.Linear(2, 2, dtype=torch.complex64), "real floating-point"),
    (lambda: nn.LazyLinear(2), "synthetic batch"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
def test_refusals(make: Any, text: str) -> None:
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match=text):
        GradientEngine(model, trained(model))


def test_all_refusals_come_in_one_message() -> None:
    model = nn.ModuleDict({"a": nn.LSTM(2, 2), "b": nn.BatchNorm1d(2), "c": nn.Linear(2, 2)})
    stray = nn.Parameter(torch.ones(1))
    frozen = model["c"].bias.requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        GradientEngine(model, {**trained(model), "stray": stray, "c.bias": frozen})
    text = str(caught.value)
    assert [line[:4] for line in text.splitlines()[1:]] == ["- c.", "- a ", "- b ", "- st"]


def test_parameters_of_the_model_itself_are_refused() -> None:
    model = Standardized(1, 1, 1)
    with pytest.raises(ValueError, match="weight, bias sits on the model itself"):
        GradientEngine(model, trained(model))


def test_a_support_of_another_model_is_refused() -> None:
    model = mlp()
    engine = GradientEngine(model, trained(model))
    with pytest.raises(ValueError, match="sizes"):
        engine.set_support(Support(torch.tensor([0]), (3,)))


class Mix(nn.Module):
    """A layer without a rule, with an argument that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x @ (mask * self.weight)


def test_a_shared_argument_stays_shared_if_there_are_as_many_records() -> None:
    model = nn.ModuleDict({"mix": Mix()})
    mask, weight = torch.ones(3, 3).tril(), model["mix"].weight
    engine = armed(model, 1)
    for n in (1, 3):
        engine.begin(torch.arange(n), n)
        x = torch.randn(n, 3)
        (model["mix"](x, mask) ** 2).sum().backward()
        ours = engine.weighted_sum(torch.ones(n))
        (truth,) = torch.autograd.grad(((x @ (mask * weight)) ** 2).sum(), weight)
        torch.testing.assert_close(ours, truth.flatten())


def test_an_input_of_one_row_is_every_records() -> None:
    """Position embeddings are looked up once for all."""
    table = nn.Embedding(4, 2)
    model = nn.Sequential(table)
    positions, scale = torch.arange(4)[None], torch.randn(5, 4, 2)
    engine = armed(model, 5)
    (model(positions) * scale).sum().backward()
    norms = scale.flatten(1).norm(dim=1)
    torch.testing.assert_close(engine.norms(), norms)


def test_one_selected_record_is_not_taken_for_everybodys() -> None:
    """The loss of labelled records alone: its gradient would be cut over all records."""
    model, x = mlp(), torch.randn(4, 4)
    engine = armed(model, 4)
    model(x).sum().backward()
    engine.begin(torch.arange(4), 4)
    with pytest.raises(ValueError, match=r"shape \(1, 4\). Expected a first dimension of 4"):
        model(x[1:2])


def test_an_argument_by_record_does_not_become_a_shared_one() -> None:
    layer = Mix()
    model, x, masks = nn.ModuleDict({"mix": layer}), torch.randn(4, 2, 3), torch.ones(4, 3, 3)
    engine = armed(model, 4)
    layer(x, masks).sum().backward()
    engine.begin(torch.arange(4), 4)
    with pytest.raises(ValueError, match=r"mask\[0\] in call 0 has shape \(2, 3, 3\)"):
        layer(x, masks[:2])


def test_calls_of_a_layer_are_told_apart() -> None:
    """A layer may see records in its first call and what all share in its second."""
    model, x = mlp(), torch.randn(4, 4)
    engine = armed(model, 4)
    for _ in range(2):
        engine.begin(torch.arange(4), 4)
        (model(x) * model(torch.ones(1, 4))).sum().backward()
        ours = engine.weighted_sum(torch.ones(4))
    engine.end()
    loss = (model(x) * model(torch.ones(1, 4))).sum()
    truth = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(ours, torch.cat([t.flatten() for t in truth]))


def test_a_shared_argument_stays_shared_under_its_name() -> None:
    layer = Mix()
    engine = armed(nn.ModuleDict({"mix": layer}), 1)
    mask = torch.ones(3, 3).tril()
    layer(torch.randn(1, 3), mask).sum().backward()
    engine.begin(torch.arange(3), 3)
    out = layer(torch.ones(3, 3), mask=mask)
    torch.testing.assert_close(out, torch.ones(3, 3) @ (mask * layer.weight.detach()))


def test_an_output_that_hides_tensors_is_refused() -> None:
    class Hiding(Mix):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return {1: super().forward(x, mask)}.values()

    model = nn.ModuleDict({"mix": Hiding()})
    armed(model, 2)
    with pytest.raises(ValueError, match="it returns a dict_values"):
        model["mix"](torch.randn(2, 3), torch.ones(3, 3))
