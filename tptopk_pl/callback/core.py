"""The callback: private two-phase training for any LightningModule on any Trainer.

It wraps neither module nor optimizer. One Lightning batch is one logical Poisson batch and one step
of DP-SGD; the privatized gradient is written into ``p.grad`` before the optimizer runs, so
schedulers, ``global_step``, checkpoints and other callbacks work unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from tptopk_pl import rng
from tptopk_pl.callback import planning, refusals
from tptopk_pl.callback.confidential import PREFIX, TrainingLog
from tptopk_pl.callback.figures import Figures
from tptopk_pl.callback.guard import Guard, trained_parameters
from tptopk_pl.callback.logical_step import LogicalStep, summed_loss
from tptopk_pl.callback.monitoring import Choice
from tptopk_pl.callback.phases import Phases
from tptopk_pl.callback.probe import Probe
from tptopk_pl.callback.settings import Settings
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.mechanism import GaussianMechanism
from tptopk_pl.metrics import StepMetrics
from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.sampling import PoissonLoader, loader_refusals
from tptopk_pl.support import Support

_logger = logging.getLogger("tptopk_pl")


class TwoPhaseSupportCallback(Callback):
    """Train privately: full DP-SGD first, then only on the coordinates that it found to matter.

    Args:
        target_epsilon: calibrate the noise of both phases jointly to this ε (PLD). Exactly one of
            ``target_epsilon`` and ``noise_multiplier`` is given.
        target_delta: δ.
        noise_multiplier: σ1, noise standard deviation relative to the clip norm. 0: ε = ∞.
        expected_batch_size: B, expected number of privacy units in a step; q = B/N.
        max_grad_norm: C1, clip norm of a unit's gradient.
        active_ratio: ρ, share of the coordinates that phase 2 trains.
        method: ``tp_topk``, ``tp_rand`` (a random support), ``dp_sgd`` (all coordinates, no
            warm-up) or ``non_private`` (no clipping, no noise).
        selector: what ranks coordinates.
        warmup_steps: T1, steps of phase 1; else ``warmup_fraction`` of all steps.
        warmup_fraction: T1/T.
        noise_multiplier_ratio: σ2/σ1.
        phase2_max_grad_norm: C2; else C1.
        phase2_lr_factor: multiplies every learning rate at the switch.
        physical_batch_size: records in one forward pass, of whole units; else the loader's
            batch_size.
        max_records_per_unit: only the first that many records of each unit are used.
        metrics: a torchmetrics collection (or the name of one, ``"classification"``) that is
            updated from ``{"preds", "target"}`` returned by validation and test steps, and logged.
        log_non_private: log what ``training_step`` logs, as ``non_private/...``.
        secure_rng: cryptographic noise.
        seed: reproducible and NOT private; the budget is not enforced.

    Attributes:
        plan: what decides the guarantee; None before a fit.
        epsilon: ε spent so far (PLD, add/remove one unit).
        support: the coordinates of phase 2; None before the switch.
        noise_is_cryptographic: that of every step, those before a checkpoint included.

    Raises:
        ValueError: if an argument is outside its range.
        MisconfigurationException: at the start of a fit, if anything would break the guarantee.
    """

    log: Callable[..., None]  # the Trainer sets it

    def __init__(
        self,
        *,
        target_delta: float,
        expected_batch_size: int,
        max_grad_norm: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        active_ratio: float = 0.1,
        method: str = "tp_topk",
        selector: str = "score",
        warmup_steps: int | None = None,
        warmup_fraction: float = 0.3,
        noise_multiplier_ratio: float = 1.0,
        phase2_max_grad_norm: float | None = None,
        phase2_lr_factor: float = 1.0,
        physical_batch_size: int | None = None,
        max_records_per_unit: int | None = None,
        metrics: MetricCollection | str | None = None,
        log_non_private: bool = False,
        secure_rng: bool = True,
        seed: int | None = None,
    ) -> None:
        self.settings = Settings(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            max_grad_norm=max_grad_norm,
            active_ratio=active_ratio,
            method=method,
            selector=selector,
            warmup_steps=warmup_steps,
            warmup_fraction=warmup_fraction,
            noise_multiplier_ratio=noise_multiplier_ratio,
            phase2_max_grad_norm=phase2_max_grad_norm,
            phase2_lr_factor=phase2_lr_factor,
            physical_batch_size=physical_batch_size,
            max_records_per_unit=max_records_per_unit,
            log_non_private=log_non_private,
            secure_rng=secure_rng,
            seed=seed,
        )
        self.plan: TwoPhasePlan | None = None
        self._figures = Figures()
        self._metrics = None if metrics is None else StepMetrics(metrics)
        self._phases = Phases(self.settings)
        self._step = 0
        self._seeded = seed is not None
        self.noise_is_cryptographic = secure_rng
        self._resumed = False
        self._undo = ExitStack()

    @property
    def epsilon(self) -> float:
        """ε spent so far: PLD, Poisson sampling, add/remove one privacy unit."""
        return 0.0 if self.plan is None else self.plan.epsilon_at(self._step)

    @property
    def support(self) -> Support | None:
        """The coordinates of phase 2; None before the switch."""
        return self._phases.support

    @property
    def parameter_names(self) -> list[str]:
        """Names of the trained parameters, in the order of the support; of the latest fit."""
        return list(self._engine.parameters)

    @property
    def history(self) -> list[dict[str, float]]:
        """Figures by step, for the run's summary."""
        return self._figures.history

    @property
    def step(self) -> int:
        """Logical steps released so far; each is charged."""
        return self._step

    # ------------------------------------------------------------------ before the fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what breaks privacy; get between the Trainer and its loader and steps."""
        if stage != "fit":
            return
        given = trainer.fit_loop._data_source.instance  # a loader, if fit was called with one
        found = refusals.of_trainer(trainer, pl_module) + refusals.of_layers(pl_module)
        if isinstance(given, DataLoader):
            found += loader_refusals(given, trainer.world_size)
        if found:  # else wait for the optimizer: it tells which parameters are trained
            with_gradient = {n: p for n, p in pl_module.named_parameters() if p.requires_grad}
            found += refusals.of_parameters(pl_module, with_gradient)
        refusals.raise_if_any(found)
        self._trainer, self._module = trainer, pl_module
        self._loader: PoissonLoader | None = None
        self._draw_keys()
        self._warn_if_not_private()
        strategy = trainer.strategy
        make_loader, self._user_step = strategy.process_dataloader, strategy.training_step

        def process_dataloader(loader: Any) -> Any:
            loader = make_loader(loader)
            return self._poisson_loader(loader) if trainer.training else loader

        self._log = TrainingLog(trainer, self.settings.log_non_private)
        self._replace(strategy, "process_dataloader", process_dataloader)
        self._replace(strategy, "training_step", self._run_step)
        self._replace(pl_module, "log", self._log.withholding(pl_module.log))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback is not self:
                self._replace(callback, "log", self._log.withholding(callback.log))
        for name, hook in self._log.training_hooks(pl_module).items():
            self._replace(pl_module, name, hook)

    def _draw_keys(self) -> None:
        """New keys in every process; the noise key never leaves rank 0, none is ever stored."""
        seed = self.settings.seed
        key = rng.fresh_key() if seed is None else rng.seeded_key(seed)
        self._sampling_key = self._trainer.strategy.broadcast(key)
        noise_key = rng.fresh_key() if seed is None else key
        self._noise_key = noise_key if self._trainer.is_global_zero else None

    def _warn_if_not_private(self) -> None:
        if not self._trainer.is_global_zero:
            return
        if self._seeded:
            _logger.warning("seed is given: this run is reproducible and NOT private.")
        elif not self.settings.enforces_budget:
            _logger.warning("No noise is added: this run is NOT private.")

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = owner.__dict__.get(name)
        object.__setattr__(owner, name, value)
        if before is None:
            self._undo.callback(owner.__dict__.pop, name, None)
        else:
            self._undo.callback(object.__setattr__, owner, name, before)

    def _poisson_loader(self, loader: Any) -> PoissonLoader:
        units = planning.privacy_units(loader, self.settings, self._trainer.world_size)
        if self.plan is None:
            self.plan = planning.make_plan(self._trainer, self.settings, units.num_units)
            rank_zero_info(planning.described(self.plan))
            if self.plan.target_delta >= 1 / units.num_units:
                _logger.warning(
                    "target_delta=%g is not below 1/N = %.2g: it allows the full disclosure of a "
                    "unit. Lower it.",
                    self.plan.target_delta,
                    1 / units.num_units,
                )
        else:  # of a checkpoint, an earlier fit or an earlier loader: it stands
            refusals.raise_if_any(self.settings.contradictions(self.plan, units.num_units))
        self._loader = planning.poisson_loader(
            loader,
            units,
            self.plan,
            self.settings,
            key=self._sampling_key,
            next_step=lambda: self._step,
            trainer=self._trainer,
        )
        return self._loader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the engine; from here on no raw gradient is ever visible."""
        self._refuse_unaccounted(trainer)
        refusals.raise_if_any(
            refusals.of_layers(pl_module) + refusals.of_optimizers(trainer.optimizers, pl_module)
        )
        optimizer = trainer.optimizers[0]
        trained = trained_parameters(pl_module, optimizer)
        refusals.raise_if_any(refusals.of_parameters(pl_module, trained))
        self._guard = Guard(pl_module, optimizer)
        self._engine = GradientEngine(pl_module, trained)
        self._engine.attach()
        self._undo.callback(self._engine.detach)
        self._mechanism = GaussianMechanism(
            self.settings.expected_batch_size,
            self._noise_key,
            secure_rng=self.settings.secure_rng,
            reduce=lambda total: trainer.strategy.reduce(total, reduce_op="sum"),
        )
        self._undo.callback(self._mechanism.close)
        self._phases.begin_fit(self._engine, optimizer, list(trained.values()))
        hook = optimizer.register_step_post_hook(lambda *_: self._phases.restore_frozen())
        self._undo.callback(hook.remove)
        self._replace(pl_module, "lr_scheduler_step", self._phases.scheduling(pl_module))
        self._stop_gradient_reducer(trainer)
        self._releasing = False

    def _refuse_unaccounted(self, trainer: Trainer) -> None:
        if trainer.ckpt_path and not self._resumed:
            raise MisconfigurationException(
                f"Checkpoint {trainer.ckpt_path} has no state of {type(self).__name__}: what it "
                "spent is unknown. Start anew, or resume from a private run's checkpoint."
            )
        if self._seeded and self.settings.seed is None:
            raise MisconfigurationException(
                f"The steps of checkpoint {trainer.ckpt_path} had noise of a known seed: they are "
                "not private, and no later step can make them so. Start anew without a seed."
            )
        if not trainer.ckpt_path and self._step != trainer.global_step:
            raise MisconfigurationException(
                f"This callback has already run {self._step} steps: use a new one, or resume with "
                "ckpt_path."
            )

    def _stop_gradient_reducer(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, DDPStrategy):  # only released sums may leave a rank
            self._undo.enter_context(strategy.block_backward_sync())
            # Ranks run unequal numbers of forwards: none may wait for another's buffers.
            strategy.model.require_forward_param_sync = False  # type: ignore[union-attr]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe for coupled examples on synthetic records, before the first step."""
        if trainer.train_dataloader is not self._loader or self._loader is None:
            raise MisconfigurationException(
                "Expected one training DataLoader by itself, got "
                f"{type(trainer.train_dataloader).__name__}."
            )
        if self._step < trainer.global_step:
            raise MisconfigurationException(
                f"The checkpoint is of step {trainer.global_step}, but only {self._step} steps are "
                "accounted for: resume from a checkpoint that this callback took part in."
            )
        self._probe(self._loader)
        self._logical_step = LogicalStep(
            self._current_loader,
            self._engine,
            self._mechanism,
            training_step=self._user_step,
            to_device=self._to_device,
            exclude_ignored_labels=self.probe_result.ignored_labels_couple,
        )
        self._tune()
        self._switch_if_due()
        self._stop_if_spent()

    def _current_loader(self) -> PoissonLoader:
        assert self._loader is not None
        return self._loader

    def _probe(self, loader: PoissonLoader) -> None:
        rank_zero_info("Looking for coupled examples, on synthetic records ...")
        self._log.muted = True
        self._engine.set_support(None)
        probe = Probe(
            self._module,
            self._engine,
            loader.reader.templates,
            lambda records: self._to_device(loader.reader.collate_records(records)),
            lambda batch, n, index: summed_loss(self._user_step(batch, index), n),
            low_precision=self._trainer.precision == "bf16-mixed",
        )
        self._guard.before_step()
        with self._log.confidential():
            self.probe_result = probe.run()
        self._guard.undo_steering()
        self._log.muted = False
        refusals.raise_if_any(self.probe_result.refusals + self._log.monitors())
        self._engine.bypassed.clear()
        self._engine.set_support(self.support)

    def _tune(self) -> None:
        assert self.plan is not None
        units = self._current_loader().poisson.units
        records = len(units.unit_of_record) / units.num_units * self.plan.expected_batch_size
        self._phases.tune(self.plan, self._step, records / self._trainer.world_size)

    # ------------------------------------------------------------------ one logical step

    def _run_step(self, batch: Any, batch_idx: int, *args: Any) -> Tensor:
        """Stands in for ``training_step``: the forward and backward of all chunks of the step.

        Returns a constant with a graph, so that no callback, logger or hook sees a raw loss.
        """
        assert self.plan is not None
        device = self._module.device
        self._guard.before_step()
        self._mechanism.begin_step(
            self._step,
            noise_multiplier=self.plan.noise_multiplier_at(self._step),
            max_grad_norm=self._max_grad_norm,
            num_active=self._engine.num_active,
            device=device,
        )
        with self._log.confidential():
            self._loss = self._logical_step.run(batch_idx, device)
        self._guard.after_step()
        self._releasing = True
        return torch.zeros((), device=device, requires_grad=True)

    def _to_device(self, batch: Any) -> Any:
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the step: noise, reduce, scale, write ``p.grad``. It is charged from here on."""
        if not self._releasing:
            return
        self._releasing = False
        assert self.plan is not None
        if self._step >= planning.last_step(self.plan, self.settings):
            raise RuntimeError(f"Step {self._step} is beyond the plan: nothing is released.")
        gradient = self._mechanism.release()
        if self.plan.phase_at(self._step) == 1:
            sigma, clip_norm = self.plan.noise_multiplier_at(self._step), self._max_grad_norm
            std = sigma * clip_norm / self.plan.expected_batch_size if sigma else 0.0
            self._phases.add_released(gradient, std**2, self.plan)
        self._guard.drop_gradients()
        self._phases.write_gradients(gradient)
        self._step += 1

    @property
    def _max_grad_norm(self) -> float:
        assert self.plan is not None
        return self.settings.clip_norm(self.plan.phase_at(self._step))

    def _switch_if_due(self) -> None:
        assert self.plan is not None
        trainer, plan = self._trainer, self.plan
        warmup = self._phases.switch_if_due(plan, self._step, trainer, self._sampling_key)
        if warmup is None:
            return
        self._tune()
        if not trainer.is_global_zero:
            return
        assert self.support is not None
        by_score = plan.method != "tp_rand"
        choice = Choice(self.support, self.parameter_names, warmup, by_score)
        scalars = choice.scalars()
        self._figures.keep(self._step, scalars)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=self._step)
        choice.draw(trainer.loggers, self._step)

    # ------------------------------------------------------------------ after a step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Undo what other callbacks and hooks did to frozen coordinates."""
        self._phases.restore_frozen()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The same before weights are saved; the checkpoint refers to them."""
        self._phases.restore_frozen()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same for the final weights."""
        self._phases.restore_frozen()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Switch phases, log ε, and end training when the plan is spent."""
        assert self.plan is not None
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = self._figures.next_due(self.plan, self._step - 1, log_every) == self._step
        if due:
            self._write_figures()
            if self.settings.log_non_private:
                mean = self._loss / self.settings.expected_batch_size
                self.log(PREFIX + "loss", mean, on_step=True)
        self._switch_if_due()
        if due:
            self._show(self._figures.next_due(self.plan, self._step, log_every))
        self._stop_if_spent()

    def _write_figures(self) -> None:
        """To the loggers directly: ``self.log`` would repeat them at later steps, then too low."""
        assert self.plan is not None
        figures = self._figures.of_privacy(self.plan, self._step, self._engine.num_active)
        for logger in self._trainer.loggers:
            logger.log_metrics(figures, step=self._step)

    def _show(self, until: int) -> None:
        """On the progress bar: ε of the step up to which it is shown, never less than spent."""
        assert self.plan is not None
        until = min(until, max(self.plan.num_steps, self._step))
        shown = {
            "privacy/epsilon": self._figures.epsilon(self.plan, until),
            "privacy/phase": float(self.plan.phase_at(self._step)),
        }
        for name, value in shown.items():
            self.log(name, value, on_step=True, prog_bar=True, logger=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log once an epoch as well: short runs never reach ``log_every_n_steps``."""
        assert self.plan is not None
        if self._figures.are_stale(self.plan, self._step):
            self._write_figures()

    def _stop_if_spent(self) -> None:
        assert self.plan is not None
        trainer, plan = self._trainer, self.plan
        if self._step < planning.last_step(plan, self.settings) or trainer.should_stop:
            return
        per_epoch = planning.steps_per_epoch(self.settings, plan.num_units)
        if plan.num_steps < planning.planned_steps(trainer, per_epoch):
            rank_zero_info(
                f"The plan's {plan.num_steps} steps are spent (epsilon = {self.epsilon:.4g}): "
                "training stops here."
            )
            trainer.fit_loop.min_epochs = None
            trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    # ------------------------------------------------------------------ metrics

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Update the metrics from ``{"preds", "target"}``."""
        if self._metrics is not None:
            self._metrics.update(outputs)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of the validation set."""
        self._log_metrics("val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of the test set."""
        self._log_metrics("test")

    def _log_metrics(self, stage: str) -> None:
        if self._metrics is None:
            return
        for place, (name, value) in enumerate(self._metrics.compute_and_reset().items()):
            self.log(f"{stage}/{name}", value, prog_bar=place == 0, sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what validation measured for the run's summary."""
        if not trainer.sanity_checking and self.plan is not None:
            self._figures.keep_measured(self._step, trainer.callback_metrics)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors; never a key."""
        return {
            "plan": None if self.plan is None else self.plan.to_dict(),
            "step": self._step,
            "seeded": self._seeded,
            "noise_is_cryptographic": self.noise_is_cryptographic,
            "phases": self._phases.state_dict(),
            "history": list(self.history),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the plan, the spend and the support of the checkpoint."""
        plan = state_dict["plan"]
        self.plan = None if plan is None else TwoPhasePlan.from_dict(plan)
        self._step = state_dict["step"]
        self._seeded = self._seeded or state_dict["seeded"]
        self.noise_is_cryptographic &= state_dict["noise_is_cryptographic"]
        self._phases.load_state_dict(state_dict["phases"])
        self._figures.history = list(state_dict["history"])
        self._resumed = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave Trainer, module and optimizer as they were."""
        self._end_fit()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave Trainer, module and optimizer as they were."""
        self._end_fit()

    def _end_fit(self) -> None:
        self._undo.close()
        self._resumed = False
