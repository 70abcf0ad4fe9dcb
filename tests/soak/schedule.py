"""Sharing out time: every program runs in several worker processes at once, one after the other.

A worker is `python -m tests.soak.worker`. It prints a line of JSON after each case, or now and then
if cases are short. Worker i of n runs the cases i, i + n, i + 2n, …, so together they run the first
cases of the program, whatever their number.
"""

import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.program import Failure, Program

ROOT = Path(__file__).parents[2]
GRACE = 900.0  # seconds that a case may take after the time is up: the machine may be busy


@dataclass(frozen=True)
class Plan:
    seconds: float  # for all programs together
    seed: int
    workers: int  # processes of a program
    cases: int | None = None  # of each program, whatever the time; None: as many as there is time


@dataclass
class Outcome:
    """What a program did."""

    program: type[Program]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool | None = None  # of a program whose cases end: whether all of them ran


Show = Callable[[Outcome, float], None]  # called often, with the seconds that are left


def run_programs(programs: Sequence[type[Program]], plan: Plan, show: Show) -> list[Outcome]:
    """Run the programs one after the other, each for a share of the time by its weight.

    One that ends early leaves its time to those after it.
    """
    end = time.monotonic() + plan.seconds
    outcomes = []
    for number, program in enumerate(programs):
        left = max(0.0, end - time.monotonic())
        share = program.weight / sum(other.weight for other in programs[number:])
        outcomes.append(_run_program(program, plan, left * share, end, show))
    return outcomes


def _run_program(
    program: type[Program], plan: Plan, seconds: float, end: float, show: Show
) -> Outcome:
    outcome = Outcome(program)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="neumann-soak-") as folder:
        started = [
            _start_worker(program, plan, seconds, index, Path(folder) / str(index))
            for index in range(plan.workers)
        ]
        try:
            patience = math.inf if plan.cases is not None else seconds + GRACE
            _follow(started, outcome, begin + patience, end, show)
        finally:
            for process in started:
                process.kill()
                process.wait()
    outcome.seconds = time.monotonic() - begin
    against = program.judge(outcome.counts)
    if against is not None:
        repeat = (
            f"python -m tests.soak --only {program.name} --seed {plan.seed} "
            f"--workers {plan.workers} --seconds {math.ceil(seconds)}"
        )
        outcome.failures.append(Failure(program.name, -1, against, "", repeat))
    return outcome


def _start_worker(
    program: type[Program], plan: Plan, seconds: float, index: int, folder: Path
) -> "subprocess.Popen[bytes]":
    folder.mkdir()
    arguments = {
        "program": program.name,
        "seed": plan.seed,
        "first": index,
        "every": plan.workers,
        "seconds": seconds if plan.cases is None else None,
        "cases": plan.cases,
        "folder": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.soak.worker", json.dumps(arguments)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=worker_environment(),
    )


def worker_environment() -> dict[str, str]:
    """One thread per process: workers share the cores, and a fork must find no threads."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "NUMBA_THREADING_LAYER": "workqueue",  # GNU OpenMP does not survive a fork
        "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", str(ROOT / ".cache" / "numba")),
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _follow(
    started: "Sequence[subprocess.Popen[bytes]]",
    outcome: Outcome,
    deadline: float,
    end: float,
    show: Show,
) -> None:
    """Add up what the workers report until all have ended."""
    pipes = {process.stdout: process for process in started}
    buffers = dict.fromkeys(pipes, b"")
    name, complete = outcome.program.name, []
    while pipes:
        ready, _, _ = select.select(list(pipes), [], [], 0.5)
        show(outcome, end - time.monotonic())
        for pipe in ready:
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                process = pipes.pop(pipe)
                if process.wait() != 0:
                    message = f"a worker ended with code {process.returncode}"
                    outcome.failures.append(Failure(name, -1, message, "", ""))
                continue
            *lines, buffers[pipe] = (buffers[pipe] + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                outcome.counts.update(report.get("counts", {}))
                outcome.failures += [Failure(**found) for found in report.get("failures", ())]
                complete += [report["complete"]] if "complete" in report else []
        if time.monotonic() > deadline:
            message = f"a case still ran {GRACE:g} s after the time was up"
            outcome.failures.append(Failure(name, -1, message, "", ""))
            return
    known = [value for value in complete if value is not None]
    outcome.complete = all(known) and len(known) == len(started) if known else None
