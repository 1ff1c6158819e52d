"""What is installed, with which versions, and what the README promises of it."""

import importlib
import re
import tomllib
import zipfile
from pathlib import Path

import torch
from hatchling.builders.wheel import WheelBuilder
from lightning.pytorch import LightningDataModule, Trainer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.utils.data import DataLoader, TensorDataset

from models import ClassificationModule
from tptopk_pl import TwoPhaseSupportCallback, cli

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in split}


def test_the_wheel_brings_one_top_level_name(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"tptopk_pl"}


def test_every_requirement_has_a_known_good_version_that_satisfies_it():
    extras = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), text


def test_the_known_good_versions_fit_cpu_and_gpu_machines():
    assert not [name for name in pins() if name.startswith(("nvidia", "cuda", "triton"))]


def test_the_console_script_exists():
    module, function = PROJECT["scripts"]["tptopk"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


class TinyData(LightningDataModule):
    def train_dataloader(self):
        records = TensorDataset(torch.randn(600, 4), torch.randint(2, (600,)))
        return DataLoader(records, batch_size=600, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(10, 4), torch.randint(2, (10,))), batch_size=10)


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit, data = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {"model": ClassificationModule(torch.nn.Linear(4, 2)), "datamodule": TinyData()}
    exec(compile(fit, "README.md", "exec"), names)
    assert 0 < names["callback"].epsilon <= 3
    patients = [number // 2 for number in range(1200)]
    names |= {"images": torch.randn(1200, 4), "labels": torch.tensor(patients) % 2}
    of_persons = TwoPhaseSupportCallback(
        noise_multiplier=1.0, target_delta=1e-5, expected_batch_size=300, max_grad_norm=1.0
    )
    loader = {}
    exec(compile(data, "README.md", "exec"), names | {"patients": patients}, loader)
    trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False, callbacks=[of_persons])
    trainer.fit(
        ClassificationModule(torch.nn.Linear(4, 2)), loader["loader"], TinyData().val_dataloader()
    )
    assert of_persons.plan.num_units == 600


def test_the_tptopk_commands_of_the_readme_run(capsys):
    commands = re.findall(r"^tptopk (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"plan", "epsilon"}
    for command in commands:
        assert cli.main(command.split()) == 0
        assert "ε (PLD, add/remove)" in capsys.readouterr().out
