"""From a Trainer and a loader to the number of steps, the plan and the Poisson loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tptopk_pl import rng
from tptopk_pl.callback import refusals
from tptopk_pl.callback.settings import Settings
from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.sampling import PoissonLoader, PoissonSampler, loader_refusals
from tptopk_pl.units import PrivacyUnits, unit_ids

_NO_LAST_STEP = 2**62


def privacy_units(loader: Any, settings: Settings, world_size: int) -> PrivacyUnits:
    """The units of a training loader that can be sampled.

    Raises:
        MisconfigurationException: if the loader would break the sampling assumption.
    """
    refusals.raise_if_any(loader_refusals(loader, world_size))
    if not len(loader.dataset):
        raise MisconfigurationException("The training data set is empty.")
    ids = unit_ids(loader.dataset)
    return PrivacyUnits(
        range(len(loader.dataset)) if ids is None else ids,
        max_records_per_unit=settings.max_records_per_unit,
    )


def make_plan(trainer: Trainer, settings: Settings, num_units: int) -> TwoPhasePlan:
    """Calibrate the plan of a fit that begins."""
    num_steps = planned_steps(trainer, steps_per_epoch(settings, num_units))
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        settings = settings.trial(num_steps)
    return settings.plan(num_units, num_steps)


def described(plan: TwoPhasePlan) -> str:
    """The plan in a line, for whoever starts the run."""
    warmup = f" ({plan.warmup_steps:,} of warm-up)" if plan.warmup_steps else ""
    return (
        f"Plan: {plan.num_units:,} privacy units, {plan.expected_batch_size:,} a step on average, "
        f"{plan.num_steps:,} steps{warmup}, noise multiplier {plan.noise_multiplier:.3g}: "
        f"epsilon = {plan.epsilon:.4g} at delta = {plan.target_delta:g} when all are run."
    )


def poisson_loader(
    loader: Any,
    units: PrivacyUnits,
    plan: TwoPhasePlan,
    settings: Settings,
    *,
    key: bytes,
    next_step: Callable[[], int],
    trainer: Trainer,
) -> PoissonLoader:
    """Poisson sampling in place of the loader's own.

    Raises:
        ValueError: if a unit has more records than a physical chunk holds.
    """
    physical = settings.physical_batch_size or loader.batch_size
    if units.largest > physical:
        raise ValueError(
            f"Expected physical_batch_size={physical} to hold the largest privacy unit "
            f"({units.largest} records): raise it, or set max_records_per_unit."
        )
    sampler = PoissonSampler(
        units,
        sampling_rate=plan.sampling_rate,
        steps_per_pass=steps_per_epoch(settings, units.num_units),
        physical_batch_size=physical,
        key=key,
        next_step=next_step,
        last_step=last_step(plan, settings),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
    )
    worker_seed = int(rng.Stream(key, "workers", next_step()).integers(2**62, 1)[0])
    return PoissonLoader(loader, sampler, worker_seed)


def last_step(plan: TwoPhasePlan, settings: Settings) -> int:
    """No step from here on runs; without a budget there is no such step."""
    return plan.num_steps if settings.enforces_budget else _NO_LAST_STEP


def steps_per_epoch(settings: Settings, num_units: int) -> int:
    """``ceil(N / B)``."""
    return -(-num_units // settings.expected_batch_size)


def planned_steps(trainer: Trainer, per_epoch: int) -> int:
    """T: ``max_steps``, or ``max_epochs`` times the steps of an epoch that are not limited away.

    Raises:
        MisconfigurationException: if the Trainer's length has no end.
    """
    limit = trainer.limit_train_batches
    per_epoch = min(per_epoch, limit) if isinstance(limit, int) else int(per_epoch * limit)
    bounds = []
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * per_epoch)
    if not bounds:
        raise MisconfigurationException(
            "The noise depends on the number of steps: give the Trainer max_epochs or max_steps."
        )
    return min(bounds)
