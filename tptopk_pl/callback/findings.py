"""What the probe can find, in words, each with the edit that helps."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tptopk_pl.callback.losses import RETURN_LOSSES

_NAMES = 4  # of parameters, in a refusal

NOT_REPEATABLE = (
    "training_step gives other gradients for the same records under the same seed: it keeps "
    "something from batch to batch, or draws from a generator of its own. Take schedules from "
    "self.global_step and random numbers from torch's, numpy's or Python's global generator."
)


def coupled(how: str) -> str:
    """One record's gradient changes, in the way ``how``."""
    return (
        f"One example's gradient {how} (a sum, a class-weighted mean, ignored labels, batch "
        f"statistics, MixUp or padding): make examples independent, or {RETURN_LOSSES}."
    )


def ignoring(value: int) -> str:
    """A mean is over the labels that are not ``value``."""
    return (
        f"One example's gradient changes with the others' ignored labels ({value}), because the "
        f"mean is over the labels that are left. Even if no label is ignored, {RETURN_LOSSES}, "
        "each over the labels of its own record."
    )


def outside(names: Sequence[str]) -> str:
    """Parameters are used outside their layers' forward.

    Blocks repeat the same names: a ``*`` stands for their numbers.
    """
    patterns = [re.sub(r"\b\d+\b", "*", name) for name in names]
    shown = list(
        dict.fromkeys(
            pattern if patterns.count(pattern) > 1 else name
            for name, pattern in zip(names, patterns, strict=True)
        )
    )
    more = f" and {len(shown) - _NAMES} more" if len(shown) > _NAMES else ""
    return (
        f"The per-example gradients of {', '.join(shown[:_NAMES])}{more} cannot be seen, because "
        "these parameters are used outside their own layers' forward: use them through their "
        "layers only (for an L2 penalty, the optimizer's weight_decay), or, in a network that you "
        "cannot edit, call requires_grad_(False) on them."
    )


def fails(where: str, error: Exception) -> str:
    """``training_step`` cannot run on something made up."""
    advice = ""
    if isinstance(error, LookupError):
        advice = (
            " It must take any record of the data's shapes and types (random texts too: return "
            "class labels as integers)."
        )
    elif "more than 1 value per channel" in str(error):  # opacus' ModuleValidator makes such
        advice = " Groups of one value are normalized to 0: take fewer groups in its GroupNorm."
    return (
        f"training_step fails on {where}, so that coupled examples cannot be found: "
        f"{type(error).__name__}: {error}{advice}"
    )
