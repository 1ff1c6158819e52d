"""What is logged of the support at the switch: values by hand, to whom, and when."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toys import Plain, Saver, loader, private, trainer
from tptopk_pl.callback.monitoring import Choice
from tptopk_pl.pictures import score_figure, score_histogram, support_figure
from tptopk_pl.selectors import ScoreAccumulator, retained_energy
from tptopk_pl.support import Support

HALVES = torch.tensor([[4.0, 3.0, 2.0, -1.0], [5.0, -1.0, 3.0, 1.0]])  # each has a total of 8
WARMUP_STEPS = 3  # of 10, ⌈0.3 · 10⌉


class Recorder(Logger):
    """A logger that is not TensorBoard's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": -1 if step is None else step})

    @property
    def switches(self) -> list[dict[str, float]]:
        return [row for row in self.rows if "support/share" in row]


class Stop(Callback):
    """Ends a fit one step before the switch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == WARMUP_STEPS - 1


def warmed_up(halves: torch.Tensor = HALVES) -> ScoreAccumulator:
    warmup = ScoreAccumulator(halves.shape[1], 1)
    for half in halves:
        warmup.add((half + 2).sqrt(), noise_variance=2.0)
    return warmup


def top_2(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2).indices


def fit(*callbacks: Any, resume: Any = None, **options: Any) -> Recorder:
    recorder = Recorder()
    options = {"max_epochs": 1, "limit_val_batches": 0, "logger": recorder, **options}
    trainer(*callbacks, **options).fit(Plain(), loader(), ckpt_path=resume, weights_only=True)
    return recorder


# ---------------------------------------------------------------------- values


def test_retained_energy_by_hand() -> None:
    """Half 0 chooses {0, 1}: (5 - 1)/8 of half 1. Half 1 chooses {0, 2}: (4 + 2)/8 of half 0."""
    assert retained_energy(HALVES, top_2) == pytest.approx((4 / 8 + 6 / 8) / 2)


def test_retained_energy_of_noise_is_the_share_and_not_what_the_choice_makes_of_it() -> None:
    """All coordinates alike, k/d = 0.1: on its own scores the support would seem to keep 0.4."""
    scores = 1 + torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)) * 2
    k = 10_000
    assert retained_energy(scores, lambda half: half.topk(k).indices) == pytest.approx(
        0.1, abs=0.01
    )
    mean = scores.mean(0)
    assert float(mean[mean.topk(k).indices].sum() / mean.sum()) > 0.3


@pytest.mark.parametrize(
    "halves", [-HALVES, HALVES * torch.tensor([[1.0], [0.0]]), HALVES * float("nan")]
)
def test_retained_energy_is_not_defined_without_a_positive_total(halves: torch.Tensor) -> None:
    """The second: a warm-up of one step has but one half."""
    assert retained_energy(halves, top_2) is None


def test_scalars_by_hand() -> None:
    choice = Choice(Support(torch.tensor([0, 2]), (3, 1)), ("a.weight", "b"), warmed_up(), True)
    assert choice.scalars() == pytest.approx(
        {
            "support/num_active": 2,
            "support/share": 0.5,
            "support_share/a.weight": 2 / 3,
            "support_share/b": 0,
            "support/retained_energy": 0.625,
        }
    )


def test_a_random_support_keeps_what_lies_on_it() -> None:
    """{2, 3}: (2 - 1)/8 of half 0 and (3 + 1)/8 of half 1; the scores choose nothing."""
    choice = Choice(Support(torch.tensor([2, 3]), (4,)), ("a",), warmed_up(), by_score=False)
    assert choice.scalars()["support/retained_energy"] == pytest.approx((1 / 8 + 4 / 8) / 2)


def test_an_energy_that_is_not_defined_is_left_out() -> None:
    choice = Choice(Support(torch.tensor([0]), (4,)), ("a",), warmed_up(-HALVES.abs() / 4), True)
    assert set(choice.scalars()) == {"support/num_active", "support/share", "support_share/a"}


def test_noise_deviation_is_that_of_the_score_of_noise() -> None:
    warmup, deviations = ScoreAccumulator(100_000, 10), [0.5, 2.0, 1.0]
    for deviation in deviations:
        warmup.add(deviation * torch.randn(100_000), deviation**2)
    measured = float((warmup.energy.sum(0) / 3).std())
    assert warmup.noise_deviation == pytest.approx(measured, rel=0.03)
    assert warmup.noise_deviation == pytest.approx((2 * (0.5**4 + 2**4 + 1)) ** 0.5 / 3)


def test_score_histogram_counts_every_score_the_outer_ones_too() -> None:
    edges, counts = score_histogram(torch.tensor([-90.0, -4.9, 0.1, 0.1, 14.9, 1e9]))
    assert len(edges) == len(counts) + 1
    assert (edges[0], edges[-1]) == (-5, 15)
    assert (counts[0], counts[-1], counts.sum()) == (2, 2, 6)
    assert counts[(edges[:-1] <= 0.1) & (edges[1:] > 0.1)].tolist() == [2]


# ---------------------------------------------------------------------- pictures


def test_the_picture_of_a_support_shows_its_bins_and_numbers() -> None:
    """500 coordinates are 200 bins of two or three; three are stretched to a third each."""
    support = Support(torch.tensor([0, 1, 2, 499, 501]), (500, 3))
    _, where, how_many = _axes_of(support_figure(support, ["large", "small"]))
    large, small = where.images[0].get_array()
    assert large[:3].tolist() == pytest.approx([1, 1 / 3, 0])
    assert large[-1] == pytest.approx(1 / 3)
    assert large.sum() == pytest.approx(5 / 3)
    assert set(small[:67]) == {0}
    assert set(small[67:133]) == {1}
    assert set(small[134:]) == {0}
    assert [text.get_text() for text in where.get_yticklabels()] == ["large", "small"]
    assert [text.get_text().strip() for text in how_many.texts] == ["4 / 500", "1 / 3"]
    assert [bar.get_width() for bar in how_many.patches] == pytest.approx([4 / 500, 1 / 3])


def test_of_many_parameters_the_largest_are_shown_in_the_order_of_the_model() -> None:
    sizes = tuple(2 if index % 2 else 3 for index in range(199))  # 100 of 3, 99 of 2
    names = [f"a.long.{'module.' * 8}{index}" for index in range(199)]
    figure = support_figure(Support.dense(sizes), names)
    _, where, _ = _axes_of(figure)
    labels = [text.get_text() for text in where.get_yticklabels()]
    assert [int(label.split(".")[-1]) for label in labels] == list(range(0, 199, 2))
    assert all(len(label) == 40 and label.startswith("…") for label in labels)
    assert "100 largest of 199" in figure.get_suptitle()


def test_an_empty_parameter_can_be_drawn(tmp_path: Path) -> None:
    support_figure(Support(torch.tensor([1]), (0, 2)), ["a", "b"]).savefig(tmp_path / "a.png")


def test_the_picture_of_scores_says_what_noise_alone_would_do() -> None:
    """Of one step, noise alone is chi-squared of 1 degree: 4.55 % lie beyond 2 deviations."""
    scores = (torch.randn(100_000, generator=torch.Generator().manual_seed(0)) ** 2 - 1) / 2**0.5
    (axes,) = score_figure(scores, 1, lowest_chosen=(4 - 1) / 2**0.5).axes
    label = axes.get_lines()[0].get_label()
    assert "lowest score chosen: 2.12" in label
    assert "of noise alone, 4,550 would" in label
    counts, noise = (patch.get_data().values for patch in axes.patches)
    assert counts.sum() == pytest.approx(noise.sum(), rel=0.01)
    assert abs(counts - noise).max() < 5 * noise.max() ** 0.5


def _axes_of(figure: Any) -> tuple[Any, Any, Any]:
    where, how_many, colours = figure.axes
    return colours, where, how_many


# ---------------------------------------------------------------------- in a fit


@pytest.mark.parametrize("method", ["tp_topk", "tp_rand"])
def test_every_logger_gets_the_scalars_once_at_the_switch(method: str) -> None:
    """The epoch may end there as well: ``WARMUP_STEPS`` is given as its 10 steps."""
    callback = private(seed=0, method=method, warmup_steps=10, active_ratio=0.2)
    recorder = fit(callback, max_epochs=2)
    (switch,) = recorder.switches
    assert switch["step"] == 10
    assert switch["support/num_active"] == callback.support.num_active == 35
    shares = {
        name: len(local) / size
        for name, local, size in zip(
            [name for name, _ in Plain().named_parameters()],
            callback.support.split(),
            callback.support.sizes,
            strict=True,
        )
    }
    assert {name: switch[f"support_share/{name}"] for name in shares} == pytest.approx(shares)
    kept = [row for row in callback.history if "support/share" in row]
    assert kept == [switch]
    last = [
        row["support/num_active"]
        for row in recorder.rows
        if row["step"] == 10 and "support/num_active" in row
    ]
    assert last == [178, 35]


def test_the_energy_is_that_of_the_released_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[torch.Tensor, float]] = []
    add = ScoreAccumulator.add

    def spy(self: ScoreAccumulator, gradient: torch.Tensor, noise_variance: float) -> None:
        added.append((gradient.clone(), noise_variance))
        add(self, gradient, noise_variance)

    monkeypatch.setattr(ScoreAccumulator, "add", spy)
    (switch,) = fit(
        private(seed=0, noise_multiplier=0.1, active_ratio=0.2, warmup_steps=4)
    ).switches
    halves = [sum(g**2 - variance for g, variance in added[half::2]) for half in (0, 1)]
    shares = [
        halves[1 - half][halves[half].argsort(descending=True)[:35]].sum() / halves[1 - half].sum()
        for half in (0, 1)
    ]
    assert len(added) == 4
    assert switch["support/retained_energy"] == pytest.approx(float(sum(shares)) / 2, rel=1e-4)


def test_csv_gets_the_scalars(tmp_path: Path) -> None:
    """Its columns grow when the first step is long logged."""
    fit(private(active_ratio=0.2), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    table = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    rows = [row for row in csv.DictReader(table.read_text().splitlines()) if row["support/share"]]
    assert [int(row["step"]) for row in rows] == [WARMUP_STEPS]
    assert float(rows[0]["support/share"]) == pytest.approx(35 / 178)
    assert rows[0]["support_share/network.0.weight"]


def test_a_run_without_a_switch_logs_none() -> None:
    assert fit(private(method="dp_sgd")).switches == []
    callback = private()
    assert fit(callback, Stop()).switches == []
    assert callback.step == WARMUP_STEPS - 1


def test_a_run_resumed_at_the_switch_logs_it_once_and_one_resumed_later_not(tmp_path: Path) -> None:
    """``Saver`` comes before the callback: its checkpoint of step 3 is of before the switch."""
    whole = private(seed=0)
    (switch,) = fit(Saver(tmp_path, 1), whole).switches
    at, later = private(seed=0), private(seed=0)
    assert fit(at, resume=tmp_path / f"step={WARMUP_STEPS}.ckpt").switches == [switch]
    assert fit(later, resume=tmp_path / f"step={WARMUP_STEPS + 1}.ckpt").switches == []
    for resumed in (at, later):
        assert [row for row in resumed.history if "support/share" in row] == [switch]


# ---------------------------------------------------------------------- TensorBoard


def test_tensorboard_gets_histogram_and_pictures(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name=None)
    fit(private(seed=0, active_ratio=0.2), logger=[CSVLogger(tmp_path), logger])
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Scalars("support/share")] == [WARMUP_STEPS]
    assert set(events.Tags()["images"]) == {"support/coordinates", "support/scores"}
    (picture,) = events.Images("support/coordinates")
    assert (picture.step, picture.encoded_image_string[1:4]) == (WARMUP_STEPS, b"PNG")
    (histogram,) = events.Histograms("support/scores")
    assert histogram.step == WARMUP_STEPS
    assert sum(histogram.histogram_value.bucket) == 178


def test_without_matplotlib_there_are_no_pictures_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*filter(lambda name: name.startswith("matplotlib"), sys.modules), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    logger = TensorBoardLogger(tmp_path, name=None)
    fit(private(), logger=logger)
    tags = EventAccumulator(logger.log_dir).Reload().Tags()
    assert (tags["images"], tags["histograms"]) == ([], ["support/scores"])


def test_without_noise_scores_have_no_unit_and_only_the_support_is_drawn(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name=None)
    fit(private(noise_multiplier=0.0), logger=logger)
    tags = EventAccumulator(logger.log_dir).Reload().Tags()
    assert (tags["images"], tags["histograms"]) == (["support/coordinates"], [])


def test_a_random_support_has_no_lowest_score(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Any] = []

    def spy(*args: Any) -> Any:
        drawn.append(args)
        return score_figure(*args)

    monkeypatch.setattr("tptopk_pl.callback.monitoring.score_figure", spy)
    fit(private(method="tp_rand"), logger=TensorBoardLogger(tmp_path, name=None))
    ((scores, num_steps, lowest),) = drawn
    assert (len(scores), num_steps, lowest) == (178, WARMUP_STEPS, None)
