"""The summary and the picture of a run."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.report import RunSummary
from tptopk_pl.support import Support


@dataclass
class Settings:
    seed: int | None = None
    max_grad_norm: float = 1.0
    active_ratio: float = 0.1


@dataclass
class FakeRun:
    """What a callback holds after 40 steps."""

    plan: TwoPhasePlan | None
    support: Support | None = None
    settings: Settings = field(default_factory=Settings)
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 40
    noise_is_cryptographic: bool = True
    parameter_names: tuple[str, ...] = ("first", "second", "third")

    @property
    def epsilon(self) -> float:
        assert self.plan is not None
        return self.plan.epsilon_at(self.step)


TRAINER = SimpleNamespace(
    lightning_module=SimpleNamespace(),
    callback_metrics={"val_acc": torch.tensor(0.75), "privacy/epsilon": torch.tensor(1.0)},
)


def plan(method: str = "tp_topk", noise_multiplier: float | None = 1.0) -> TwoPhasePlan:
    return TwoPhasePlan.calibrate(
        num_units=1000,
        num_steps=40,
        expected_batch_size=50,
        target_delta=1e-5,
        noise_multiplier=noise_multiplier,
        method=method,
    )


def finished(made: TwoPhasePlan, **kwargs: Any) -> FakeRun:
    run = FakeRun(made, **kwargs)
    for step in range(10, 41, 10):
        figures = {
            "privacy/epsilon": made.epsilon_at(step),
            "privacy/epsilon_rdp": made.epsilon_rdp_at(step),
        }
        run.history += [{"step": step, **figures}, {"step": step, "val_acc": 1 - 1 / step}]
    return run


PRIVATE = plan()
WITHOUT_NOISE = plan(noise_multiplier=0.0)
NON_PRIVATE = plan("non_private", None)


def strict(path: Path) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_summary_says_what_was_spent_on_what() -> None:
    sizes = (10, 0, 30)
    support = Support(torch.tensor([0, 1, 10, 39]), sizes)
    summary = RunSummary.from_run(finished(PRIVATE, support=support), TRAINER)
    assert summary.epsilon == PRIVATE.epsilon
    assert summary.epsilon_rdp == PRIVATE.epsilon_rdp
    assert summary.epsilon < summary.epsilon_rdp
    assert (summary.delta, summary.steps) == (1e-5, 40)
    assert TwoPhasePlan.from_dict(summary.plan) == PRIVATE
    assert summary.metrics["val_acc"] == 0.75
    assert summary.support is not None
    assert (summary.support["num_active"], summary.support["num_total"]) == (4, 40)
    shares = summary.support["active_share_by_parameter"]
    assert shares == pytest.approx({"first": 0.2, "second": 0.0, "third": 2 / 30})
    assert summary.versions["torch"] == torch.__version__.split("+")[0] or summary.versions["torch"]


def test_a_private_run_states_its_guarantee() -> None:
    guarantee = RunSummary.from_run(finished(PRIVATE), TRAINER).guarantee
    assert "NOT private" not in guarantee
    assert "add/remove" in guarantee
    assert "Validation and test data have none" in guarantee
    assert "not cryptographic" not in guarantee
    plain = RunSummary.from_run(finished(PRIVATE, noise_is_cryptographic=False), TRAINER)
    assert "not cryptographic" in plain.guarantee


@pytest.mark.parametrize(
    ("made", "seed", "reason"),
    [
        (NON_PRIVATE, None, "no noise"),
        (WITHOUT_NOISE, None, "no noise"),
        (PRIVATE, 3, "known seed"),
        (PRIVATE, 0, "known seed"),
        (NON_PRIVATE, 3, "no noise"),
    ],
)
def test_a_run_without_a_guarantee_says_so_everywhere(
    made: TwoPhasePlan, seed: int | None, reason: str, tmp_path: Path
) -> None:
    """In the summary, and in the picture, which is passed around alone."""
    summary = RunSummary.from_run(finished(made, settings=Settings(seed=seed)), TRAINER)
    assert summary.guarantee.startswith("NOT private")
    assert reason in summary.guarantee
    assert "NOT private" in drawn(summary).get_suptitle()
    summary.write(tmp_path)
    assert strict(tmp_path / "summary.json")["guarantee"] == summary.guarantee


def test_a_run_that_stopped_early_is_charged_its_plan() -> None:
    """When to stop may have been decided by results on private data."""
    run = finished(PRIVATE)
    run.step = 10
    summary = RunSummary.from_run(run, TRAINER)
    assert summary.epsilon == PRIVATE.epsilon
    assert summary.epsilon_spent == PRIVATE.epsilon_at(10) < summary.epsilon
    assert summary.steps == 10


def test_a_run_that_has_not_begun_has_no_summary() -> None:
    with pytest.raises(ValueError, match="plan is None"):
        RunSummary.from_run(FakeRun(None), TRAINER)


@pytest.mark.parametrize("made", [PRIVATE, WITHOUT_NOISE])
def test_written_summary_is_json_without_infinities(made: TwoPhasePlan, tmp_path: Path) -> None:
    """JSON has no Infinity and no NaN; other programs' parsers stop there."""
    run = finished(made, settings=Settings(max_grad_norm=math.inf))
    trainer = SimpleNamespace(
        lightning_module=None, callback_metrics={"val_loss": torch.tensor(math.nan)}
    )
    written = RunSummary.from_run(run, trainer).write(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["summary.json", "run.png"]
    content = strict(written[0])
    assert content["epsilon"] == (PRIVATE.epsilon if made is PRIVATE else "inf")
    assert content["settings"]["max_grad_norm"] == "inf"
    assert content["metrics"] == {"val_loss": "nan"}
    assert content["history"][1] == {"step": 10, "val_acc": 0.9}


def drawn(summary: RunSummary) -> Any:
    """The figure that ``plot`` saves."""
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *a, **k: kept.append(self))
        summary.plot(Path("unused.png"))
    assert Figure.savefig is save
    return kept[0]


