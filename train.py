"""Fit, validate, test or predict from YAML files, privately unless a file says otherwise.

    python train.py fit --config configs/quickstart.yaml
    python train.py fit --config configs/quickstart.yaml --config configs/dp_sgd.yaml
    python train.py fit --config configs/quickstart.yaml --privacy.target_epsilon 1
    python train.py test --config runs/version_0/config.yaml --ckpt_path LAST.ckpt

A later file or option overrides an earlier one. Every run keeps its config.yaml, TensorBoard log,
checkpoints, summary.json and run.png in one folder under ./runs. If a checkpoint holds
hyperparameters of its model (`save_hyperparameters`), `--ckpt_path` makes these win over the files.
"""

import re
import sys
import warnings
from argparse import ArgumentError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from tptopk_pl import TwoPhaseSupportCallback
from tptopk_pl.report import RunSummary

CHECKOUT = Path(__file__).resolve().parent
RUNS = {
    "class_path": "TensorBoardLogger",
    "init_args": {"save_dir": "runs", "name": None, "default_hp_metric": False},
}


class TrainCLI(LightningCLI):
    """LightningCLI with the privacy callback as group `privacy` of every subcommand.

    Outside fit the callback is idle; it is accepted there so that one file serves all.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the group `privacy`."""
        parser.add_lightning_class_args(TwoPhaseSupportCallback, "privacy")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, configuration files also named relative to the checkout."""
        self.config = parser.parse_args(_locate_configs(sys.argv[1:]))
        path = self.config[self.config.subcommand].get("ckpt_path")
        if isinstance(path, str | Path):
            _tensors_of_checkpoint(Path(path))  # LightningCLI opens it next

    def before_instantiate_classes(self) -> None:
        """Refuse a scheduler that would be left out without a word; find a folder for the run."""
        if self._get(self.config, "lr_scheduler") and not self._get(self.config, "optimizer"):
            raise ValueError(
                "lr_scheduler is given without optimizer, and would not be used: give both."
            )
        trainer = self._get(self.config, "trainer")
        if not trainer.logger and not trainer.default_root_dir and not trainer.fast_dev_run:
            taken = Path("runs").glob("version_*")
            numbers = [int(n) for p in taken if (n := p.name.removeprefix("version_")).isdigit()]
            trainer.default_root_dir = f"runs/version_{max(numbers, default=-1) + 1}"

    def _check_checkpoint(self) -> None:
        """Refuse a checkpoint of another network; say that there is none to test."""
        path = self._get(self.config_init, "ckpt_path")
        if path is None and self.subcommand != "fit":
            print("No --ckpt_path is given: the model is as its constructor made it.")
        saved = _tensors_of_checkpoint(Path(path)) if isinstance(path, str | Path) else None
        if saved is None or is_overridden("configure_model", self.model):
            return
        own = self.model.state_dict()
        odd = [n for n in {**own, **saved} if _shape(own.get(n)) != _shape(saved.get(n))]
        if odd:
            raise ValueError(
                f"ckpt_path={str(path)!r} is of another network: {len(odd)} tensors have other "
                f"names or shapes ({odd[0]}, …). Give the configuration of its run."
            )

    before_fit = before_validate = before_test = before_predict = _check_checkpoint

    def fit(self, **kwargs: Any) -> None:
        """Train. Once a step was taken, an error is no longer one of the configuration."""
        try:
            self.trainer.fit(**kwargs)
        except BaseException as error:
            if self.trainer.global_step == 0:
                raise
            if self.trainer.world_size == 1:  # else ranks might wait for one that is gone
                with suppress(OSError):  # a full disk, perhaps: still say what was spent
                    self._summarize()
            print("Go on with --ckpt_path and a checkpoint of this run.")
            if isinstance(error, ValueError | OSError | MisconfigurationException):
                step = self.trainer.global_step
                raise RuntimeError(f"Training failed after step {step}.") from error
            raise

    def _summarize(self) -> RunSummary:
        """Write the summary of the run and say what it cost."""
        summary = RunSummary.from_run(self._get(self.config_init, "privacy"), self.trainer)
        folder = self._run_folder()
        if folder is None or not self.trainer.is_global_zero:
            return summary
        if summary.guarantee.startswith("NOT private"):
            print(summary.guarantee)
        steps = f"{summary.steps} of {summary.plan['num_steps']} steps"
        spent = f"{summary.epsilon_spent:.4g} spent in {steps}, δ = {summary.delta:g}"
        print(f"ε = {summary.epsilon:.4g} for the plan, {spent}.")
        print("Written:", *summary.write(folder), sep="\n  ")
        return summary

    def after_fit(self) -> None:
        """Write the run's summary, say what it cost, then read the test set once."""
        summary, folder = self._summarize(), self._run_folder()
        source = self.datamodule or self.model
        if is_overridden("test_step", self.model) and is_overridden("test_dataloader", source):
            results = self.trainer.test(self.model, datamodule=self.datamodule)
            if folder is not None and self.trainer.is_global_zero:
                measured = {name: value for result in results for name, value in result.items()}
                replace(summary, metrics=summary.metrics | measured).write(folder)

    def predict(self, **kwargs: Any) -> None:
        """Keep what `predict_step` returns, a list with an entry per batch, as predictions.pt."""
        if self.trainer.world_size > 1:
            raise MisconfigurationException(
                f"Expected one device to predict, got {self.trainer.world_size}: "
                "each would see a part of the data. Set trainer.devices to 1."
            )
        outputs, folder = self.trainer.predict(**kwargs), self._run_folder()
        if folder is not None:
            torch.save(outputs, folder / "predictions.pt")
            print(f"Written: {folder / 'predictions.pt'}")

    def _run_folder(self) -> Path | None:
        """Where this run keeps its files; None under fast_dev_run, which keeps none."""
        if self.trainer.fast_dev_run:
            return None
        folder, logger = self.trainer.log_dir, self.trainer.logger
        folder = Path(folder or self.trainer.default_root_dir)
        if logger is None or isinstance(logger, TensorBoardLogger | CSVLogger):
            return folder
        return folder / str(logger.name) / str(logger.version)  # beside this run's checkpoints


