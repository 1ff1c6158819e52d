"""How drawing, planning, noise and scoring scale with units, steps and coordinates.

    python benchmarks/scaling.py

One thread; medians of a few repeats.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks

import numpy as np
import torch

from benchmarks import _report
from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.rng import fresh_key, gaussian_noise
from tptopk_pl.sampling import PoissonSampler
from tptopk_pl.selectors import ScoreAccumulator, top_k
from tptopk_pl.units import PrivacyUnits

_REPEATS = 5
_MOST_DRAWN = 10_000
_PHYSICAL_BATCH_SIZE = 128
_PLANS = (  # N, B, T
    (4_000, 128, 300),
    (60_000, 512, 4_700),
    (60_000, 2_048, 1_200),
    (1_000_000, 1_024, 20_000),
    (10_000_000, 4_096, 100_000),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then write JSON, tables and pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--largest", type=_report.positive, default=10**7, help="most units and coordinates"
    )
    parser.add_argument(
        "--plans", type=_report.positive, default=len(_PLANS), help="how many to calibrate"
    )
    _report.add_out_option(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {
        "sampling": sampling(_sizes(10**4, options.largest)),
        "planning": planning(_PLANS[: options.plans]),
        "noise": noise(_sizes(10**3, options.largest)),
        "scoring": scoring(_sizes(10**5, options.largest)),
    }
    machine = _report.machine()
    _report.write_json(options.out / "scaling.json", {"machine": machine, **found})
    text = f"# Scaling\n\n{_report.described(machine)}; one thread.\n"
    for title, rows in found.items():
        text += f"\n## {title.capitalize()}\n\n" + _table(rows)
    (options.out / "scaling.md").write_text(text)
    draw(options.out / "scaling.png", found)


def _sizes(first: int, largest: int) -> list[int]:
    """Powers of ten from ``first`` to ``largest``; at least one size."""
    sizes = [first * 10**power for power in range(8) if first * 10**power <= largest]
    return sizes or [max(largest, 10)]  # the least of which a tenth can be drawn


def _milliseconds(work: Callable[[int], Any]) -> float:
    """Median over repeats ``work(0), work(1), …``, after one that is not counted."""
    work(_REPEATS)
    times = []
    for repeat in range(_REPEATS):
        begun = perf_counter()
        work(repeat)
        times.append(1e3 * (perf_counter() - begun))
    return median(times)


def sampling(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Drawing a step's units and cutting them into chunks of records."""
    rows = []
    for num_units in sizes:
        drawn = max(min(num_units // 10, _MOST_DRAWN), 1)
        for records_per_unit in (1, 2):
            units = _units(num_units, records_per_unit)
            sampler = PoissonSampler(
                units,
                sampling_rate=drawn / num_units,
                steps_per_pass=1,
                physical_batch_size=_PHYSICAL_BATCH_SIZE,
                key=fresh_key(),
                next_step=lambda: 0,
                last_step=1,
            )
            row = {"units": num_units, "records per unit": records_per_unit, "drawn": drawn}
            rows.append(
                {
                    **row,
                    "draw ms": _milliseconds(sampler.draw),
                    "draw and chunks ms": _milliseconds(sampler.chunks),
                }
            )
    return rows


def _units(num_units: int, records_per_unit: int) -> PrivacyUnits:
    if records_per_unit == 1:
        return PrivacyUnits.one_per_record(num_units)
    return PrivacyUnits(np.tile(np.arange(num_units), records_per_unit))


def planning(plans: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Calibrating both phases to ε = 3 at δ = 1e-5, or 1/(10 N) if that is less."""
    rows = []
    for num_units, batch_size, num_steps in plans:

        def calibrate(_: int, n: int = num_units, b: int = batch_size, t: int = num_steps) -> None:
            TwoPhasePlan.calibrate(
                num_units=n,
                num_steps=t,
                expected_batch_size=b,
                target_epsilon=3.0,
                target_delta=min(1e-5, 0.1 / n),
            )

        row = {"units": num_units, "batch": batch_size, "steps": num_steps}
        rows.append({**row, "calibrate ms": _milliseconds(calibrate)})
    return rows


def noise(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A step's Gaussian noise, by generator."""
    key, rows = fresh_key(), []
    for size in sizes:
        row: dict[str, Any] = {"coordinates": size}
        for name, secure in (("cryptographic", True), ("torch", False)):
            taken = _milliseconds(lambda i, k=size, s=secure: gaussian_noise(key, i, k, secure=s))
            row |= {f"{name} ms": taken, f"{name} ns each": 1e6 * taken / size}
        rows.append(row)
    return rows


def scoring(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What the warm-up adds to a step, and choosing a tenth of the coordinates at the switch."""
    rows = []
    for size in sizes:
        warmup, gradient = ScoreAccumulator(size, window=3), torch.randn(size)
        added = _milliseconds(lambda _, w=warmup, g=gradient: w.add(g, 1.0))
        chosen = _milliseconds(lambda _, g=gradient: top_k(g, len(g) // 10))
        rows.append({"coordinates": size, "add ms": added, "top_k ms": chosen})
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [[_figure(value) for value in row.values()] for row in rows]
    return _report.table(list(rows[0]), cells)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


def draw(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Four panels, milliseconds on log axes."""
    title = "Drawing, planning, noise and scoring on one thread, milliseconds"
    with _report.figure(path, 2, 2, (13, 9), title) as axes:
        drawing, plans, gaussian, scores = axes.flat
        for number in (1, 2):
            rows = [row for row in found["sampling"] if row["records per unit"] == number]
            label = f"records in a unit: {number}"
            _lines(drawing, rows, "units", {"draw and chunks ms": label})
        drawing.set_yscale("linear")
        drawing.set_ylim(bottom=0)
        drawing.set_title("Drawing a tenth of the units, at most 10,000, and cutting chunks")
        labels = [
            f"N {r['units']:,}\nB {r['batch']:,}\nT {r['steps']:,}" for r in found["planning"]
        ]
        plans.bar(range(len(labels)), [row["calibrate ms"] for row in found["planning"]])
        plans.set_xticks(range(len(labels)), labels, fontsize="small")
        plans.set_title("Calibrating a plan to ε = 3")
        names = {"cryptographic ms": "cryptographic", "torch ms": "torch's generator"}
        _lines(gaussian, found["noise"], "coordinates", names)
        gaussian.set_title("Gaussian noise of a step")
        names = {"add ms": "scores of a warm-up step", "top_k ms": "choosing a tenth, once"}
        _lines(scores, found["scoring"], "coordinates", names)
        scores.set_title("Scores and support")
        for one in axes.flat:
            one.set_ylabel("ms")


def _lines(axes: Any, rows: list[dict[str, Any]], x: str, names: dict[str, str]) -> None:
    for key, label in names.items():
        axes.plot([row[x] for row in rows], [row[key] for row in rows], "o-", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.legend()


if __name__ == "__main__":
    main()
