"""What all tools share: the machine's description, files and pictures."""

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "lightning", "opacus", "numpy", "cryptography")
_STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "figure.dpi": 120,
}


def add_out_option(parser: argparse.ArgumentParser) -> None:
    """``--out``: where results go."""
    parser.add_argument(
        "--out", type=_folder, default=RESULTS, metavar="DIR", help="default: %(default)s"
    )


def _folder(text: str) -> Path:
    """A folder that can be written to: better known now than after an hour of measuring."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {error}") from error
    return path


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected {text} in {{1, 2, …}}")
    return int(text)


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, system and versions."""
    return {
        "cpu": _cpu(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def described(found: dict[str, Any]) -> str:
    """The machine in a line."""
    packages = ", ".join(f"{name} {found[name]}" for name in _PACKAGES)
    return f"{found['cpu']}, {found['cores']} core(s), Python {found['python']}, {packages}"


def write_json(path: Path, data: Any) -> None:
    """Write readable JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ruler, *rows)) + "\n"


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], title: str) -> Iterator:
    """Axes ``[rows, columns]`` to draw on; the picture is written at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        yield drawn.subplots(rows, columns, squeeze=False)
        drawn.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path)
