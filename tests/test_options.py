"""The ways in which gradients are had: all the same to rounding, and chosen by their time."""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_gradients_layers import assert_matches, batch, check, random_support, trained
from tests.toys import Plain, flat, loader, private, records, trainer
from tptopk_pl.callback.phases import Phases
from tptopk_pl.gradients import GradientEngine, contributions, fused, gram, tuning
from tptopk_pl.gradients.contributions import Selection, Units
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.gram import Gram
from tptopk_pl.gradients.options import correlation_options
from tptopk_pl.gradients.rules import rule_for
from tptopk_pl.mechanism import clip_factors

compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)


def call(module: nn.Module, *args: Tensor) -> Any:
    return module(*args)


@pytest.fixture
def fresh_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused, "_failed", False)
    fused._loop.cache_clear()
    yield
    fused._loop.cache_clear()


# Wide rows are summed over positions, narrow ones over records.
FUSED = [
    (nn.Conv2d(2, 3, 3, padding=1, stride=(1, 2)), (5, 2, 4, 33)),
    (nn.Conv2d(4, 2, (3, 2), dilation=(1, 2), groups=2), (18, 4, 5, 6)),
    (nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1), (3, 2, 17)),
    (nn.Linear(3, 4), (17, 5, 3)),
]


@compiler
@pytest.mark.parametrize(("layer", "shape"), FUSED, ids=lambda value: str(value)[:24])
def test_fused_loops(layer: nn.Module, shape: tuple[int, ...], fresh_loops: None) -> None:
    for ratio in (0.3, 0.6):  # one loop serves any number of coordinates
        support = random_support(layer, ratio)
        match = partial(assert_matches, layer, call, support=support, option="fused")
        match((batch(*shape),))
        match((batch(*shape)[:1],))  # and of records
        match((batch(*shape)[:3],), units=[0, 1, 0])
    assert not fused._failed
    assert fused._loop.cache_info().misses == 1


def test_without_a_compiler_a_sparse_product_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_loops: None
) -> None:
    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", no_compiler)
    layer = nn.Conv2d(2, 3, 3)
    support = random_support(layer, 0.3)
    with caplog.at_level(logging.WARNING, logger="tptopk_pl"):
        for _ in range(2):
            x = (batch(3, 2, 5, 5),)
            assert_matches(layer, call, x, support=support, option="fused")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "(no compiler)" in said and "and more" not in said


def test_a_compiler_that_is_switched_off_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_loops: None
) -> None:
    """The expression would run uncompiled, and hold every product."""
    layer = nn.Conv2d(2, 3, 3)
    x = (batch(3, 2, 5, 5),)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert_matches(layer, call, x, support=random_support(layer, 0.3), option="fused")
    assert fused._failed and "switched off" in caplog.text


def test_memory_that_runs_out_in_a_fused_loop_is_not_taken_for_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, fresh_loops: None
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "compile", full)
    layer = nn.Conv2d(2, 3, 3)
    with pytest.raises(torch.OutOfMemoryError):
        fused.fused_rows(
            Correlation(batch(3, 2, 5, 5), batch(3, 3, 3, 3), (3, 3), (1, 1), (1, 1), (0, 0)),
            Selection(torch.tensor([1, 2, 5]), layer.weight.shape),
        )
    assert not fused._failed


def cancelling() -> tuple[Correlation, Tensor]:
    """Gradients that are small sums of large terms, and the same in float64, ``[n, numel]``."""
    x = 1 + 1e-4 * batch(4, 8, 6, 6)
    g = batch(4, 16, 6, 6)
    g[:3] -= g[:3].mean((2, 3), keepdim=True)  # in three of the four records
    geometry = ((1, 1), (1, 1), (1, 1), (0, 0))
    exact = Correlation(x.double(), g.double(), *geometry).dense()
    return Correlation(x, g, *geometry), exact


