"""How time and memory of a step grow with the batch, the parameters and the active share."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _report
from benchmarks._race import race
from benchmarks._worker import Job

_BASIC = ("sgd", "opacus_hooks", "phase1", "phase2_10")
_PER_CENT = (0.1, 1, 10, 30, 100)
_BATCHES = (16, 64, 256, 1024)
_PARAMETERS = (1e4, 1e5, 1e6, 1e7)
_SHARED = ("cifar_cnn", "mlp")  # models whose active share is varied
_COLOURS = {
    "sgd": "0.4",
    "opacus_hooks": "tab:red",
    "phase1": "tab:purple",
    "phase2_10": "tab:blue",
}
_LINES = ("-", "--")
_PANELS = {
    "batch": "records in a batch (cifar_cnn)",
    "parameters": "parameters (perceptrons, batch 64)",
    "share": "active coordinates, % (batch 128)",
}


def main(out: Path, threads: int, pairs: int, device: str) -> None:
    """Measure all points; write growth.json and growth.png."""
    points = []
    for panel, x, model, batch_size, contenders in plan():
        job = Job(model, "", batch_size, threads, pairs, device)
        found = race(job, contenders)
        point = {"panel": panel, "x": x, "model": model, "batch_size": batch_size}
        points.append({**point, "contenders": found})
    data = {"machine": _report.machine(), "device": device, "threads": threads, "points": points}
    _report.write_json(out / "growth.json", data)
    draw(out / "growth.png", points)


def plan() -> list[tuple[str, float | None, str, int, Sequence[str]]]:
    """Panel, place on its axis, model, batch size and contenders of each point.

    The points of the last panel have their places in the contenders' names.
    """
    shares = [f"phase2_{per_cent}" for per_cent in _PER_CENT]
    return [
        *(("batch", b, "cifar_cnn", b, _BASIC) for b in _BATCHES),
        *(("parameters", d, f"mlp_{_width(d)}", 64, _BASIC) for d in _PARAMETERS),
        *(("share", None, model, 128, (*_BASIC[:3], *shares)) for model in _SHARED),
    ]


def _width(num_parameters: float) -> int:
    """The width of the perceptron 784 - w - w - 10 that has about so many parameters."""
    return round((-796 + math.sqrt(796**2 + 4 * (num_parameters - 10))) / 2)


def draw(path: Path, points: list[dict[str, Any]]) -> None:
    """Time above, memory below, over each of the three."""
    title = "Time and added memory of a whole Trainer step as it grows"
    with _report.figure(path, 2, len(_PANELS), (15, 8), title) as axes:
        for row, (label, value) in enumerate((("ms per step", _ms), ("added peak MB", _mb))):
            for column, (panel, name) in enumerate(_PANELS.items()):
                one = axes[row, column]
                chosen = [point for point in points if point["panel"] == panel]
                (_draw_shares if panel == "share" else _draw_basic)(one, chosen, value)
                one.set_xscale("log")
                one.set_yscale("log")
                one.set_xlabel(name)
                one.set_ylabel(label)
        for one in axes[0]:  # above, once for both rows: lines leave no room in some panels
            one.legend(fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def _draw_basic(axes: Any, points: list[dict[str, Any]], value: Any) -> None:
    for name in _BASIC:
        drawn = [(p["x"], value(p["contenders"][name])) for p in points]
        _line(axes, drawn, _COLOURS[name], "o-", name)


def _draw_shares(axes: Any, points: list[dict[str, Any]], value: Any) -> None:
    """Phase 2 over the share; the others do not depend on it."""
    for style, point in zip(_LINES, points, strict=True):
        found, model = point["contenders"], point["model"]
        for name in _BASIC[:3]:
            level = value(found[name])
            drawn = [(x, level) for x in _PER_CENT]
            _line(axes, drawn, _COLOURS[name], style, f"{name}, {model}")
        drawn = [(x, value(found[f"phase2_{x}"])) for x in _PER_CENT]
        _line(axes, drawn, _COLOURS["phase2_10"], f"o{style}", f"phase2, {model}")


def _line(axes: Any, drawn: Any, colour: str, style: str, label: str) -> None:
    if drawn := [(x, y) for x, y in drawn if y is not None]:
        axes.plot(*zip(*drawn, strict=True), style, color=colour, label=label)


def _ms(own: dict[str, Any]) -> float | None:
    return None if "failed" in own else 1e3 * own["median_seconds"]


def _mb(own: dict[str, Any]) -> float | None:
    return None if "failed" in own else max(own["added_peak_bytes"] / 1e6, 0.1)
