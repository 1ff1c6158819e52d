"""Two processes: one global draw, one noise, the same weights on both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

SCRIPT = """
import json, sys
import torch
from toys import Callback, Plain, flat, loader, private, trainer


class Ranks(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.world_size == 2:
            first, second = trainer.strategy.all_gather(flat(pl_module))
            assert torch.equal(first, second)


torch.set_num_threads(1)
module, callback = Plain(), private(**json.loads(sys.argv[1]))
devices = int(sys.argv[2])
fitted = trainer(
    callback, Ranks(), devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=2
)
fitted.fit(module, loader())
if fitted.is_global_zero:
    print("RESULT", json.dumps([callback.step, callback.epsilon, flat(module).tolist()]))
"""


def run(folder: Path, devices: int, options: dict[str, Any]) -> list[Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, json.dumps(options), str(devices)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr
    return json.loads(results[0].removeprefix("RESULT "))  # type: ignore[no-any-return]


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """With noise: a second rank's noise, or a draw of its own, would show at once."""
    options = {"seed": 3, "noise_multiplier": 1.0, "active_ratio": 0.2, "expected_batch_size": 4}
    (steps, epsilon, one), (_, _, two) = (run(tmp_path, devices, options) for devices in (1, 2))
    assert steps == 60
    assert 0 < epsilon < 50
    assert two == pytest.approx(one, rel=0, abs=1e-4)
    assert max(abs(weight) for weight in one) > 1
