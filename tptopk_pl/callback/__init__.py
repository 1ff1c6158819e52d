"""Lightning glue: how the mechanism enters a Trainer. No mathematics here."""

from tptopk_pl.callback.core import TwoPhaseSupportCallback

__all__ = ["TwoPhaseSupportCallback"]
