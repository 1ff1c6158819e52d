"""One contender in a process of its own: a real fit that waits for the baton before each step.

Messages to the parent: ``("at", seconds)`` at the start of a step that waits, with what the step
before it took, from the baton to the next start; ``("done", result)``; ``("failed", line)``.
"""

import logging
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import _contenders, _memory
from benchmarks.networks import workload
from tptopk_pl import TwoPhaseSupportCallback
from tptopk_pl.rng import fresh_key, gaussian_noise

# Phase 2 begins after its 2 steps of warm-up; its first steps may choose kernels or compile.
DISCARDED = _contenders.WARMUP_STEPS + 4
_MOST_BYTES = 6e9  # of per-example gradients
_NOISE_REPEATS = 5
_PLANNED_STEPS = 30_000  # as of a long run, for which compiling a loop would pay; few are run


@dataclass(frozen=True)
class Job:
    """One contender on one model: ``num_pairs`` measured steps of ``batch_size`` records."""

    model: str
    contender: str
    batch_size: int
    threads: int
    num_pairs: int
    device: str = "cpu"


class NotRunError(Exception):
    """The contender would need more memory than is sensible."""


class Baton(Callback):
    """Waits at the start of each step after the discarded ones; tells what the last one took.

    Attributes:
        peak: most bytes in use in the measured steps.
        num_active: size of the support at the start of each; 0 while there is none.
    """

    def __init__(self, pipe: Connection, device: str, run: TwoPhaseSupportCallback | None) -> None:
        self._pipe, self._device, self._run = pipe, device, run
        self._begun: float | None = None
        self.num_active: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, wait, start it again."""
        if batch_idx < DISCARDED:
            return
        took = None if self._begun is None else self._clock() - self._begun
        if took is None:
            _memory.reset_peak(self._device)
        self.peak = _memory.peak(self._device)
        support = None if self._run is None else self._run.support
        self.num_active.append(0 if support is None else support.num_active)
        self._pipe.send(("at", took))
        trainer.should_stop = self._pipe.recv() == "stop"
        self._begun = self._clock()

    def _clock(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def serve(pipe: Connection, job: Job) -> None:
    """Run the job and send its result, or one line that says why there is none."""
    for name in ("lightning.pytorch", "tptopk_pl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    _contenders.fix_batch_sizes()
    try:
        _rehearse(job)
        pipe.send(("done", _run(pipe, job)))
    except NotRunError as error:
        pipe.send(("failed", f"not run: {error}"))
    except Exception as error:  # whatever it is, the other contenders go on
        line = " ".join(f"{type(error).__name__}: {error}".split())
        pipe.send(("failed", f"failed: {line}"))


def _rehearse(job: Job) -> None:
    """Fit a small network: what is imported or built once is there before memory is measured."""
    small, batch_size, num_steps = workload("mlp_100"), 4, DISCARDED
    module, private = _contenders.build(job.contender, small.network(), batch_size, num_steps)
    records = _contenders.loader(small, batch_size, num_steps)
    _trainer([private] if private else [], job.device).fit(module, records)


def _run(pipe: Connection, job: Job) -> dict[str, Any]:
    torch.manual_seed(0)
    model = workload(job.model)
    network = model.network()
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    _refuse_large(job, num_parameters)
    module, private = _contenders.build(job.contender, network, job.batch_size, _PLANNED_STEPS)
    module.to(job.device)
    records = _contenders.loader(model, job.batch_size, _PLANNED_STEPS)
    baton = Baton(pipe, job.device, private)
    trainer = _trainer([baton, private] if private else [baton], job.device)
    before = _memory.now(job.device)
    trainer.fit(module, records)
    result = {
        "num_parameters": num_parameters,
        "added_peak_bytes": max(baton.peak - before, 0),
    }
    if private is None:
        return result
    (num_active,) = set(baton.num_active)  # the phase is one and the same in all measured steps
    result |= {"phase": 2 if num_active else 1, "num_active": num_active or num_parameters}
    return result | {"noise_seconds": _noise_seconds(result["num_active"], job.device)}


def _refuse_large(job: Job, num_parameters: int) -> None:
    needs = 4 * job.batch_size * num_parameters
    if job.contender == "opacus_hooks" and needs > _MOST_BYTES:
        raise NotRunError(f"needs {needs / 1e9:.1f} GB for the gradient of each record")


def _trainer(callbacks: list[Callback], device: str) -> Trainer:
    """Nothing but steps: no validation, logger, checkpoint, bar or summary."""
    return Trainer(
        max_epochs=1,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10**9,
    )


def _noise_seconds(size: int, device: str) -> dict[str, float]:
    """What drawing a step's noise takes by itself, by generator."""
    found = {}
    for name, secure in (("cryptographic", True), ("torch", False)):
        times = []
        for step in range(_NOISE_REPEATS):
            begun = time.perf_counter()
            gaussian_noise(fresh_key(), step, size, device=device, secure=secure)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        found[name] = median(times)
    return found