def test_norms_of_gradients_that_cancel_are_never_understated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the unit would go unclipped: norm and sum then come from the rows."""
    correlation, exact = cancelling()
    for units in ([0, 1, 2, 3], [0, 1, 1, 0]):
        groups = Units(torch.tensor(units), max(units) + 1)
        contribution = Gram(correlation) if groups.single else Gram(correlation).by_unit(groups)
        expected = groups.average(exact)
        norms = contribution.square_norms().sqrt().double()
        assert (norms / expected.norm(dim=1) - 1).abs().max() < 2**-11
        for unit, factors in enumerate(torch.diag(1 / norms.float())):
            one = contribution.weighted_sum(factors).double()  # clipped to 1
            assert abs(one.norm() - 1) < 2**-11
            picked = contribution.select(torch.tensor([unit]))
            same = picked.weighted_sum(factors[unit : unit + 1])
            torch.testing.assert_close(same.double(), one, rtol=0, atol=2**-11)
    monkeypatch.setattr(gram, "_TRUSTED", 0.0)  # the danger is real
    with single_precision(monkeypatch):
        wrong = Gram(correlation).square_norms().clamp(min=0).sqrt().double()
    assert (wrong / exact.norm(dim=1) - 1).abs().max() > 0.01


@contextmanager
def single_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "double", lambda self: self)
        yield


def attacks() -> list[Correlation]:
    """Records made to seem smaller than they are: by lost digits, and by underflow."""
    features, tiny = 65536, (0.98 * 2**-24) ** 0.5
    x = torch.full((1, 4, features), tiny)
    x[:, 2:] *= -1
    x[..., :8] = 1.0
    x[..., -1] = 0.063 * x[0, 0].norm() * torch.tensor([1.0, 1.0, -1.0, -1.0])
    g = torch.tensor([1.0, 1.0, -1.0, -1.0]).view(1, 4, 1)
    steps = Correlation.of_steps
    return [
        steps(g, x),
        steps(torch.full((1, 256, 1024), 2.6e-23), torch.full((1, 256, 1), 1.8e19)),
    ]


@pytest.mark.parametrize("attack", [0, 1])
def test_no_record_is_made_to_seem_small(attack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    correlation = attacks()[attack]

    def influence() -> float:
        contribution = Gram(correlation)
        factors = clip_factors(contribution.square_norms().sqrt(), 0.1)
        return float(contribution.weighted_sum(factors).double().norm()) / 0.1

    assert 0.99 < influence() <= 1.0
    if attack == 0:  # the danger is real
        with single_precision(monkeypatch):
            assert influence() > 1.0


def test_what_is_summed_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is tried again, after memory ran out, must not count twice."""
    model = network()
    engine = GradientEngine(model, trained(model))
    engine.attach()
    engine.begin(torch.arange(3), 3)
    model(batch(3, 2, 4, 4)).sum().backward()
    total = torch.zeros(engine.num_active)

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr("tptopk_pl.gradients.outer.Outer.weighted_sum", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.weighted_sum(torch.ones(3), total)
    assert not total.any()
    assert engine.weighted_sum(torch.ones(3), total).any()


def test_patches_do_not_multiply_all_pixels_with_all() -> None:
    """A patch embedding of 16×16 at 224 pixels has 196 positions, but 50,176 pixels."""
    layer = nn.Conv2d(3, 8, 16, stride=16)
    x, g = torch.zeros(1, 3, 224, 224), torch.zeros(1, 8, 14, 14)
    correlation = Correlation(x, g, layer.kernel_size, layer.stride, (1, 1), (0, 0))
    assert correlation.pairs_per_record() == 3 * 16 * 16 * 196
    check(nn.Conv2d(2, 3, 2, stride=2), batch(3, 2, 4, 5))


def test_kernels_of_one_point_with_padding() -> None:
    check(nn.Conv1d(3, 2, 1, padding=1), batch(4, 3, 5))
    check(nn.ConvTranspose1d(3, 2, 1, padding=1), batch(4, 3, 5))
    check(nn.ConvTranspose1d(3, 2, 1, stride=2, output_padding=1), batch(4, 3, 5))


def test_a_large_table_is_never_held_for_each_record() -> None:
    layer = nn.Embedding(1000, 2)
    (rule,) = [rule_for(layer)]
    assert rule is not None
    given = rule.gradients(layer, torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, 2))
    assert list(given["weight"](Selection(None, layer.weight.shape))) == ["gram"]


