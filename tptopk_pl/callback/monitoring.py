"""What is logged of the support, once, at the switch.

All of it is computed from released gradients (clipped and noised) and from the support that was
chosen from them: post-processing, which costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from tptopk_pl.pictures import score_figure, score_histogram, support_figure
from tptopk_pl.selectors import ScoreAccumulator, retained_energy
from tptopk_pl.selectors.score import score
from tptopk_pl.support import Support


@dataclass(frozen=True)
class Choice:
    """A support, and the warm-up that it ended.

    Attributes:
        support: ``k`` of ``d`` coordinates.
        names: of the trained parameters, in the order of the support.
        warmup: sums of the released gradients.
        by_score: whether the support holds the highest scores; else it is random.
    """

    support: Support
    names: Sequence[str]
    warmup: ScoreAccumulator
    by_score: bool

    def scalars(self) -> dict[str, float]:
        """``k`` and ``k/d``, the active share of each parameter, and the energy retained.

        The energy is left out where :func:`retained_energy` is not defined. A random support owes
        nothing to the scores: its energy needs no second half to choose from.
        """
        support = self.support
        values = {
            "support/num_active": float(support.num_active),
            "support/share": support.num_active / support.num_total,
        }
        for name, share in zip(self.names, support.shares(), strict=True):
            values[f"support_share/{name}"] = share
        retained = retained_energy(self.warmup.energy, self._choose)
        return values if retained is None else {**values, "support/retained_energy": retained}

    def _choose(self, scores: Tensor) -> Tensor:
        k, indices = self.support.num_active, self.support.indices
        return scores.topk(k).indices if self.by_score else indices.to(scores.device)

    def draw(self, loggers: Iterable[Logger], step: int) -> None:
        """Histogram and pictures, to loggers of TensorBoard; pictures only with matplotlib."""
        boards = [each.experiment for each in loggers if isinstance(each, TensorBoardLogger)]
        if not boards:
            return
        scores = self._standardized_scores()
        if scores is not None:
            for board in boards:
                _add_histogram(board, scores, step)
        if find_spec("matplotlib") is None:
            return
        figures = {"support/coordinates": support_figure(self.support, self.names)}
        if scores is not None:
            lowest = float(scores[self.support.indices.cpu()].min()) if self.by_score else None
            figures["support/scores"] = score_figure(scores, self.warmup.num_steps, lowest)
        for board in boards:
            for name, figure in figures.items():
                board.add_figure(name, figure, step)

    def _standardized_scores(self) -> Tensor | None:
        """``[d]``, in units of what noise alone gives; None without noise."""
        deviation = self.warmup.noise_deviation
        return (score(self.warmup) / deviation).cpu() if deviation else None


def _add_histogram(board: Any, scores: Tensor, step: int) -> None:
    """Binned here: TensorBoard's own bins reach to the largest score, and show the rest as one."""
    edges, counts = score_histogram(scores)
    board.add_histogram_raw(
        "support/scores",
        min=float(edges[0]),
        max=float(edges[-1]),
        num=len(scores),
        sum=float(scores.sum(dtype=torch.float64)),
        sum_squares=float(scores.double().square().sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )
