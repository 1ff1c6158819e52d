"""`tptopk plan` and `tptopk epsilon`: figures, JSON, and one line for a refusal."""

import json
import math

import pytest

from tptopk_pl import accounting
from tptopk_pl.accounting import Segment
from tptopk_pl.cli import main
from tptopk_pl.plan import TwoPhasePlan

PLAN = "plan --num-units 1000 --num-steps 100 --expected-batch-size 30 --target-delta 1e-5"


def run(capsys, line):
    code = main(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, line):
    code, out, err = run(capsys, f"{line} --json")
    assert (code, err) == (0, "")
    return json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_plan_as_json_is_the_plan(capsys):
    options = "--target-epsilon 2 --method tp_rand --warmup-steps 40 --noise-multiplier-ratio 1.5"
    result = run_json(capsys, f"{PLAN} {options}")
    plan = TwoPhasePlan.from_dict(result["plan"])
    assert (plan.method, plan.warmup_steps, plan.target_epsilon) == ("tp_rand", 40, 2.0)
    assert plan.phase2_noise_multiplier == 1.5 * plan.noise_multiplier
    assert [s["num_steps"] for s in result["segments"]] == [40, 60]
    assert result["epsilon"] == plan.epsilon <= 2.0
    assert result["epsilon_rdp"] == plan.epsilon_rdp
    assert result["epsilon_replace_one"] > plan.epsilon
    assert result["delta"] == 1e-5


def test_plan_as_table(capsys):
    code, out, _ = run(capsys, f"{PLAN} --noise-multiplier 2")
    assert code == 0
    head, first, second, *figures = out.splitlines()
    assert first.split() == ["phase", "1", "30", "2", "0.03"]
    assert second.split() == ["phase", "2", "70", "2", "0.03"]
    assert len(head) == len(first) == len(second)
    epsilon = accounting.epsilon([Segment(2.0, 0.03, 30), Segment(2.0, 0.03, 70)], 1e-5)
    assert any("PLD, add/remove" in row and f"{epsilon:.4f}" in row for row in figures)
    assert any("replace-one" in row for row in figures) and any("RDP" in row for row in figures)


def test_a_method_without_warmup_shows_one_phase(capsys):
    _, out, _ = run(capsys, f"{PLAN} --noise-multiplier 2 --method dp_sgd")
    assert out.splitlines()[1].split() == ["phase", "2", "100", "2", "0.03"]


def test_infinite_epsilon_is_valid_json(capsys):
    result = run_json(capsys, f"{PLAN} --method non_private")
    assert result["epsilon"] == result["epsilon_replace_one"] == "inf"
    assert float(result["epsilon"]) == math.inf
    assert " inf" in run(capsys, f"{PLAN} --method non_private")[1]


def test_epsilon_of_given_steps(capsys):
    line = "epsilon --noise-multiplier 2 --num-units 1000 --expected-batch-size 30 --num-steps 100"
    one = run_json(capsys, f"{line} --target-delta 1e-5")
    assert one["epsilon"] == accounting.epsilon([Segment(2.0, 0.03, 100)], 1e-5)
    assert one == run_json(capsys, "epsilon --segment 2,0.03,100 --target-delta 1e-5")
    two = run_json(capsys, "epsilon --segment 2,0.03,100 --segment 1,0.1,5 --target-delta 1e-5")
    assert two["epsilon"] > one["epsilon"] and len(two["segments"]) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (PLAN, "exactly one of target_epsilon"),
        (f"{PLAN} --noise-multiplier nan", "noise_multiplier=nan"),
        (f"{PLAN} --target-epsilon 1 --warmup-fraction 2", "warmup_fraction=2.0"),
        ("epsilon --target-delta 1e-5", "either --segment or all of"),
        ("epsilon --target-delta 1e-5 --num-units 5", "got --num-units."),
        (
            "epsilon --target-delta 1e-5 --num-units 5 --segment 1,.1,5",
            "got --num-units, --segment.",
        ),
        ("epsilon --target-delta 1e-5 --segment 1,0.1", "segment='1,0.1' as SIGMA,Q,STEPS"),
        ("epsilon --target-delta 1e-5 --segment 1,2,3", "sampling_rate=2.0"),
        ("epsilon --target-delta 2 --segment 1,.1,3", "delta=2.0"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(capsys, line, words):
    code, out, err = run(capsys, line)
    assert code == 2 and out == ""
    assert words in err and err.count("\n") == 1 and err.startswith(f"tptopk {line.split()[0]}: ")


@pytest.mark.parametrize(
    "line",
    [
        f"{PLAN} --target-epsilo 1",  # an abbreviation is a misspelling, not an option
        f"{PLAN} --target-epsilon one",
        f"{PLAN} --method sgd",
        "",
        "plans",
    ],
)
def test_unknown_arguments_exit_with_2(capsys, line):
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2 and "Traceback" not in capsys.readouterr().err
