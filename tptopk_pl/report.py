"""What a run leaves behind: a summary in JSON and a picture of ε and accuracy over steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.support import Support

STATEMENT = (
    "The guarantee protects the privacy units of the training set, under add/remove of one unit. "
    "Validation and test data have none. q, N, and the schedule are public."
)
_VERSIONS = ("torch", "lightning", "opacus", "dp-accounting")


class Run(Protocol):
    """What is asked of the callback."""

    plan: TwoPhasePlan | None
    support: Support | None
    history: list[dict[str, float]]
    settings: Any
    noise_is_cryptographic: bool

    @property
    def epsilon(self) -> float: ...  # noqa: D102
    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def parameter_names(self) -> Sequence[str]: ...  # noqa: D102


@dataclass(frozen=True)
class RunSummary:
    """A finished run in plain types.

    Attributes:
        guarantee: what is protected, in words; says so if the run is not private.
        epsilon, epsilon_rdp, delta: of the whole plan, by PLD and by RDP. They are the headline
            even if the run stopped early: when to stop may have been decided by results.
        epsilon_spent: after the steps that were run (PLD).
        steps: logical steps run.
        plan: the plan's fields, without its ε targets being repeated.
        settings: what the user asked for, less what the plan holds.
        pretrained_weights: the weights that training started from, as the module's attribute of
            that name describes them (path, checksum); None if it has none.
        support: number of coordinates, active ones, and each parameter's active share.
        metrics: last value of each validation and test metric.
        history: figures by step.
        versions: of the packages that the guarantee leans on.
    """

    guarantee: str
    epsilon: float
    epsilon_rdp: float
    delta: float
    epsilon_spent: float
    steps: int
    plan: dict[str, Any]
    settings: dict[str, Any]
    pretrained_weights: dict[str, Any] | None
    support: dict[str, Any] | None
    metrics: dict[str, float]
    history: list[dict[str, float]]
    versions: dict[str, str]

    @classmethod
    def from_run(cls, callback: Run, trainer: Any) -> RunSummary:
        """Summarize what a callback and its Trainer hold after a fit.

        Raises:
            ValueError: if no fit has begun.
        """
        plan = callback.plan
        if plan is None:
            raise ValueError("Expected a callback whose fit has begun: its plan is None.")
        charged = max(callback.step, plan.num_steps)
        pretrained = getattr(trainer.lightning_module, "pretrained_weights", None)
        return cls(
            guarantee=_guarantee(callback, plan) + _on_pretrained(pretrained),
            epsilon=plan.epsilon_at(charged),
            epsilon_rdp=plan.epsilon_rdp_at(charged),
            delta=plan.target_delta,
            epsilon_spent=callback.epsilon,
            steps=callback.step,
            plan=plan.to_dict(),
            settings=asdict(callback.settings),
            pretrained_weights=pretrained,
            support=_describe(callback.support, callback.parameter_names),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            history=callback.history,
            versions={name: version(name) for name in _VERSIONS},
        )

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``summary.json`` and ``run.png`` into a folder, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        summary, picture = folder / "summary.json", folder / "run.png"
        summary.write_text(json.dumps(_finite(asdict(self)), indent=2) + "\n")
        self.plot(picture)
        return [summary, picture]

    def plot(self, path: Path) -> None:
        """Draw ε and validation accuracy over steps, with the switch marked (needs matplotlib)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        spent, measured = figure.subplots(1, 2)
        self._plot_epsilon(spent)
        self._plot_metric(measured)
        switch = self.plan["warmup_steps"]
        for axes in (spent, measured):
            axes.set_xlabel("step")
            axes.set_xlim(0, self.plan["num_steps"])
            axes.grid(alpha=0.3)
            if 0 < switch <= self.steps:
                axes.axvline(switch, color="0.4", linestyle="--", label=f"switch, step {switch}")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="lower right", fontsize="small")
        figure.suptitle(self._title(), fontsize="medium")
        figure.savefig(path, dpi=120)

    def _title(self) -> str:
        if math.isinf(self.epsilon):
            return f"{self.plan['method']}: NOT private"
        active = "" if self.support is None else f", {self.support['num_active']:,} coordinates"
        seeded = "" if self.settings["seed"] is None else " (seeded: NOT private)"
        return f"{self.plan['method']}: ε = {self.epsilon:.3g}, δ = {self.delta:g}{active}{seeded}"

    def _plot_epsilon(self, axes: Any) -> None:
        rows = [row for row in self.history if "privacy/epsilon" in row]
        for name, label in (("privacy/epsilon", "PLD"), ("privacy/epsilon_rdp", "RDP")):
            points = [(row["step"], row[name]) for row in rows if math.isfinite(row[name])]
            if points:
                axes.plot(*zip((0, 0.0), *points, strict=True), label=f"ε ({label})")
        target = self.plan["target_epsilon"]
        if target is not None:
            axes.axhline(target, color="tab:red", linewidth=1, label=f"target {target:g}")
        if math.isinf(self.epsilon):
            axes.text(0.5, 0.5, "ε = ∞", transform=axes.transAxes, ha="center")
        axes.set_ylabel("ε spent")
        axes.set_ylim(bottom=0)

    def _plot_metric(self, axes: Any) -> None:
        names = sorted({n for row in self.history for n in row if n.startswith("val")})
        names = [n for n in names if "acc" in n.lower()] or names
        if not names:
            axes.text(0.5, 0.5, "no validation metric", transform=axes.transAxes, ha="center")
            return
        rows = [row for row in self.history if names[0] in row]
        steps, values = [r["step"] for r in rows], [r[names[0]] for r in rows]
        axes.plot(steps, values, marker=".", label=f"{names[0]}, last {values[-1]:.4g}")
        axes.set_ylabel(names[0])


def _guarantee(callback: Run, plan: TwoPhasePlan) -> str:
    if math.isinf(plan.epsilon):
        return "NOT private: no noise was added."
    if callback.settings.seed is not None:
        return "NOT private: the noise came from a known seed. With secret noise: " + STATEMENT
    if not callback.noise_is_cryptographic:
        return STATEMENT + " The noise came from torch's generator, which is not cryptographic."
    return STATEMENT


def _on_pretrained(weights: dict[str, Any] | None) -> str:
    if weights is None:
        return ""
    return (
        f" Training started from the weights {weights['path']} (SHA-256 {weights['sha256']}): they "
        "must be public, the guarantee does not cover what they were trained on."
    )


def _describe(support: Support | None, names: Sequence[str]) -> dict[str, Any] | None:
    if support is None:
        return None
    return {
        "num_total": support.num_total,
        "num_active": support.num_active,
        "active_share_by_parameter": dict(zip(names, support.shares(), strict=True)),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: spell it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