def test_only_cancelling_gradients_are_computed_twice() -> None:
    contribution = Gram(cancelling()[0])
    contribution.square_norms()
    assert contribution._doubtful is not None
    assert contribution._doubtful.tolist() == [True, True, True, False]


def offered(channels: int, extent: int, kernel: int = 3) -> list[str]:
    g, shape = torch.zeros(1, channels, extent, extent), (channels, channels, kernel, kernel)
    padding = (kernel // 2,) * 2
    one = (1, 1)
    correlation = Correlation(g, g, (kernel, kernel), one, one, padding)
    return list(correlation_options(correlation, Selection(None, torch.Size(shape))))


def test_what_cannot_be_fastest_or_holds_too_much_is_not_tried() -> None:
    assert offered(channels=8, extent=32) == ["rows"]  # 1024² products of positions
    assert offered(channels=256, extent=2) == ["gram"]  # rows of 590,000 numbers each
    assert offered(channels=64, extent=16) == ["rows", "gram"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(12, 5))


def seen(support: Any = None) -> GradientEngine:
    """An engine that one chunk has gone through."""
    model = network()
    engine = GradientEngine(model, trained(model))
    engine.set_support(support)
    engine.attach()
    engine.begin(torch.arange(3), 3)
    model(batch(3, 2, 4, 4)).sum().backward()
    engine.end()
    return engine


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Let each option seem to take so long; the names of those that are measured."""
    measured = []

    def once(make: Callable[[], Any], factors: Tensor) -> float:
        (name,) = [name for name in seconds if named[name] is make]
        measured.append(name)
        return seconds[name]

    named: dict[str, Any] = {}

    def fake(correlation: Correlation, selection: Selection) -> dict[str, Any]:
        for name in seconds:
            named.setdefault(name, lambda: None)
        return dict(named)

    monkeypatch.setattr("tptopk_pl.gradients.rules.convolution.correlation_options", fake)
    monkeypatch.setattr(tuning, "_once", once)
    return measured


def tuned(engine: GradientEngine, records_to_come: float) -> set[str]:
    engine.choices = {}
    layers = [layer for layer in engine._layers if isinstance(layer.module, nn.Conv2d)]
    for layer in layers:
        layer.choices.update(tuning.fastest(layer, engine._selections, records_to_come))
    return {choice for name, choice in engine.choices.items()}


def test_the_fastest_is_chosen_and_a_loop_compiled_only_if_it_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = seen(random_support(network(), 0.5))
    measured = timed(monkeypatch, {"rows": 0.02, "sparse": 0.01, "fused": 0.005})
    assert tuned(engine, records_to_come=1000) == {"sparse"}  # 0.6 s before it
    assert "fused" not in measured
    assert tuned(engine, records_to_come=1e6) == {"fused"}
    monkeypatch.undo()
    measured = timed(monkeypatch, {"rows": 0.01, "sparse": 0.05, "fused": 0.02})
    assert tuned(engine, records_to_come=1e6) == {"rows"}


def test_an_option_that_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    engine = seen(random_support(network(), 0.3))
    monkeypatch.setattr("tptopk_pl.gradients.options.sparse_rows", full)
    engine.tune(records_to_come=1.0)
    assert engine.choices["0.weight"] == engine.choices["2.weight"] == "rows"


def test_inputs_of_ever_new_sizes_are_not_compiled_for(
    monkeypatch: pytest.MonkeyPatch, fresh_loops: None
) -> None:
    monkeypatch.setattr(fused, "_MAX_LOOPS", 0)
    layer = nn.Conv2d(2, 3, 3)
    support = random_support(layer, 0.3)
    assert_matches(layer, call, (batch(3, 2, 5, 5),), support=support, option="fused")
    assert not fused._failed  # those that are compiled go on


def test_tuning_measures_really_and_leaves_no_trace() -> None:
    support = random_support(network(), 0.3)
    for engine in (seen(), seen(support)):
        state = torch.get_rng_state()
        engine.tune(records_to_come=1.0)
        assert torch.equal(torch.get_rng_state(), state)
        allowed = {"rows", "gram"} if engine._selections[0].index is None else {"rows", "sparse"}
        choices = dict(engine.choices)
        assert choices and {choices["0.weight"], choices["2.weight"]} <= allowed
        engine.set_support(support)
        assert engine.choices == {}  # another support, another choice
        engine.choices = {**choices, "gone.weight": "rows"}  # of an older model
        assert engine.choices == choices
        engine.detach()


def test_a_layer_that_was_never_called_keeps_its_first_option() -> None:
    model = nn.ModuleList([nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)])
    engine = GradientEngine(model, trained(model))
    engine.tune(1e6)
    assert engine.choices == {}


@pytest.mark.parametrize("masked", ["rows", "sparse", pytest.param("fused", marks=compiler)])
def test_training_is_the_same_whatever_is_chosen(
    masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def force(self: Phases, *args: Any) -> None:
        choice = "gram" if self.support is None else masked
        self._engine.choices = {"network.0.weight": choice, "network.4.weight": choice}

    torch.manual_seed(0)
    module = Plain()
    plain = copy.deepcopy(module)
    options = {"seed": 3, "warmup_steps": 3, "noise_multiplier": 0.5, "active_ratio": 0.5}
    trainer(private(**options)).fit(plain, loader(records()))
    monkeypatch.setattr(Phases, "tune", force)
    trainer(private(**options)).fit(module, loader(records()))
    torch.testing.assert_close(flat(module), flat(plain), rtol=1e-5, atol=1e-6)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, float]]:
    """For each tuning: whether there was a support, and the records to come."""
    calls = []
    tune = GradientEngine.tune

    def spy(self: GradientEngine, records_to_come: float) -> None:
        calls.append((self._selections[0].index is not None, records_to_come))
        tune(self, records_to_come)

    monkeypatch.setattr(GradientEngine, "tune", spy)
    return calls


def test_each_phase_is_tuned_and_a_seed_fixes_the_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    calls = counted(monkeypatch)
    run = private(warmup_steps=3, active_ratio=0.5, expected_batch_size=8)
    fit = trainer(run)
    fit.fit(Plain(), loader(records()))
    steps = run.plan.num_steps
    assert calls == [(False, 3 * 8), (True, (steps - 3) * 8)]
    fit.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]
    (state,) = [state for name, state in saved.items() if "TwoPhase" in name]
    assert state["phases"]["choices"]["network.0.weight"] in ("rows", "sparse")
    again = private(warmup_steps=3, active_ratio=0.5, expected_batch_size=8)
    trainer(again).fit(Plain(), loader(records()), ckpt_path=tmp_path / "run.ckpt")
    assert len(calls) == 2  # the choice came with the checkpoint
    trainer(private(seed=1, warmup_steps=3)).fit(Plain(), loader(records()))
    assert len(calls) == 2


def test_blocks_are_of_one_size_but_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contributions._BLOCK_ELEMENTS, "cpu", 10)
    cpu = torch.device("cpu")
    found = [(b.start, b.stop) for b in contributions.blocks(7, 3, cpu)]
    assert found == [(0, 3), (3, 6), (6, 7)]
    assert [b.stop - b.start for b in contributions.blocks(2, 99, cpu)] == [1, 1]
    assert list(contributions.blocks(0, 3, cpu)) == []
