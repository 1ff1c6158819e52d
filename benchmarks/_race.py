"""All contenders on one model, step by step in turn, and what is concluded from their times."""

import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks._worker import Job, serve

# Not "spawn": importing all of this once for each contender would take longer than measuring. This
# process runs no tensor operation, so it has no threads that a fork would lose.
_CONTEXT = multiprocessing.get_context("fork")


class Runner:
    """The parent's side of one contender.

    Attributes:
        seconds: of each measured step.
        result: what the worker found, once it is done; ``{"failed": line}`` if it failed.
    """

    def __init__(self, job: Job) -> None:
        self.seconds: list[float] = []
        self.result: dict[str, Any] = {}
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(self._pipe, theirs, job), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()  # the first step to be measured is about to begin

    def step(self, order: str = "go") -> None:
        """Let one step run; with ``"stop"`` the last, which is not measured."""
        if not self.result:
            self._pipe.send(order)
            self._receive()

    def _receive(self) -> None:
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            kind, content = "failed", f"failed: its process ended with code {code}"
        if kind == "at":
            self.seconds += [] if content is None else [content]
        else:
            self.result = {"failed": content} if kind == "failed" else content
            self._process.join()


def _serve(parents: Connection, pipe: Connection, job: Job) -> None:
    parents.close()  # else the end of the parent would go unseen
    serve(pipe, job)


def race(job: Job, contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure each contender on the job's model.

    They take turns, one step each, in an order that rotates from round to round: whatever slows
    the machine for a while slows all of them, and a ratio within a round is fair.

    Returns:
        By contender, its result and ``seconds``, or ``{"failed": line}``.
    """
    say(f"{job.model}: batch {job.batch_size}, {job.threads} thread(s)")
    runners = {name: Runner(replace(job, contender=name)) for name in contenders}
    for place in range(job.num_pairs):
        first = place % len(contenders)
        for name in (*contenders[first:], *contenders[:first]):
            runners[name].step()
        say(f"{job.model}: round {place + 1} of {job.num_pairs}")
    for runner in runners.values():
        runner.step("stop")
    results = {name: runner.result for name, runner in runners.items()}
    for name, runner in runners.items():
        if "failed" not in runner.result:
            results[name] = {**runner.result, "seconds": runner.seconds}
    return {name: summarised(name, results) for name in contenders}


def summarised(name: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A contender's result with its median, and its ratios to SGD and to Opacus' hooks."""
    own = results[name]
    if "failed" in own:
        return own
    seconds = np.array(own["seconds"])
    found = {**own, "median_seconds": float(np.median(seconds))}
    for key, other in (("relative_to_sgd", "sgd"), ("relative_to_opacus_hooks", "opacus_hooks")):
        base = results.get(other, {"failed": "not asked for"})
        if "failed" not in base:
            found[key] = _quartiles(seconds / np.array(base["seconds"]))
            found[f"memory_{key}"] = own["added_peak_bytes"] / max(base["added_peak_bytes"], 1)
    return found


def _quartiles(ratios: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)
