"""Two versions of the library, measured in one sitting.

Each version runs in a process of its own, which imports `neumann` from its own source folder. The
processes take turns: one measures a few steps while the other waits. A round is one turn of each,
in alternating order, and gives one ratio after/before. The table shows the median of the ratios and
their quartiles. Slow changes of the machine affect both turns of a round alike and cancel. With a
GPU, both processes run on the same core, since cores differ. Several pairs of processes are started
one after another, since processes differ too.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import neumann
from benchmarks.common.markdown import format_cell, format_table
from benchmarks.step.candidates import select, version_candidates
from benchmarks.step.shapes import CASES
from benchmarks.step.timed_optimizer import TimedOptimizer, free_memory

ROOT = Path(__file__).parents[2]
LEAST_ROUNDS = 4
CHILD = "from benchmarks.step.versions import serve; serve()"
CLOCKS = ("wall", "gpu")

Round = list[dict[str, float]]  # the times of each clock: before, after
Row = dict[str, Any]  # of one optimizer on one case; ratios are quartile, median, quartile


class Version:
    """A process that measures with the library from one source folder, until the stack closes."""

    def __init__(self, source: Path, device: torch.device, stack: ExitStack) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
            "PYTHONHASHSEED": "0",
        }
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        package = Path(self.ask(do="start", device=str(device)))
        if not package.is_relative_to(source):
            raise SystemExit(f"the version in {source} was asked for, not {package}")

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit(f"the measuring process exited with {self._process.wait()}")
        return json.loads(reply)


def compare_versions(
    cases: Sequence[str],
    device: torch.device,
    before: Path,
    seconds: float,
    steps: int,
    only: str | None,
    pairs: int = 3,
) -> Iterator[list[Row]]:
    """Measure the version in the folder `before` and the imported one.

    Yields the rows of all rounds so far when a pair of processes has ended.

    The optimizers whose name contains `only` share `seconds` per case, and so do
    the `pairs` of processes. A turn times `steps` steps.
    """
    if not (before / "neumann").is_dir():
        raise SystemExit(f"{before} holds no package neumann")
    sources = [before.resolve(), Path(neumann.__file__).resolve().parents[1]]
    turns: dict[tuple[str, str], list[Round]] = {}
    for _ in range(pairs):
        with ExitStack() as stack:
            versions = [Version(source, device, stack) for source in sources]
            for case in cases:
                names = [c.name for c in select(version_candidates(device), case, only)]
                for name in names:
                    for version in versions:
                        version.ask(do="build", case=case, name=name)
                    share = seconds / len(names) / pairs
                    found = turns.setdefault((case, name), [])
                    found += _alternate(versions, share, steps)
                    row = _summarize(case, name, found)
                    print(format_ratios([row]).splitlines()[-1], flush=True, file=sys.stderr)
        yield [_summarize(case, name, found) for (case, name), found in turns.items()]


def format_ratios(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        cells.append([row["case"], row["name"], str(row["rounds"])])
        for clock in CLOCKS:
            for when in ("before", "after"):
                cells[-1].append(format_cell(row[f"{clock}_{when}_ms"], "{:.3f}"))
            ratio = row[f"{clock}_ratio"]
            cells[-1].append("{1:.3f} [{0:.3f}, {2:.3f}]".format(*ratio) if ratio else "")
    heads = ["case", "optimizer", "rounds"]
    heads += [head for clock in CLOCKS for head in (f"{clock} ms before", "after", "ratio")]
    return format_table(heads, "llrrrrrrr", cells)


def _alternate(versions: list[Version], seconds: float, steps: int) -> list[Round]:
    turns: list[Round] = []
    end = time.monotonic() + seconds
    while len(turns) < LEAST_ROUNDS or time.monotonic() < end:
        order = -1 if len(turns) % 2 else 1
        turns.append([version.ask(do="measure", steps=steps) for version in versions[::order]])
        turns[-1] = turns[-1][::order]
    return turns


def _summarize(case: str, name: str, turns: list[Round]) -> Row:
    row: Row = {"case": case, "name": name, "rounds": len(turns)}
    for clock in CLOCKS:
        pairs = [(a[clock], b[clock]) for a, b in turns if clock in a and clock in b]
        row[f"{clock}_before_ms"] = median(a for a, _ in pairs) if pairs else None
        row[f"{clock}_after_ms"] = median(b for _, b in pairs) if pairs else None
        ratios = [b / a for a, b in pairs]
        row[f"{clock}_ratio"] = quantiles(ratios, n=4, method="inclusive") if pairs else None
    return row


def serve() -> None:
    """Answer the requests of the measuring parent, one JSON line each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    device = torch.device("cpu")
    timed: TimedOptimizer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: Any = None
        if request["do"] == "start":
            device = torch.device(request["device"])
            if device.type == "cuda" and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            reply = str(Path(neumann.__file__).resolve())
        elif request["do"] == "build":
            timed = None
            free_memory(device)  # of the previous one
            candidates = {c.name: c for c in version_candidates(device)}
            shapes = CASES[request["case"]].shapes
            timed = TimedOptimizer(candidates[request["name"]], shapes, device)
            timed.build()
        elif timed is not None:
            reply = _measure(timed, request["steps"], device)
        print(json.dumps(reply), file=replies, flush=True)


def _measure(timed: TimedOptimizer, steps: int, device: torch.device) -> dict[str, float]:
    """The median times of one turn, in milliseconds."""
    timed.wall_ms.clear()
    timed.gpu_ms.clear()
    timed.step()  # the other process may have left caches and clocks in another state
    for _ in range(steps):
        timed.time_wall()
    for _ in range(steps if device.type == "cuda" else 0):
        timed.time_gpu()
    times = {"wall": timed.wall_ms, "gpu": timed.gpu_ms}
    return {clock: median(found) for clock, found in times.items() if found}
