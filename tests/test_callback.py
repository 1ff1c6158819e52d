"""The callback on a Trainer: what it computes, when it switches, what it charges."""

import copy
import csv
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy import stats
from torch import nn
from torch.utils._pytree import tree_leaves

from toys import NUM_RECORDS, Plain, Saver, flat, loader, private, records, trainer
from tptopk_pl import rng
from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.sampling import PoissonSampler
from tptopk_pl.units import PrivacyUnits

STEPS = 30


def seeded_draws(seed: int, steps: int, size: int = 12) -> list[torch.Tensor]:
    sampler = PoissonSampler(
        PrivacyUnits.one_per_record(NUM_RECORDS),
        sampling_rate=size / NUM_RECORDS,
        steps_per_pass=10,
        physical_batch_size=8,
        key=rng.seeded_key(seed),
        next_step=lambda: 0,
        last_step=steps,
    )
    return [sampler.draw(step) for step in range(steps)]


class Spy(Callback):
    """Keeps parameters and gradients after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.outputs: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.reshape(-1) for p in pl_module.parameters()]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.weights.append(flat(pl_module).clone())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.outputs.append(outputs)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_noise_and_clip_it_is_sgd_on_the_same_batches(workers: int) -> None:
    """Momentum and a scheduler included; nothing else would show that the hooks are in use."""
    module = Plain()
    ours, plain = module, copy.deepcopy(module)
    callback = private(noise_multiplier=0.0, max_grad_norm=math.inf, active_ratio=1.0, seed=3)
    fitted = trainer(callback, max_epochs=3)
    fitted.fit(ours, loader(num_workers=workers))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    images, labels = records().tensors
    for draw in seeded_draws(3, STEPS):
        optimizer.zero_grad()
        total = F.cross_entropy(plain(images[draw]), labels[draw], reduction="sum")
        (total / 12).backward()
        optimizer.step()
        schedule.step()
    assert fitted.global_step == STEPS
    torch.testing.assert_close(flat(ours), flat(plain), rtol=0, atol=1e-6)
    assert callback.epsilon == math.inf
    assert (flat(ours) - flat(Plain())).abs().max() > 0.01


def test_huge_noise_wrecks_the_model() -> None:
    """Otherwise the gradients that train are not the noised ones."""
    images, labels = records().tensors

    def accuracy(sigma: float) -> float:
        module = Plain()
        trainer(private(noise_multiplier=sigma, seed=0), max_epochs=6).fit(module, loader())
        return float((module(images).argmax(1) == labels).float().mean())

    assert accuracy(0.0) > 0.95
    assert accuracy(1000.0) < 0.8


def test_released_noise_is_sigma_c_over_expected_batch_size() -> None:
    """On every coordinate, whatever the realised batch; KS rejects sigma off by half."""
    spy = Spy()
    trainer(private(noise_multiplier=50.0, max_grad_norm=0.5, active_ratio=1.0, seed=0), spy).fit(
        Plain(), loader()
    )
    released = torch.cat(spy.gradients) / (50.0 * 0.5 / 12)
    assert stats.kstest(released.numpy(), "norm").pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest((released * wrong).numpy(), "norm").pvalue < 1e-6


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"weight_decay": 0.1, "nesterov": True}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.1}),
        ("RMSprop", {}),
    ],
)
def test_frozen_coordinates_stay_bit_identical(optimizer: str, options: dict[str, Any]) -> None:
    """Momentum, moments and weight decay must not move them."""
    spy = Spy()
    callback = private(active_ratio=0.1, warmup_steps=8)
    trainer(callback, spy).fit(Plain(optimizer, **options), loader())
    assert callback.support is not None
    frozen = torch.ones(len(spy.weights[0]), dtype=torch.bool)
    frozen[callback.support.indices] = False
    at_switch = spy.weights[7]
    for weights, gradient in zip(spy.weights[8:], spy.gradients[8:], strict=True):
        assert torch.equal(weights[frozen], at_switch[frozen])
        assert not torch.equal(weights[~frozen], at_switch[~frozen])
        assert (gradient[frozen] == 0).all()
        assert (gradient[~frozen] != 0).all()
    assert (spy.weights[7] != spy.weights[6]).all()  # all coordinates move in the warm-up


def test_the_switch_clears_optimizer_state_off_the_support_only() -> None:
    """A moving coordinate keeps its momentum; a frozen one has none left."""

    class AtSwitch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            state = trainer.optimizers[0].state
            buffers = [state[p]["momentum_buffer"].reshape(-1) for p in pl_module.parameters()]
            self.before = getattr(self, "now", None)
            self.now = torch.cat(buffers).clone()
            if trainer.global_step == 8:
                self.at = self.now

    after = AtSwitch()
    callback = private(active_ratio=0.1, warmup_steps=8)
    trainer(callback, after, max_steps=9).fit(Plain(), loader())
    active = callback.support.indices  # type: ignore[union-attr]
    frozen = torch.ones(len(after.at), dtype=torch.bool)
    frozen[active] = False
    assert (after.at[frozen] == 0).all()
    assert (after.at[active] != 0).all()


def test_support_is_the_top_of_the_papers_score_of_released_gradients() -> None:
    """Scored after noise, reduction and scaling by the expected batch size."""
    spy = Spy()
    callback = private(active_ratio=0.1, warmup_steps=8, noise_multiplier=0.3)
    trainer(callback, spy).fit(Plain(), loader())
    released = torch.stack(spy.gradients[:8])
    score = (released.double() ** 2 - (0.3 * 1.0 / 12) ** 2).mean(0)
    k = len(score) // 10
    expected = score.sort(descending=True, stable=True).indices[:k].sort().values
    assert callback.support is not None
    assert callback.support.num_active == k
    # Float32 sums may swap neighbours in rank; not more than a few.
    assert len(set(callback.support.indices.tolist()) & set(expected.tolist())) >= k - 2


def test_scores_subtract_the_noise_variance_of_the_expected_batch_size(tmp_path: Any) -> None:
    """(sigma C / B)^2 a step, whatever the realised batch or its physical chunks."""
    spy = Spy()
    callback = private(noise_multiplier=0.7, max_grad_norm=0.5, physical_batch_size=3)
    trainer(callback, spy, Saver(tmp_path, 5), max_steps=20).fit(Plain(), loader())
    state = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["callbacks"]
    warmup = state["TwoPhaseSupportCallback"]["phases"]["warmup"]
    released = torch.stack(spy.gradients[:5])
    expected = (released**2 - (0.7 * 0.5 / 12) ** 2).sum(0)
    assert warmup["num_steps"] == 5
    torch.testing.assert_close(warmup["energy"].sum(0), expected, rtol=1e-4, atol=1e-7)


def test_phase_switches_after_the_last_warmup_step_only() -> None:
    """Never between the physical chunks of a logical batch."""
    spy = Spy()
    callback = private(warmup_steps=5, active_ratio=0.05, physical_batch_size=2)
    trainer(callback, spy).fit(Plain(), loader())
    share = [float((g != 0).float().mean()) for g in spy.gradients]
    assert share[:5] == [1.0] * 5
    assert max(share[5:]) < 0.06


def test_physical_batch_size_changes_nothing() -> None:
    """Chunks of one logical batch add up; global_step counts logical steps."""

    def fit(physical: int) -> torch.Tensor:
        module = Plain()
        fitted = trainer(private(seed=5, physical_batch_size=physical))
        fitted.fit(module, loader())
        assert fitted.global_step == 20
        return flat(module)

    torch.testing.assert_close(fit(2), fit(64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["tp_topk", "tp_rand", "dp_sgd", "non_private"])
def test_methods(method: str) -> None:
    """Each under the same keywords; only two of them have a support."""
    callback = private(method=method, target_epsilon=3.0)
    trainer(callback).fit(Plain(), loader())
    assert callback.plan is not None
    if method == "non_private":
        assert callback.epsilon == math.inf
    else:
        assert 2.9 < callback.epsilon <= 3.0
    assert (callback.support is not None) == method.startswith("tp_")


SCHEDULES = {
    "recursive": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "closed form": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, 20),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_phase2_learning_rate_factor_is_kept_by_schedulers(kind: str) -> None:
    """The schedule goes on, twice as high from the switch on, however it computes."""

    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = SCHEDULES[kind](optimizer)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    spies = Spy(), Spy()
    for spy, factor in zip(spies, (1.0, 2.0), strict=True):
        trainer(private(warmup_steps=8, phase2_lr_factor=factor), spy).fit(Scheduled(), loader())
    base, scaled = spies[0].rates, spies[1].rates
    assert base[0] != base[5] != base[15]  # the schedule moves the live rate, before and after
    assert scaled[:6] == base[:6]
    assert scaled[10:] == pytest.approx([2 * rate for rate in base[10:]])


def test_weight_average_restarts_at_the_switch() -> None:
    """An average over the switch would mix frozen coordinates with their moving past."""
    module = Plain()
    callback = private(warmup_steps=8, active_ratio=0.1)
    spy = Spy()
    trainer(EMAWeightAveraging(decay=0.9), callback, spy).fit(module, loader())
    frozen = torch.ones(len(flat(module)), dtype=torch.bool)
    frozen[callback.support.indices] = False  # type: ignore[union-attr]
    # The average itself rounds; without the restart it is off by 1e-2.
    torch.testing.assert_close(flat(module)[frozen], spy.weights[7][frozen], rtol=1e-5, atol=1e-6)
    assert (flat(module)[~frozen] - spy.weights[-1][~frozen]).abs().max() > 1e-3


def test_no_raw_loss_reaches_other_callbacks() -> None:
    """Outputs and the loss given to hooks are constants."""
    seen: list[float] = []

    class Nosy(Spy):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            seen.append(float(loss.detach()))
            assert all(p.grad is None or not p.grad.any() for p in pl_module.parameters())

    spy = Nosy()
    trainer(spy, private(physical_batch_size=4)).fit(Plain(), loader())
    assert set(seen) == {0.0}
    assert len(seen) == 20
    assert all(float(output["loss"]) == 0.0 and len(output) == 1 for output in spy.outputs)


def test_empty_batches_are_noise_only_steps() -> None:
    """At q = 1/120 most draws are empty; each is charged and moves the weights."""
    spy = Spy()
    callback = private(expected_batch_size=1)
    trainer(callback, spy, max_steps=20).fit(Plain(), loader())
    assert callback.step == len(spy.gradients) == 20
    assert all(gradient.isfinite().all() and gradient.any() for gradient in spy.gradients)


# -------------------------------------------------------------------------- faults of records


def faulty(place: int, image: float | None = None, label: int | None = None) -> Any:
    data = records()
    if image is not None:
        data.tensors[0][place] = image
    if label is not None:
        data.tensors[1][place] = label
    return data


@pytest.mark.parametrize(
    "fault",
    [{"image": math.nan}, {"image": math.inf}, {"image": 3e38}, {"label": 99}, {"label": -100}],
)
def test_a_faulty_record_contributes_zero(fault: dict[str, Any]) -> None:
    """Training equals that on the data without the record, on the same draws of the others."""

    def fit(data: Any, skip: int | None = None) -> torch.Tensor:
        module = Plain()
        # Seldom clipped: a clip would hide that a fault weighs on the others.
        callback = private(noise_multiplier=0.0, max_grad_norm=50.0, active_ratio=1.0, seed=2)
        fitted = trainer(callback, max_epochs=1)
        if skip is not None:
            original = PoissonSampler.draw
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    PoissonSampler,
                    "draw",
                    lambda self, step: (d := original(self, step))[d != skip],
                )
                fitted.fit(module, loader(data))
        else:
            fitted.fit(module, loader(data))
        return flat(module)

    assert any(7 in draw for draw in seeded_draws(2, 10))
    with_fault = fit(faulty(7, **fault))
    assert with_fault.isfinite().all()
    torch.testing.assert_close(with_fault, fit(records(), skip=7), rtol=0, atol=1e-6)


def test_a_fault_of_every_record_is_raised() -> None:
    """That is not one record's fault."""
    data = records()
    data.tensors[1].fill_(99)
    with pytest.raises(IndexError, match="out of bounds"):
        trainer(private()).fit(Plain(), loader(data))


