"""The command `tptopk`: privacy figures without a training run.

`tptopk plan` calibrates a two-phase plan; `tptopk epsilon` gives the ε of steps already decided on.
Each prints an aligned table, or JSON with `--json` (there an infinite ε is the text "inf").

    tptopk plan --num-units 60000 --num-steps 400 --expected-batch-size 600 \
        --target-epsilon 1 --target-delta 1e-5
    tptopk epsilon --segment 1.0,0.01,500 --segment 0.8,0.01,1500 --target-delta 1e-5
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tptopk_pl import accounting
from tptopk_pl._validate import positive_int
from tptopk_pl.accounting import Segment
from tptopk_pl.plan import METHODS, TwoPhasePlan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Returns:
        Exit code: 0, or 2 with one line on stderr if an argument is refused.
    """
    args = _parser().parse_args(argv)
    try:
        result = args.run(args)
    except ValueError as error:
        print(f"tptopk {args.command}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_finite(result), indent=2) if args.json else _table(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tptopk", description="Privacy figures of two-phase DP-SGD.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="calibrate a plan", allow_abbrev=False))
    _add_epsilon(commands.add_parser("epsilon", help="ε of given steps", allow_abbrev=False))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_plan)
    add = parser.add_argument
    add("--num-units", type=int, required=True, help="N, privacy units in the training set")
    add("--num-steps", type=int, required=True, help="T, logical steps of both phases")
    add("--expected-batch-size", type=int, required=True, help="B, expected units in a step")
    add("--target-delta", type=float, required=True, help="δ")
    add("--target-epsilon", type=float, help="calibrate the noise to this ε")
    add("--noise-multiplier", type=float, help="σ of phase 1, instead of --target-epsilon")
    add("--method", choices=list(METHODS), default="tp_topk", help="default: %(default)s")
    add("--warmup-steps", type=int, help="steps of phase 1, instead of --warmup-fraction")
    add("--warmup-fraction", type=float, default=0.3, help="default: %(default)s")
    add("--noise-multiplier-ratio", type=float, default=1.0, help="σ2/σ1, default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def _run_plan(args: argparse.Namespace) -> dict[str, Any]:
    plan = TwoPhasePlan.calibrate(
        num_units=args.num_units,
        num_steps=args.num_steps,
        expected_batch_size=args.expected_batch_size,
        target_delta=args.target_delta,
        target_epsilon=args.target_epsilon,
        noise_multiplier=args.noise_multiplier,
        method=args.method,
        warmup_steps=args.warmup_steps,
        warmup_fraction=args.warmup_fraction,
        noise_multiplier_ratio=args.noise_multiplier_ratio,
    )
    return {"plan": plan.to_dict(), **_figures(plan.segments, plan.target_delta)}


def _add_epsilon(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_epsilon)
    add = parser.add_argument
    add("--target-delta", type=float, required=True, help="δ")
    add("--noise-multiplier", type=float, help="σ, relative to the clip norm")
    add("--num-units", type=int, help="N, privacy units in the training set")
    add("--expected-batch-size", type=int, help="B, expected units in a step")
    add("--num-steps", type=int, help="T, logical steps")
    add(
        "--segment",
        action="append",
        default=[],
        metavar="SIGMA,Q,STEPS",
        help="σ, sampling rate and steps instead of the four options above; repeat to compose",
    )
    add("--json", action="store_true", help="print JSON")


def _run_epsilon(args: argparse.Namespace) -> dict[str, Any]:
    single = {
        "--noise-multiplier": args.noise_multiplier,
        "--num-units": args.num_units,
        "--expected-batch-size": args.expected_batch_size,
        "--num-steps": args.num_steps,
    }
    missing = [name for name, value in single.items() if value is None]
    if bool(args.segment) == (len(missing) < len(single)) or (missing and not args.segment):
        given = [name for name in single if name not in missing] + ["--segment"] * len(args.segment)
        raise ValueError(
            f"Expected either --segment or all of {', '.join(single)}; got "
            f"{', '.join(given) or 'neither'}."
        )
    if args.segment:
        segments = [_parse_segment(text) for text in args.segment]
    else:
        num_units = positive_int("num_units", args.num_units)
        rate = args.expected_batch_size / num_units
        segments = [Segment(args.noise_multiplier, rate, args.num_steps)]
    return _figures(segments, args.target_delta)


def _parse_segment(text: str) -> Segment:
    try:
        sigma, rate, num_steps = text.split(",")
        numbers = float(sigma), float(rate), int(num_steps)
    except ValueError:
        raise ValueError(
            f"Expected segment={text!r} as SIGMA,Q,STEPS, e.g. 1.0,0.01,500."
        ) from None
    return Segment(*numbers)


def _figures(segments: Sequence[Segment], delta: float) -> dict[str, Any]:
    steps = [segment for segment in segments if segment.num_steps]
    return {
        "segments": [
            {
                "noise_multiplier": s.noise_multiplier,
                "sampling_rate": s.sampling_rate,
                "num_steps": s.num_steps,
            }
            for s in steps
        ],
        "delta": delta,
        "epsilon": accounting.epsilon(segments, delta),
        "epsilon_rdp": accounting.epsilon_rdp(segments, delta),
        "epsilon_replace_one": accounting.epsilon_replace_one(segments, delta),
    }


def _finite(value: Any) -> Any:
    """Return `value` with infinite numbers as text, since JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _table(result: dict[str, Any]) -> str:
    """Return the segments as one aligned table, the figures as another."""
    plan = result.get("plan")
    phases = [("", "steps", "noise multiplier σ", "sampling rate q")]
    for index, segment in enumerate(result["segments"], start=1):
        name = f"segment {index}"
        if plan:
            name = "phase 1" if plan["warmup_steps"] and index == 1 else "phase 2"
        sigma, rate = f"{segment['noise_multiplier']:.5g}", f"{segment['sampling_rate']:.5g}"
        phases.append((name, str(segment["num_steps"]), sigma, rate))
    figures = [
        ("ε (PLD, add/remove)", f"{result['epsilon']:.4f}"),
        ("ε (RDP, add/remove)", f"{result['epsilon_rdp']:.4f}"),
        ("ε (PLD, replace-one)", f"{result['epsilon_replace_one']:.4f}"),
        ("δ", f"{result['delta']:g}"),
    ]
    if plan:
        figures.insert(0, ("method", plan["method"]))
    return "\n".join([*_aligned(phases), "", *_aligned(figures)])


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