@pytest.mark.parametrize(
    "run",
    [
        finished(PRIVATE),
        finished(WITHOUT_NOISE),
        finished(plan("dp_sgd")),
        FakeRun(PRIVATE, step=0),
    ],
    ids=["private", "infinite epsilon", "no switch", "nothing happened"],
)
def test_picture_is_written(run: FakeRun, tmp_path: Path) -> None:
    summary = RunSummary.from_run(run, TRAINER)
    summary.plot(tmp_path / "run.png")
    with Image.open(tmp_path / "run.png") as image:
        assert min(image.size) > 300
        assert len(set(image.convert("L").tobytes())) > 50  # not blank


def labels(axes: Any) -> list[str]:
    return [str(line.get_label()) for line in axes.lines]


def test_picture_shows_epsilon_from_zero_target_switch_and_accuracy() -> None:
    made = replace(PRIVATE, target_epsilon=3.0)
    spent, measured = drawn(RunSummary.from_run(finished(made), TRAINER)).axes
    assert labels(spent) == ["ε (PLD)", "ε (RDP)", "target 3", "switch, step 12"]
    assert spent.lines[0].get_xdata().tolist() == [0, 10, 20, 30, 40]
    assert spent.lines[0].get_ydata()[-1] == made.epsilon
    assert list(spent.lines[-1].get_xdata()) == [12, 12]
    assert labels(measured) == ["val_acc, last 0.975", "switch, step 12"]
    assert measured.get_ylabel() == "val_acc"


def test_picture_of_infinite_epsilon_says_so() -> None:
    """Its axes would be empty otherwise."""
    spent, _ = drawn(RunSummary.from_run(finished(NON_PRIVATE), TRAINER)).axes
    assert [text.get_text() for text in spent.texts] == ["ε = ∞"]
    assert not spent.lines


def test_a_switch_that_was_not_reached_is_not_marked() -> None:
    stopped = finished(PRIVATE)
    stopped.step = 5
    for axes in drawn(RunSummary.from_run(stopped, TRAINER)).axes:
        assert not any("switch" in label for label in labels(axes))


def test_weights_that_training_started_from_are_named() -> None:
    weights = {"path": "resnet18.pth", "sha256": "0123abcd", "num_loaded": 60, "num_new": 2}
    trainer = SimpleNamespace(
        callback_metrics={}, lightning_module=SimpleNamespace(pretrained_weights=weights)
    )
    summary = RunSummary.from_run(finished(PRIVATE), trainer)
    assert summary.pretrained_weights == weights
    assert "resnet18.pth (SHA-256 0123abcd)" in summary.guarantee
    assert RunSummary.from_run(finished(PRIVATE), TRAINER).pretrained_weights is None