def test_clipped_contributions_never_exceed_the_clip_norm() -> None:
    """One unit moves the released sum by less than C, rounding included."""
    for scale in (1.0, 1e4):
        data = records(n=NUM_RECORDS)
        data.tensors[0].mul_(scale)
        spy = Spy()
        callback = private(
            noise_multiplier=0.0, max_grad_norm=0.01, expected_batch_size=1, method="dp_sgd"
        )
        trainer(callback, spy, max_steps=40).fit(Plain(lr=0.0), loader(data))
        sizes = [g.double().norm() for g in spy.gradients]
        assert max(sizes) > 0.0099
        one = [s for s in sizes if s < 0.0101]
        assert max(one) <= 0.01


# -------------------------------------------------------------------------- plan, resume, undo


def test_plan_counts_steps_of_the_trainer() -> None:
    """T is max_steps, or epochs times ceil(N/B) after limit_train_batches; q = B/N exactly."""
    for kwargs, steps in [
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 4}, 8),
        ({"max_epochs": 2, "limit_train_batches": 5}, 10),
        ({"max_epochs": 4, "limit_train_batches": 0.5}, 20),
        ({"fast_dev_run": True}, 1),
    ]:
        callback = private(method="dp_sgd", expected_batch_size=13)
        fitted = trainer(callback, **kwargs)
        fitted.fit(Plain(), loader(drop_last=True))
        assert callback.plan is not None
        assert callback.plan.num_steps == steps == fitted.global_step
        assert callback.plan.sampling_rate == 13 / NUM_RECORDS
        epochs = kwargs.get("max_epochs", 1)
        assert fitted.num_training_batches == (10 if "max_steps" in kwargs else steps // epochs)


def test_a_checkpoint_loads_in_the_plain_module(tmp_path: Any) -> None:
    """No prefix, no wrapper, no key; it opens with weights_only."""
    module = Plain()
    keep = ModelCheckpoint(tmp_path, save_last=True)
    trainer(private(), keep, enable_checkpointing=True).fit(module, loader())
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    plain = Plain()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(flat(plain), flat(module))
    loaded = Plain.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(flat(loaded), flat(module))
    trainer().validate(loaded, loader(shuffle=False), verbose=False)


@pytest.mark.parametrize("at", [3, 8, 9, 10, 14])
def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Any, at: int) -> None:
    """In either phase, at the switch, in mid-epoch and at an epoch's end."""

    def fit(folder: str, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        module, callback = Plain("Adam"), private(seed=4, warmup_steps=9, phase2_lr_factor=2.0)
        trainer(callback, Saver(tmp_path / folder, at)).fit(module, loader(), **kwargs)
        assert callback.step == 20
        return flat(module), callback

    whole, first = fit("a")
    rest, second = fit("b", ckpt_path=tmp_path / "a" / f"step={at}.ckpt", weights_only=True)
    assert torch.equal(whole, rest)
    assert torch.equal(first.support.indices, second.support.indices)
    assert first.epsilon == second.epsilon


def test_every_process_draws_fresh_keys(tmp_path: Any) -> None:
    """A resumed step must not replay its noise, and no key is stored."""
    spies = Spy(), Spy()
    callbacks = private(noise_multiplier=1000.0), private(noise_multiplier=1000.0)
    path = tmp_path / "a" / "step=5.ckpt"
    for callback, spy, folder, start in zip(callbacks, spies, "ab", (None, path), strict=True):
        trainer(callback, Saver(tmp_path / folder, 5), spy).fit(
            Plain(), loader(), ckpt_path=start, weights_only=True
        )
    assert len(spies[1].gradients) == 15
    assert not torch.allclose(spies[0].gradients[5], spies[1].gradients[0])
    state = torch.load(path, weights_only=True)["callbacks"]["TwoPhaseSupportCallback"]
    kept = {"plan", "step", "seeded", "noise_is_cryptographic", "phases", "history"}
    assert set(state) == kept
    assert set(state["phases"]) == {"support", "warmup", "lr_factor", "choices"}
    numbers = (int, float, str, type(None), torch.Tensor)
    assert all(isinstance(leaf, numbers) for leaf in tree_leaves(state))
    # Global seeds do not reach the noise either.
    torch.manual_seed(0)
    spies = Spy(), Spy()
    for spy in spies:
        torch.manual_seed(0)
        trainer(private(noise_multiplier=1000.0), spy, max_steps=1).fit(Plain(), loader())
    assert not torch.allclose(spies[0].gradients[0], spies[1].gradients[0])


def test_training_ends_with_the_plan(tmp_path: Any) -> None:
    """A longer resumed run keeps the plan of the checkpoint and stops when it is spent."""
    first = private(target_epsilon=2.0)
    trainer(first, Saver(tmp_path / "a", 15)).fit(Plain(), loader())
    second = private(target_epsilon=2.0)
    longer = trainer(second, max_epochs=9, min_epochs=9)
    path = tmp_path / "a" / "step=15.ckpt"
    longer.fit(Plain(), loader(), ckpt_path=path, weights_only=True)
    assert second.plan == first.plan
    assert longer.global_step == second.step == 20
    assert second.epsilon <= 2.0


def test_fitting_again_goes_on_within_the_plan() -> None:
    """A second fit of the same Trainer finds the budget spent; a new Trainer is refused."""
    module, callback = Plain(schedule=False), private(target_epsilon=2.0)
    fitted = trainer(callback)
    fitted.fit(module, loader())
    weights = flat(module).clone()
    fitted.fit_loop.max_epochs = 5
    fitted.fit(module, loader())
    assert callback.step == 20
    assert torch.equal(flat(module), weights)
    with pytest.raises(MisconfigurationException, match="already run 20 steps"):
        trainer(callback).fit(module, loader())


def test_resume_refuses_what_contradicts_the_checkpoint(tmp_path: Any) -> None:
    """Another N, B, delta or target would make the accounting wrong."""

    def fit(callbacks: list[Any], folder: str, data: Any = None, **kwargs: Any) -> None:
        trainer(*callbacks, Saver(tmp_path / folder, 5)).fit(
            Plain(), loader(data), weights_only=True, **kwargs
        )

    fit([private()], "private")
    path = tmp_path / "private" / "step=5.ckpt"
    for changed, data, name in [
        (private(expected_batch_size=10), records(), "expected_batch_size=10"),
        (private(), records(n=80), "num_units=80"),
        (private(noise_multiplier=0.5), records(), "noise_multiplier=0.5"),
    ]:
        with pytest.raises(MisconfigurationException, match=name):
            fit([changed], name, data, ckpt_path=path)
    fit([], "plain")
    with pytest.raises(MisconfigurationException, match="no state of TwoPhaseSupportCallback"):
        fit([private()], "other", ckpt_path=tmp_path / "plain" / "step=5.ckpt")


def test_an_interrupted_step_is_discarded() -> None:
    """Its partial sum must not join the next: one example would count twice."""

    class Interrupt(Plain):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Interrupt.calls += 1
            if Interrupt.calls == 40:  # in the middle of a logical batch of several chunks
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module, callback, spy = Interrupt(), private(noise_multiplier=0.0, physical_batch_size=1), Spy()
    fitted = trainer(callback, spy, max_epochs=4)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fitted.fit(module, loader())
    steps = callback.step
    fitted.should_stop = False
    fitted.fit(module, loader())
    assert callback.step > steps
    bound = torch.stack(spy.gradients).norm(dim=1) * 12
    assert len(bound) == callback.step
    assert (bound <= 40).all()


def test_a_seeded_checkpoint_cannot_become_private(tmp_path: Any) -> None:
    """Its steps had noise that anyone can subtract."""
    trainer(private(seed=1), Saver(tmp_path, 5)).fit(Plain(), loader())
    with pytest.raises(MisconfigurationException, match="noise of a known seed"):
        trainer(private()).fit(
            Plain(), loader(), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True
        )


@pytest.mark.parametrize(
    ("options", "said"), [({"seed": 1}, True), ({"noise_multiplier": 0.0}, True), ({}, False)]
)
def test_a_run_that_is_not_private_says_so(
    options: dict[str, Any], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At its start, as a warning of the log."""
    trainer(private(**options), max_steps=2).fit(Plain(), loader())
    assert any("NOT private" in record.message for record in caplog.records) is said


def test_a_callback_that_resumed_once_does_not_trust_the_next_checkpoint(tmp_path: Any) -> None:
    """Each checkpoint must account for its own steps."""
    trainer(private(), Saver(tmp_path / "private", 5)).fit(Plain(), loader())
    trainer(Saver(tmp_path / "plain", 15)).fit(Plain(), loader())
    callback = private()
    for name in ("private/step=5.ckpt", "plain/step=15.ckpt"):
        fitted = trainer(callback)
        if "plain" in name:
            with pytest.raises(MisconfigurationException, match="no state of"):
                fitted.fit(Plain(), loader(), ckpt_path=tmp_path / name, weights_only=True)
        else:
            fitted.fit(Plain(), loader(), ckpt_path=tmp_path / name, weights_only=True)


def test_raw_gradients_of_untrained_parameters_are_dropped() -> None:
    """A parameter that the optimizer does not hold, whatever zero_grad does."""

    class Partial(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.network[4].parameters(), lr=0.1)

        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert pl_module.network[0].weight.grad is None
            assert pl_module.network[4].weight.grad is not None

    module = Partial()
    trainer(Look(), private(active_ratio=0.5)).fit(module, loader())
    assert module.network[0].weight.grad is None


def test_parameters_unfrozen_in_mid_run_are_refused() -> None:
    """They would train without privacy, or not at all."""

    class Unfreeze(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.network[0].requires_grad_(trainer.global_step >= 3)

    module = Plain()
    module.network[0].requires_grad_(False)
    with pytest.raises(MisconfigurationException, match="in mid-run"):
        trainer(private(), Unfreeze()).fit(module, loader())


def test_a_step_that_writes_to_a_buffer_later_is_stopped() -> None:
    """It would carry raw data into checkpoints."""

    class Later(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step >= 3:
                self.seen.add_(batch[0].mean())
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match="writes to seen"):
        trainer(private()).fit(Later(), loader())


def test_a_step_cannot_steer_the_run_by_its_losses() -> None:
    """Neither its length nor its learning rate: both are seen from outside."""

    class Steering(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.trainer.should_stop = True
            self.optimizers().param_groups[0]["lr"] = float(loss.detach())
            return loss

    spy, callback = Spy(), private()
    trainer(callback, spy).fit(Steering(schedule=False), loader())
    assert callback.step == 20
    assert set(spy.rates) == {0.1}


def test_epsilon_is_not_computed_for_each_of_many_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longer than a short epoch."""
    computed = []
    original = TwoPhasePlan.epsilon_at
    monkeypatch.setattr(
        TwoPhasePlan, "epsilon_at", lambda plan, step: computed.append(step) or original(plan, step)
    )
    trainer(private(), max_epochs=150, limit_train_batches=1).fit(Plain(), loader())
    assert len(computed) < 120
    assert max(computed) == 150


def test_logged_epsilon_is_that_of_its_step_and_the_bar_never_shows_less(tmp_path: Any) -> None:
    """A figure that is repeated at later steps would understate what was spent."""

    class Bar(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if "privacy/epsilon" in trainer.callback_metrics:
                shown = float(trainer.callback_metrics["privacy/epsilon"])
                assert shown >= callback.epsilon - 1e-6

    callback = private()
    logger = CSVLogger(tmp_path)
    trainer(Bar(), callback, logger=logger, log_every_n_steps=7, max_epochs=3).fit(
        Plain(), loader()
    )
    table = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    logged = {int(r["step"]): float(r["privacy/epsilon"]) for r in rows if r["privacy/epsilon"]}
    assert {1, 7, 9, 14, 21, 28, 30} <= set(logged)
    assert callback.plan is not None
    for step, epsilon in logged.items():
        assert epsilon == pytest.approx(callback.plan.epsilon_at(step), rel=1e-5)


def test_a_delta_that_is_not_below_one_over_n_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It allows to publish a unit's record outright."""
    trainer(private(target_delta=0.01), max_steps=2).fit(Plain(), loader())
    assert any("1/N" in record.message for record in caplog.records)


def test_frozen_coordinates_withstand_other_callbacks() -> None:
    """A weight constraint after each batch does not move them in the end."""

    class Shrink(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step > 8:
                with torch.no_grad():
                    for parameter in pl_module.parameters():
                        parameter.mul_(0.9)

    spy, module = Spy(), Plain()
    callback = private(active_ratio=0.1, warmup_steps=8)
    trainer(callback, spy, Shrink()).fit(module, loader())
    frozen = torch.ones(len(flat(module)), dtype=torch.bool)
    frozen[callback.support.indices] = False  # type: ignore[union-attr]
    assert torch.equal(flat(module)[frozen], spy.weights[7][frozen])


def test_reloaded_loaders_are_used() -> None:
    """A new loader every epoch, of the same units."""
    callback = private()

    class Reloading(Plain):
        def train_dataloader(self) -> Any:
            return loader()

    trainer(callback, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(Reloading())
    assert callback.step == 30


def test_everything_is_undone_after_a_fit() -> None:
    """The module, its layers, the strategy and the optimizer are as before."""
    module = Plain()
    before = {name: set(layer.__dict__) for name, layer in module.named_modules()}
    fitted = trainer(private())
    fitted.fit(module, loader())
    for name, layer in module.named_modules():
        extra = set(layer.__dict__) - before[name]
        assert not extra & {"forward", "log", "lr_scheduler_step"}, name
    assert "training_step" not in fitted.strategy.__dict__
    assert "process_dataloader" not in fitted.strategy.__dict__
    assert not fitted.optimizers[0]._optimizer_step_post_hooks
    loss = F.cross_entropy(module(records().tensors[0]), records().tensors[1])
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_partly_frozen_model() -> None:
    """Frozen parameters are no coordinates and have no gradient."""
    module = Plain()
    module.network[0].requires_grad_(False)
    before = module.network[0].weight.clone()
    callback = private(active_ratio=0.5)
    trainer(callback).fit(module, loader())
    assert callback.support is not None
    assert callback.support.num_total == sum(
        p.numel() for p in module.parameters() if p.requires_grad
    )
    assert torch.equal(module.network[0].weight, before)
    assert module.network[0].weight.grad is None


def test_units_of_several_records_are_clipped_as_one() -> None:
    """The gradient of a unit is the mean over its records; N and B count units."""

    class Units(torch.utils.data.Dataset):  # type: ignore[type-arg]
        privacy_units = [i // 3 for i in range(NUM_RECORDS)]  # noqa: RUF012
        data = records()

        def __len__(self) -> int:
            return NUM_RECORDS

        def __getitem__(self, index: int) -> Any:
            return self.data[index]

    spy = Spy()
    callback = private(
        noise_multiplier=0.0, max_grad_norm=1e-3, expected_batch_size=4, method="dp_sgd", seed=1
    )
    trainer(callback, spy, max_steps=5).fit(Plain(lr=0.0), loader(Units()))
    assert callback.plan is not None
    assert callback.plan.num_units == 40
    sampler = PoissonSampler(
        PrivacyUnits.one_per_record(40),
        sampling_rate=0.1,
        steps_per_pass=10,
        physical_batch_size=8,
        key=rng.seeded_key(1),
        next_step=lambda: 0,
        last_step=5,
    )
    model = Plain().network
    images, labels = records().tensors
    for step, released in enumerate(spy.gradients):
        total = torch.zeros_like(released)
        for unit in sampler.draw(step).tolist():
            part = slice(3 * unit, 3 * unit + 3)
            loss = F.cross_entropy(model(images[part]), labels[part])
            gradient = torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]
            )
            total += gradient * min(1.0, 1e-3 * (1 - 2.0**-10) / float(gradient.norm()))
        torch.testing.assert_close(released, total / 4, rtol=1e-4, atol=1e-9)


def test_bfloat16_mixed_has_float32_gradients() -> None:
    """Norms, sums and noise are float32."""
    spy = Spy()
    callback = private()
    trainer(callback, spy, precision="bf16-mixed").fit(Plain(), loader())
    assert callback.step == 20
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in spy.gradients)


def test_a_module_that_returns_losses() -> None:
    """Losses of each record make the reduction explicit: sum or mean, the same run."""

    class Losses(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            losses = F.cross_entropy(self(images), labels, reduction="none")
            return {"loss": losses.mean(), "losses": losses}

    weights = []
    for kind in (Plain, Losses):
        module = kind()
        trainer(private(seed=1)).fit(module, loader())
        weights.append(flat(module))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        tied = nn.Linear(36, 36)
        self.network = nn.Sequential(nn.Flatten(), tied, nn.Tanh(), tied, nn.Linear(36, 2))


def test_tied_layers_train() -> None:
    """A module used twice is one set of coordinates."""
    callback = private(active_ratio=1.0)
    trainer(callback).fit(Tied(), loader())
    assert callback.support is not None
    assert callback.support.num_total == 36 * 36 + 36 + 74


def test_the_plan_is_said_at_the_start(caplog: Any) -> None:
    """120 records of 60 persons: it counts persons."""
    data = records()
    data.privacy_units = [number // 2 for number in range(120)]
    with caplog.at_level("INFO"):
        trainer(private(), max_steps=4).fit(Plain(), loader(data))
    assert "60 privacy units, 12 a step on average, 4 steps (2 of warm-up)" in caplog.text
    assert "noise multiplier 1: epsilon = " in caplog.text


def test_noise_of_torchs_generator_is_remembered_after_a_resume(tmp_path: Any) -> None:
    first = trainer(private(secure_rng=False), Saver(tmp_path, 3), max_steps=6, max_epochs=-1)
    first.fit(Plain(), loader())
    resumed = private()
    again = trainer(resumed, max_steps=6, max_epochs=-1)
    again.fit(Plain(), loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert resumed.step == 6 and not resumed.noise_is_cryptographic
    assert private().noise_is_cryptographic