def _locate_configs(args: list[str]) -> list[str]:
    """Read a configuration that the current directory lacks from the checkout, if it is there."""
    located = []
    for before, arg in zip(["", *args], args, strict=False):
        option, equals, path = arg.rpartition("=") if arg.startswith("--config=") else ("", "", arg)
        is_config = equals or before in ("--config", "-c")
        if is_config and not Path(path).exists() and (CHECKOUT / path).exists():
            path = str(CHECKOUT / path)
        located.append(option + equals + path)
    return located


def _tensors_of_checkpoint(path: Path) -> dict[str, torch.Tensor] | None:
    """The module's tensors in a checkpoint, not read yet; None if the Trainer is to find it.

    Nothing in the file is executed.
    """
    if not path.exists() and path.name in ("last", "best", "hpc"):
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if "pytorch-lightning_version" in state and isinstance(state["state_dict"], dict):
            return state["state_dict"]
    except FileNotFoundError:
        raise
    except Exception:  # whatever an unpickler meets in a file that is not its own
        pass
    raise ValueError(
        f"ckpt_path={str(path)!r} is no checkpoint of a Trainer, or a damaged one: give another "
        "file of the run's folder checkpoints."
    )


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


# What jsonargparse wraps around the one line that helps.
_WRAPPING = re.compile(
    r"- Expected a path but .* not accessible or invalid|- Expected a <class 'NoneType'>|Errors:"
    r"|Subtypes: .*|Given value type: .*"
    r"|Given value: (NestedArg|Namespace)\(.*"
)


def _one_line(error: Exception) -> str:
    text = str(error).replace("Does not validate against any of the Union subtypes", "")
    lines = (line.strip() for line in text.splitlines())
    kept = (line.removeprefix("- ") for line in lines if line and not _WRAPPING.fullmatch(line))
    return re.sub(r"<class '([\w.]+)'>", r"\1", " ".join(kept).replace('": - ', '": '))


def main() -> int:
    """Run the command line; a bad configuration is one line on stderr and exit code 2."""
    # Lightning 2.6.6 on torch 2.14: its own affair, and nothing the user can do.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
    try:
        TrainCLI(
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"logger": RUNS},
            parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
        )
    except SIGTERMException:
        return 143  # as a shell says it; the exception's own code would be success
    except (ArgumentError, ValueError, MisconfigurationException, OSError) as error:
        print(f"train.py: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
