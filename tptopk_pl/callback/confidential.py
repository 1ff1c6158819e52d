"""Keeping what is computed from raw training data out of logs.

A training loss, a training accuracy or a gradient norm is an exact function of private records and
no guarantee covers it. While a module trains, what it and other callbacks log is dropped (or
renamed to ``non_private/...`` on request), and its loggers are stand-ins that write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

PREFIX = "non_private/"
_TRAINING_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)


class TrainingLog:
    """Stands between those who log and the loggers, during a fit.

    Args:
        trainer: tells whether the module is training.
        log_non_private: let values through, under names that say so.

    Attributes:
        withheld: names that were logged, or tried to be, from training.
        muted: drop everything (a probe on synthetic records is running).
    """

    def __init__(self, trainer: Trainer, log_non_private: bool) -> None:
        self._trainer, self._let_through = trainer, log_non_private
        self._told = False
        self.withheld: set[str] = set()
        self.muted = False

    def withholding(self, log: Callable[..., None]) -> Callable[..., None]:
        """``log`` that passes values of validation and test; those of training it withholds."""

        def withhold(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not self._trainer.training:
                return log(name, value, *args, **kwargs)
            self.withheld.add(name)
            if self._let_through and not self.muted:
                return log(PREFIX + name, value, *args, **kwargs)
            if not self.muted:
                self._tell(name)
            return None

        return withhold

    def _tell(self, name: str) -> None:
        if not self._told:
            self._told = True
            rank_zero_info(
                f"self.log({name!r}) and other values logged while training are computed from raw "
                "training data: not logged. log_non_private=True logs them as non_private/..."
            )

    def training_hooks(self, module: LightningModule) -> dict[str, Callable[..., Any]]:
        """The module's own training hooks by name, each confidential."""
        return {
            name: self._confidential_hook(getattr(module, name))
            for name in _TRAINING_HOOKS
            if is_overridden(name, module)
        }

    def _confidential_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def confidential(*args: Any, **kwargs: Any) -> Any:
            with self.confidential():
                return hook(*args, **kwargs)

        return confidential

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
