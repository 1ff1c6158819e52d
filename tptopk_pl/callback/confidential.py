"""Keeping what is computed from raw training data out of logs.

A training loss, a training accuracy or a gradient norm is an exact function of private records and
no guarantee covers it. While a module trains, its own ``self.log`` calls are dropped (or renamed to
``non_private/...`` on request), and its loggers are stand-ins that write nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

PREFIX = "non_private/"


class TrainingLog:
    """Stands in for a module's ``log`` during a fit.

    Args:
        trainer: tells whether the module is training.
        module: whose ``log`` it replaces.
        log_non_private: let values through, under names that say so.

    Attributes:
        withheld: names that the module logged, or tried to log, from training.
        muted: drop everything (a probe on synthetic records is running).
    """

    def __init__(self, trainer: Trainer, module: LightningModule, log_non_private: bool) -> None:
        self._trainer, self._log, self._let_through = trainer, module.log, log_non_private
        self._told = False
        self.withheld: set[str] = set()
        self.muted = False

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log from validation and test; withhold or rename from training."""
        if not self._trainer.training:
            return self._log(name, value, *args, **kwargs)
        self.withheld.add(name)
        if self.muted:
            return None
        if self._let_through:
            return self._log(PREFIX + name, value, *args, **kwargs)
        if not self._told:
            self._told = True
            rank_zero_info(
                f"self.log({name!r}) and other values logged while training are computed from raw "
                "training data: not logged. log_non_private=True logs them as non_private/..."
            )
        return None

    @contextmanager
    def confidential(self) -> Iterator[None]:
        """Within: ``self.logger`` of the module writes nothing, unless values are let through."""
        loggers = self._trainer.loggers
        if self._let_through and not self.muted:
            yield
            return
        self._trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            self._trainer.loggers = loggers

    def monitors(self) -> list[str]:
        """One refusal for each callback or scheduler that watches a withheld value."""
        withheld = {n + suffix for n in self.withheld for suffix in ("", "_step", "_epoch")}
        watching = [
            (type(callback).__name__, callback.monitor)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
            if getattr(callback, "monitor", None) in withheld
        ] + [
            (type(config.scheduler).__name__, config.monitor)
            for config in self._trainer.lr_scheduler_configs
            if config.monitor in withheld
        ]
        return [
            f"{who} monitors {name!r}, which is computed from raw training data: monitor a "
            "validation metric instead."
            for who, name in watching
        ]
