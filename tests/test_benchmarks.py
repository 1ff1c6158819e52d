"""The benchmarks measure what they say; how fast anything is, they do not test."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _contenders, _growth, _memory, _race, scaling, step_cost
from benchmarks._worker import Job
from benchmarks.networks import NETWORKS, workload
from tptopk_pl.rng import Stream, fresh_key
from tptopk_pl.sampling import PoissonSampler
from tptopk_pl.selectors import num_active
from tptopk_pl.units import PrivacyUnits

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG"
# Python 3.12 says so of any fork; numpy's own threads wait for work while these tests fork.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_step_cost_compares_all_on_paired_steps(tmp_path):
    names = [*_contenders.CONTENDERS, "phase2_0.0001"]
    options = ["--models", "mlp_100", "--batch-size", "8", "--pairs", "2", "--contenders", *names]
    subprocess.run(
        [sys.executable, "benchmarks/step_cost.py", *options, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    data = json.loads((tmp_path / "step_cost.json").read_text())
    (race,) = data["races"]
    assert (race["model"], race["batch_size"], race["threads"]) == ("mlp_100", 8, 1)
    found = race["contenders"]
    assert list(found) == names

    assert "at least one of 89610 coordinates" in found.pop("phase2_0.0001")["failed"]
    num_parameters = 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    for name, own in found.items():
        assert own["num_parameters"] == num_parameters, name
        assert len(own["seconds"]) == 2 and min(own["seconds"]) > 0, name
        assert own["median_seconds"] == pytest.approx(statistics.median(own["seconds"]))
        for other in ("sgd", "opacus_hooks"):
            ratios = [a / b for a, b in zip(own["seconds"], found[other]["seconds"], strict=True)]
            quartiles = own[f"relative_to_{other}"]
            assert quartiles["median"] == pytest.approx(statistics.median(ratios)), name
            assert min(ratios) <= quartiles["low"] <= quartiles["high"] <= max(ratios)
            peak = found[other]["added_peak_bytes"]
            expected = own["added_peak_bytes"] / max(peak, 1)
            assert own[f"memory_relative_to_{other}"] == pytest.approx(expected)

    active = {"phase1": (1, 1.0), "phase2_10": (2, 0.1), "phase2_1": (2, 0.01)}
    for name, (phase, ratio) in active.items():
        own = found[name]
        assert (own["phase"], own["num_active"]) == (phase, num_active(ratio, num_parameters))
        assert all(own["noise_seconds"][generator] > 0 for generator in ("cryptographic", "torch"))

    text = (tmp_path / "step_cost.md").read_text()
    assert all(f"| {name} |" in text for name in names) and "failed: ValueError" in text
    assert (tmp_path / "step_cost.png").read_bytes().startswith(PNG)


def _stub(log):
    """A stand-in for the worker that notes when its steps begin and end; "dies" does in its 2nd."""

    def note(line):
        with log.open("a") as file:
            file.write(f"{line}\n")

    def serve(pipe, job):
        pipe.send(("at", None))
        for step in range(job.num_pairs):
            pipe.recv()
            note(f"begin {job.contender}")
            if (job.contender, step) == ("dies", 1):
                os._exit(9)
            note(f"end {job.contender}")
            pipe.send(("at", {"sgd": 1.0, "other": 3.0}.get(job.contender, 2.0) + step))
        pipe.recv()
        pipe.send(("done", {"added_peak_bytes": 10, "num_parameters": 1}))

    return serve


@forks
def test_one_works_at_a_time_and_one_that_dies_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(_race, "serve", _stub(tmp_path / "log"))
    found = _race.race(Job("any", "", 8, 1, 3), ["sgd", "dies", "other"])
    assert found["dies"] == {"failed": "failed: its process ended with code 9"}
    assert found["sgd"]["seconds"] == [1.0, 2.0, 3.0]
    assert found["other"]["seconds"] == [3.0, 4.0, 5.0]
    assert found["other"]["relative_to_sgd"]["median"] == 2.0  # of 3/1, 4/2, 5/3
    assert "relative_to_opacus_hooks" not in found["other"]
    turns = (tmp_path / "log").read_text().split()[1::2]
    assert turns == [  # the order rotates
        *("sgd", "sgd", "dies", "dies", "other", "other"),
        *("dies", "other", "other", "sgd", "sgd"),
        *("other", "other", "sgd", "sgd"),
    ]


@forks
def test_what_needs_too_much_memory_is_not_run():
    (found,) = _race.race(Job("mlp_3000", "", 1024, 1, 1), ["opacus_hooks"]).values()
    assert found["failed"].startswith("not run: needs 46.6 GB")  # 4 · 1024 · 11,388,010


def test_all_failing_is_a_table_and_a_picture(tmp_path):
    own = {"failed": "failed: it | broke"}
    result = {"model": "mlp", "batch_size": 1, "threads": 1, "contenders": {"sgd": own}}
    assert "| sgd | failed: it / broke |" in step_cost._section(result)
    step_cost._draw(tmp_path / "bars.png", [result])
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)


def test_every_step_has_exactly_the_expected_records(monkeypatch):
    monkeypatch.setattr(Stream, "binomial", Stream.binomial)  # put back afterwards
    sampler = PoissonSampler(
        PrivacyUnits.one_per_record(1200),
        sampling_rate=1 / 12,
        steps_per_pass=12,
        physical_batch_size=100,
        key=fresh_key(),
        next_step=lambda: 0,
        last_step=12,
    )
    assert len({len(sampler.draw(step)) for step in range(12)}) > 1
    _contenders.fix_batch_sizes()
    assert {len(sampler.draw(step)) for step in range(12)} == {100}
    assert [len(chunk) for chunk in sampler.chunks(0)] == [100]


@pytest.mark.skipif(sys.platform != "linux", reason="the mark cannot be reset elsewhere")
def test_peak_memory_is_that_since_the_reset():
    size = 2**26
    before = _memory.now("cpu")
    _memory.reset_peak("cpu")
    torch.ones(size // 4)
    assert size * 0.9 < _memory.peak("cpu") - before < size * 1.2
    _memory.reset_peak("cpu")
    assert _memory.peak("cpu") - before < size * 0.2


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_map_their_inputs_to_scores(name):
    chosen = workload(name)
    assert chosen.network()(chosen.inputs(2)).shape == (2, 10)


@pytest.mark.parametrize("option", ["--models", "--contenders"])
def test_unknown_names_are_refused_in_one_line(option, capsys):
    with pytest.raises(SystemExit) as caught:
        step_cost.main([option, "nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err.splitlines()[-1]


def test_growth_measures_what_its_axes_say(tmp_path):
    points = []
    for panel, x, model, batch_size, names in _growth.plan():
        size = sum(p.numel() for p in workload(model).network().parameters())
        if panel == "parameters":
            assert size == pytest.approx(x, rel=0.05)
        if panel == "batch":
            assert batch_size == x
        own = {"median_seconds": 0.1, "added_peak_bytes": 10**6}
        found = {name: own for name in names} | {"opacus_hooks": {"failed": "not run"}}
        points.append({"panel": panel, "x": x, "model": model, "contenders": found})
    _growth.draw(tmp_path / "growth.png", points)
    assert (tmp_path / "growth.png").read_bytes().startswith(PNG)


def test_scaling_measures_each_part(tmp_path):
    scaling.main(["--largest", "2000", "--plans", "1", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "scaling.json").read_text())
    assert [(r["units"], r["records per unit"]) for r in data["sampling"]] == [(2000, 1), (2000, 2)]
    assert [row["coordinates"] for row in data["noise"]] == [1000]
    for part in ("sampling", "planning", "noise", "scoring"):
        for row in data[part]:
            taken = [value for name, value in row.items() if "ms" in name.split()]
            assert taken and min(taken) > 0, (part, row)
    text = (tmp_path / "scaling.md").read_text()
    assert all(f"## {title}" in text for title in ("Sampling", "Planning", "Noise", "Scoring"))
    assert (tmp_path / "scaling.png").read_bytes().startswith(PNG)
