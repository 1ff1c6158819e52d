"""train.py as a user meets it: one real run in a process of its own, the rest in this process."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import train
from datamodules import CIFAR10, MNIST, FashionMNIST
from fake_data import fake
from models import ClassificationModule, SmallCNN

CONFIGS = sorted((train.CHECKOUT / "configs").glob("*.yaml"))
EXPERIMENTS = [path for path in CONFIGS if "\nmodel:" in path.read_text()]
FILES = (MNIST, FashionMNIST, CIFAR10)  # the data sets that are read from files
QUICKSTART = ["--config", "configs/quickstart.yaml"]
COMMANDS = re.findall(r"python train\.py ([^\n`]+)", (train.CHECKOUT / "README.md").read_text())


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run train.py's main with arguments, in an empty current directory; returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *args])
        return train.main()

    return run


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """The quickstart cut to six steps, started from a directory that is not the checkout."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, str(train.CHECKOUT / "train.py"), "fit", *QUICKSTART]
    done = subprocess.run(
        [*command, "--trainer.max_steps=6", "--trainer.enable_progress_bar=false"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    return done, elsewhere / "runs" / "version_0"


@pytest.fixture
def checkpoint(quickstart) -> Path:
    (path,) = (quickstart[1] / "checkpoints").glob("*.ckpt")
    return path


def test_quickstart_keeps_its_files_and_says_what_it_cost(quickstart):
    done, folder = quickstart
    assert done.returncode == 0, done.stderr
    for name in ("summary.json", "run.png", "config.yaml"):
        assert (folder / name).is_file(), name
        if name != "config.yaml":
            assert f"runs/version_0/{name}" in done.stdout
    assert list(folder.glob("events.out.tfevents.*"))
    epsilon = float(re.search(r"ε = (\d+\.\d+)", done.stdout)[1])
    assert 0 < epsilon <= 3
    assert "test/accuracy" in done.stdout


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_checkpoint_is_read_with_the_config_of_its_run(quickstart, checkpoint, run, command):
    config = quickstart[1] / "config.yaml"
    assert run(command, f"--config={config}", f"--ckpt_path={checkpoint}") == 0
    if command == "predict":
        predictions = torch.cat(torch.load("runs/version_0/predictions.pt"))
        assert predictions.shape == (500, 10)


def test_a_checkpoint_loads_in_the_plain_module(checkpoint):
    """A checkpoint of a private run holds the user's own names, and no code."""
    state = torch.load(checkpoint, weights_only=True)
    module = ClassificationModule.load_from_checkpoint(checkpoint, network=SmallCNN())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state["state_dict"][name], rtol=0, atol=0)


@pytest.mark.parametrize("method", ["tp_topk", "dp_sgd"])
@pytest.mark.parametrize("config", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_and_its_twin_train(run, config, method, monkeypatch, tmp_path):
    """Through the switch, on tiny sets where the data are not in a package."""
    twin = ["--config=configs/dp_sgd.yaml"] if method == "dp_sgd" else []
    small = ["--privacy.expected_batch_size=20"]
    dataset = next((d for d in FILES if f"datamodules.{d.__name__}\n" in config.read_text()), None)
    if dataset is not None:
        fake(monkeypatch, dataset, tmp_path / "data")
        small.append("--data.num_val=20")
    options = ("--trainer.fast_dev_run=4", "--trainer.enable_progress_bar=false")
    assert run("fit", f"--config={config}", *twin, *small, *options) == 0


def test_every_file_in_configs_is_an_experiment_or_the_twin():
    assert {path.name for path in CONFIGS} - {path.name for path in EXPERIMENTS} == {"dp_sgd.yaml"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_are_understood(run, command, capsys):
    args = command.replace("runs/version_0/config.yaml", "configs/quickstart.yaml").split()
    with pytest.raises(SystemExit) as stop:
        run(*args, "--print_config")
    assert stop.value.code == 0
    assert "expected_batch_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--privacy.target_epsilo=1"], "privacy.target_epsilo"),  # abbreviations are no options
        (["--trainer.max_epoch=1"], "trainer.max_epoch"),
        (["--data.init_args.batch_siz=1"], "batch_siz"),
        (["--privacy.target_epsilon=low"], 'privacy.target_epsilon": Expected a float'),
        (["--privacy.active_ratio=1.5"], "active_ratio=1.5 in (0, 1]"),
        (["--privacy.noise_multiplier=1"], "noise_multiplier"),  # beside target_epsilon
        (["--model.network.activation=gelu"], "gelu"),
        (["--model.network=models.Nothing"], "Nothing"),
        (["--data=datamodules.Nothing"], 'Parser key "data": Problem with given class_path'),
        (["--data.batch_size=0"], "batch_size=0"),
        (["--trainer.gradient_clip_val=1"], "gradient_clip_val"),
        (["--lr_scheduler=ConstantLR"], "lr_scheduler is given without optimizer"),
        (["--trainer.default_root_dir=/proc/none", "--trainer.logger=true"], "/proc/none"),
        (["--ckpt_path=none.ckpt"], "none.ckpt"),
        (["--config=none.yaml"], "none.yaml"),
        (["--config=broken.yaml"], "Problems parsing config"),
        (["--config=wrong_key.yaml"], "privacy.target_epsilo"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(run, capfd, tmp_path, args, message):
    (tmp_path / "broken.yaml").write_text("privacy: [broken\n")
    (tmp_path / "wrong_key.yaml").write_text("privacy:\n  target_epsilo: 1\n")
    assert run("fit", *QUICKSTART, *args) == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith("train.py: ") and message in errors[-1]
    assert not any("Traceback" in line or "usage:" in line for line in errors)


def test_a_missing_or_unknown_command_is_one_line(run, capfd):
    for args in ([], ["fits"]):
        assert run(*args) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "fit" in line and "validate" in line


def damaged(checkpoint: Path, how: str) -> bytes:
    content = checkpoint.read_bytes()
    if how == "cut":
        return content[: len(content) // 2]
    if how == "weights alone":
        file = io.BytesIO()
        torch.save(SmallCNN().state_dict(), file)
        return file.getvalue()
    return {"empty": b"", "text": b"no checkpoint", "code": pickle.dumps(Path.cwd)}[how]


@pytest.mark.parametrize("how", ["cut", "empty", "text", "code", "weights alone"])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_damaged_checkpoint_is_one_line(checkpoint, run, capfd, command, how):
    Path("bad.ckpt").write_bytes(damaged(checkpoint, how))
    assert run(command, *QUICKSTART, "--ckpt_path=bad.ckpt") == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("train.py: ckpt_path='bad.ckpt' is no checkpoint of a Trainer")


def test_a_checkpoint_of_another_network_is_one_line(checkpoint, run, capfd):
    other = ["--model.network=models.DeepCNN", f"--ckpt_path={checkpoint}"]
    assert run("test", *QUICKSTART, *other) == 2
    assert "is of another network" in capfd.readouterr().err.splitlines()[-1]


def test_to_test_without_a_checkpoint_is_said(run, capfd):
    assert run("validate", *QUICKSTART, "--trainer.limit_val_batches=1") == 0
    assert "No --ckpt_path is given" in capfd.readouterr().out


def test_without_a_logger_nothing_of_the_user_is_overwritten(run):
    for name in ("config.yaml", "summary.json"):
        Path(name).write_text("mine")
    options = ["--trainer.max_steps=1", "--trainer.logger=false", "--trainer.limit_val_batches=1"]
    for _ in range(2):
        assert run("fit", *QUICKSTART, *options, "--trainer.enable_progress_bar=false") == 0
    assert Path("config.yaml").read_text() == Path("summary.json").read_text() == "mine"
    for number in (0, 1):
        for name in ("config.yaml", "summary.json"):
            assert Path(f"runs/version_{number}", name).is_file()


class Terminated(ClassificationModule):
    """Its process is told to stop after the second step."""

    def on_train_batch_end(self, *args):
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_told_to_stop_says_what_it_spent(run, capfd):
    options = ["--trainer.max_steps=4", "--trainer.enable_progress_bar=false"]
    assert run("fit", *QUICKSTART, f"--model={__name__}.Terminated", *options) == 143
    out = capfd.readouterr().out
    assert re.search(r"ε = 2\.99\d+ for the plan, [12]\.\d+ spent in [23] of 4 steps", out)
    assert "Go on with --ckpt_path" in out
    assert json.loads(Path("runs/version_0/summary.json").read_text())["steps"] in (2, 3)


class Tracker(DummyLogger):
    """A logger without a folder for each run, as those of W&B and MLflow are."""

    save_dir, name, version = "tracked", "digits", "run7"


def test_a_run_of_any_logger_has_a_folder_of_its_own(run):
    options = ["--trainer.max_steps=2", "--trainer.enable_progress_bar=false"]
    assert run("fit", *QUICKSTART, f"--trainer.logger={__name__}.Tracker", *options) == 0
    assert Path("tracked/digits/run7/summary.json").is_file()
    assert list(Path("tracked/digits/run7/checkpoints").glob("*.ckpt"))


class FailsLater(ClassificationModule):
    """Its own fault, once training is under way."""

    def on_train_batch_end(self, *args):
        raise ValueError("a fault of the module")


def test_an_error_of_a_running_training_keeps_its_traceback(run):
    options = ["--trainer.fast_dev_run=4", "--trainer.enable_progress_bar=false"]
    with pytest.raises(RuntimeError, match="after step 1") as failure:
        run("fit", *QUICKSTART, f"--model={__name__}.FailsLater", *options)
    assert isinstance(failure.value.__cause__, (ValueError, MisconfigurationException))
