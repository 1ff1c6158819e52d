"""What a whole Trainer step costs, in time and memory: SGD, Opacus, and this library's phases.

python benchmarks/step_cost.py
python benchmarks/step_cost.py --models cifar_cnn --contenders sgd opacus_hooks phase2_10
python benchmarks/step_cost.py --growth
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for models

from benchmarks import _growth, _report
from benchmarks._contenders import CONTENDERS, checked
from benchmarks._race import race
from benchmarks._worker import Job
from benchmarks.networks import NETWORKS, workload

_HEADER = (
    "contender",
    "ms",
    "× SGD (quartiles)",
    "× faster than Opacus' hooks",
    "added peak MB",
    "÷ SGD",
    "÷ Opacus' hooks",
    "noise ms: cryptographic",
    "torch",
)
_COLOURS = ("0.4", "tab:red", "tab:orange", "tab:purple", "tab:blue", "tab:cyan", "tab:green")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then write JSON, tables and pictures."""
    options = _options(arguments)
    if options.growth:
        _growth.main(options.out, options.threads[0], options.pairs, options.device)
        return
    results = []
    for threads in options.threads:
        for model in options.models:
            batch_size = options.batch_size or workload(model).batch_size
            job = Job(model, "", batch_size, threads, options.pairs, options.device)
            found = race(job, options.contenders)
            results.append(
                {
                    "model": model,
                    "batch_size": batch_size,
                    "threads": threads,
                    "contenders": found,
                }
            )
    machine = _report.machine()
    data = {"machine": machine, "device": options.device, "races": results}
    _report.write_json(options.out / "step_cost.json", data)
    text = f"# Cost of a step\n\n{_report.described(machine)}; {options.device}.\n\n"
    text += "\n".join(_section(result) for result in results)
    (options.out / "step_cost.md").write_text(text)
    _draw(options.out / "step_cost.png", results)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), help="or mlp_<width>")
    parser.add_argument(
        "--contenders", nargs="+", default=list(CONTENDERS), help="or phase2_<per cent>"
    )
    parser.add_argument("--batch-size", type=_report.positive, help="default: the model's own")
    parser.add_argument(
        "--threads", nargs="+", type=_threads, default=[1], help='numbers, or "all"'
    )
    parser.add_argument(
        "--pairs", type=_report.positive, default=15, help="measured steps of each contender"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--growth", action="store_true", help="over batch, d and k/d instead")
    _report.add_out_option(parser)
    options = parser.parse_args(arguments)
    try:
        for model in options.models:
            workload(model)
        for name in options.contenders:
            checked(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def _threads(text: str) -> int:
    return _report.num_cores() if text == "all" else _report.positive(text)


def _section(result: dict[str, Any]) -> str:
    """A model's table."""
    found = result["contenders"]
    sizes = {own["num_parameters"] for own in found.values() if "failed" not in own}
    size = f"{sizes.pop():,} parameters, " if sizes else ""
    title = f"## {result['model']}: {size}batch {result['batch_size']}"
    rows = [_row(name, own) for name, own in found.items()]
    return f"{title}, {result['threads']} thread(s)\n\n{_report.table(_HEADER, rows)}"


def _row(name: str, own: dict[str, Any]) -> list[str]:
    if "failed" in own:
        return [name, own["failed"].replace("|", "/"), *[""] * (len(_HEADER) - 2)]
    cells = [name, f"{1e3 * own['median_seconds']:.1f}"]
    ratio, other = own.get("relative_to_sgd"), own.get("relative_to_opacus_hooks")
    cells.append(
        f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else "–"
    )
    cells.append(f"{1 / other['median']:.2f}" if other else "–")
    cells.append(f"{own['added_peak_bytes'] / 1e6:,.0f}")
    for key in ("memory_relative_to_sgd", "memory_relative_to_opacus_hooks"):
        cells.append(f"{own[key]:.2f}" if key in own else "–")
    noise = own.get("noise_seconds", {})
    for key in ("cryptographic", "torch"):
        share = (
            f"{1e3 * noise[key]:.2f} ({noise[key] / own['median_seconds']:.0%})" if noise else ""
        )
        cells.append(share)
    return cells


def _draw(path: Path, results: list[dict[str, Any]]) -> None:
    """Bars: above, time relative to SGD; below, added memory."""
    from matplotlib.patches import Patch

    names = list(results[0]["contenders"])
    colours = dict(zip(names, cycle(_COLOURS)))
    labels = [f"{r['model']}\nbatch {r['batch_size']}, {r['threads']} thread(s)" for r in results]
    size = (max(2.4 * len(results), 9), 8)
    title = "A whole Trainer step of each contender, on the same records"
    with _report.figure(path, 2, 1, size, title) as axes:
        times, memory = axes[:, 0]
        _bars(times, results, colours, _relative_time)
        if _bars(memory, results, colours, lambda own: (own["added_peak_bytes"] / 1e6, 0, 0)):
            memory.set_yscale("log")
            memory.set_ylim(bottom=1)
        times.axhline(1, color="black", linewidth=1)
        times.set_ylabel("time relative to SGD\nmedian and quartiles of paired steps")
        memory.set_ylabel("peak memory added\nby training, MB")
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        times.legend(handles=handles, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1))
        for one in (times, memory):
            one.set_xticks(range(len(labels)), labels)


def _relative_time(own: dict[str, Any]) -> tuple[float, float, float]:
    ratio = own["relative_to_sgd"]
    return ratio["median"], ratio["median"] - ratio["low"], ratio["high"] - ratio["median"]


def _bars(
    axes: Any, results: list[dict[str, Any]], colours: dict[str, str], value: Callable[..., Any]
) -> int:
    """One group for each model, a cross for what has no value; how many bars there are."""
    width, drawn = 0.85 / len(colours), 0
    for place, (name, colour) in enumerate(colours.items()):
        for group, result in enumerate(results):
            own, x = result["contenders"][name], group + (place - (len(colours) - 1) / 2) * width
            try:
                height, below, above = value(own)
            except KeyError:
                axes.annotate("×", (x, 0), xycoords=("data", "axes fraction"), ha="center")
                continue
            axes.bar(x, height, width, color=colour, yerr=[[below], [above]], ecolor="0.2")
            text = f"{height:.2f}" if height < 10 else f"{height:,.0f}"
            axes.annotate(text, (x, height + above), ha="center", va="bottom", fontsize="x-small")
            drawn += 1
    return drawn


if __name__ == "__main__":
    main()
