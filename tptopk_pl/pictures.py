"""Pictures of a support and of the scores that it was chosen by (they need matplotlib).

They show what was released, and so cost no privacy. Notation: ``k`` active of ``d`` coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import chi2
from torch import Tensor

from tptopk_pl.support import Support

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 200  # bins along a parameter: a few pixels each
_MAX_ROWS = 100  # more could not be read, and take seconds to draw
_LONGEST_NAME = 40
_RANGE, _BINS = (-5, 15), 100  # of scores; half are negative, and a few are huge


def support_figure(support: Support, names: Sequence[str]) -> Figure:
    """Where the active coordinates are: one row for each parameter.

    Left, a parameter's coordinates in order, in bins coloured by the share that is active; right,
    the share of the whole parameter, with its numbers. Of more than 100 parameters the largest 100
    are shown.

    Args:
        support: what to draw, on any device.
        names: of the parameters, in the order of ``support.sizes``.
    """
    from matplotlib.figure import Figure

    support = support.to("cpu")
    locals_, sizes = support.split(), support.sizes
    shown = sorted(sorted(range(len(sizes)), key=lambda p: -sizes[p])[:_MAX_ROWS])
    figure = Figure(figsize=(12, 1.6 + 0.23 * max(len(shown), 4)), layout="constrained")
    where, how_many = figure.subplots(1, 2, width_ratios=[5, 3])
    _draw_bins(figure, where, torch.stack([_binned(locals_[p], sizes[p]) for p in shown]))
    where.set_yticks(range(len(shown)), [_shortened(names[p]) for p in shown], fontsize="small")
    _draw_shares(how_many, [len(locals_[p]) for p in shown], [sizes[p] for p in shown])
    share = support.num_active / support.num_total
    how_many.axvline(share, color="0.3", linestyle="--", linewidth=1)
    title = (
        f"Support: {support.num_active:,} of {support.num_total:,} coordinates are trained "
        f"({100 * share:.3g} %: dashed)"
    )
    if len(shown) < len(sizes):
        title += f"\nthe {len(shown)} largest of {len(sizes)} parameters"
    figure.suptitle(title, fontsize="medium")
    return figure


def score_figure(scores: Tensor, num_steps: int, lowest_chosen: float | None = None) -> Figure:
    """How many coordinates have which score, beside what noise alone would give.

    Args:
        scores: ``[d]``, in units of the standard deviation that noise alone gives to a score.
        num_steps: T1; of noise alone, ``T1 + sqrt(2 T1) score`` is chi-squared of T1 degrees.
        lowest_chosen: the k-th highest score; None for a support that is not chosen by scores.
    """
    from matplotlib.figure import Figure

    def exceeds(score: Any) -> Any:
        return chi2.sf(num_steps + (2 * num_steps) ** 0.5 * score, num_steps)

    edges, counts = (tensor.numpy() for tensor in score_histogram(scores))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counts, edges, fill=True, color="tab:blue", label=f"{len(scores):,} coordinates")
    noise = len(scores) * (exceeds(edges[:-1]) - exceeds(edges[1:]))
    axes.stairs(noise, edges, color="tab:orange", label="were all of them noise alone")
    if lowest_chosen is not None:
        chosen, chance = int((scores >= lowest_chosen).sum()), len(scores) * exceeds(lowest_chosen)
        label = (
            f"lowest score chosen: {lowest_chosen:.2f}\n{chosen:,} coordinates reach it; "
            f"of noise alone, {chance:,.0f} would"
        )
        axes.axvline(lowest_chosen, color="black", linestyle="--", label=label)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    low, high = _RANGE
    ticks = range(low, high + 1, 5)
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"≤ {low}", *map(str, ticks[1:-1]), f"≥ {high}"])
    axes.set_xlabel("score, in standard deviations of what noise alone gives")
    axes.set_ylabel("coordinates")
    axes.legend(loc="upper right", fontsize="small")
    figure.suptitle("Scores of the warm-up: energy of the gradient of each coordinate")
    return figure


def score_histogram(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Edges ``[b + 1]`` of bins from -5 to 15, and counts ``[b]``; the outer bins are open."""
    counts = torch.histc(scores.clamp(*_RANGE), _BINS, *_RANGE)
    return torch.linspace(*_RANGE, _BINS + 1), counts


def _binned(local: Tensor, size: int) -> Tensor:
    """Active share ``[200]`` along a parameter of ``size`` elements; a small one is stretched."""
    bins = max(min(size, _COLUMNS), 1)
    edges = torch.arange(bins + 1) * size // bins
    counts = torch.searchsorted(local, edges).diff()
    shares = counts / edges.diff().clamp(min=1)
    return shares[torch.arange(_COLUMNS) * bins // _COLUMNS]


def _draw_bins(figure: Figure, axes: Any, shares: Tensor) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import PercentFormatter

    rows = len(shares)
    image = axes.imshow(
        shares.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm=PowerNorm(0.5, 0, 1),  # shares are mostly small: give these more of the colours
        extent=(0, 1, rows - 0.5, -0.5),
    )
    axes.hlines([row - 0.5 for row in range(1, rows)], 0, 1, color="white", linewidth=1.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 1], ["first", "last"])
    axes.set_xlabel("coordinates of the parameter, in order, in up to 200 bins")
    figure.colorbar(
        image,
        ax=axes,
        location="left",
        anchor=(0, 1),
        shrink=min(0.9, 8 / rows),
        ticks=[0, 0.1, 0.3, 1],
        format=PercentFormatter(1, decimals=0),
        label="active",
    )


def _draw_shares(axes: Any, actives: Sequence[int], sizes: Sequence[int]) -> None:
    from matplotlib.ticker import PercentFormatter

    shares = [active / max(size, 1) for active, size in zip(actives, sizes, strict=True)]
    axes.barh(range(len(shares)), shares, height=0.7, color="tab:blue")
    limit = 1.8 * max(*shares, 0.01)  # room for the numbers
    for row, (active, size) in enumerate(zip(actives, sizes, strict=True)):
        text = f"{active:,} / {size:,} "
        axes.text(limit, row, text, ha="right", va="center", fontsize="small")
    axes.set_ylim(len(shares) - 0.5, -0.5)  # the rows of the other half
    axes.set_yticks([])
    axes.set_xlim(0, limit)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("active share of the parameter")


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
