"""Run the soak: `python -m tests.soak --seconds 3600`, or one case of it again."""

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak.program import Program, as_json, run_case
from tests.soak.schedule import Outcome, Plan, run_programs, worker_environment

NAMES = ("interrupts", "html", "damage", "kills", "spectra", "operations")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all; 60 by default")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="PROGRAM")
    parser.add_argument("--workers", type=int, default=2, help="processes at once; 2 by default")
    parser.add_argument("--cases", type=int, help="run the first cases, whatever the time")
    parser.add_argument("--case", type=int, help="run this case of one program, and nothing else")
    parser.add_argument("--out", type=Path, help="write counts and failures to this JSON file")
    arguments = parser.parse_args(words)
    if arguments.case is not None and len(arguments.only) != 1:
        parser.error("--case needs --only with one program")
    if arguments.workers < 1 or arguments.seconds < 0:
        parser.error("--workers must be at least 1, and --seconds at least 0")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    # Threads and caches are set before torch is imported, for a repeated case as for a worker.
    os.environ.update(worker_environment())
    from tests.soak.programs import PROGRAMS

    if arguments.case is not None:
        return repeat_case(PROGRAMS[arguments.only[0]], arguments.seed, arguments.case)
    chosen = [PROGRAMS[name] for name in NAMES if name in arguments.only]
    begin = time.monotonic()
    progress = Progress()
    plan = Plan(arguments.seconds, arguments.seed, arguments.workers, arguments.cases)
    outcomes = run_programs(chosen, plan, progress.show)
    progress.end()
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    print_table(outcomes)
    for failure in failures:
        print(f"\n{failure.program}, case {failure.case}: {failure.message}")
        print(f"  repeat it: {failure.repeat}" if failure.repeat else "  it cannot be repeated")
    if arguments.out is not None:
        content = describe(outcomes, arguments, time.monotonic() - begin)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"\n{len(failures)} failures" if failures else "\nno failures")
    return 1 if failures else 0


def repeat_case(program: type[Program], seed: int, case: int) -> int:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="neumann-soak-") as folder:
        running = program(seed, Path(folder))
        try:
            failure = run_case(running, case, counts)
        finally:
            running.close()
    if failure is not None:
        print(failure.trace, file=sys.stderr)
    print(f"{program.name}, case {case}:", "failed" if failure else "passed", dict(counts))
    return 1 if failure else 0


class Progress:
    """One line that is written over on a terminal, else a line every half minute.

    Failures are shown as soon as they are known.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = -1e9
        self._shown: set[tuple[str, int]] = set()

    def show(self, outcome: Outcome, left: float) -> None:
        now = time.monotonic()
        for failure in outcome.failures:
            if (failure.program, failure.case) not in self._shown:
                self._shown.add((failure.program, failure.case))
                print(f"\n{failure.program}, case {failure.case}: {failure.message}", flush=True)
        if now < self._last + (0.5 if self._live else 30.0):
            return
        self._last = now
        counts = ", ".join(f"{outcome.counts[name]:,} {name}" for name in outcome.program.counted)
        failed = f", {len(outcome.failures)} FAILURES" if outcome.failures else ""
        line = f"{max(left, 0):5.0f} s left  {outcome.program.name}: {counts}{failed}"
        if self._live:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r{line[: columns - 1]:{columns - 1}}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print(file=sys.stderr)


def print_table(outcomes: list[Outcome]) -> None:
    rows = []
    for outcome in outcomes:
        for name in ("cases", *outcome.program.counted):
            count = outcome.counts[name]
            minute = 60 * count / outcome.seconds if outcome.seconds else 0.0
            rows.append((outcome.program.name, name, f"{count:,}", f"{minute:,.0f}"))
    heads = ("program", "what", "count", "a minute")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    before = None
    for row in (heads, *rows):
        shown = ("" if row[0] == before else row[0], *row[1:])
        before = row[0]
        left, right = shown[:2], shown[2:]
        cells = [text.ljust(width) for text, width in zip(left, widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(right, widths[2:], strict=True)]
        print("  ".join(cells).rstrip())


def describe(
    outcomes: list[Outcome], arguments: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    from neumann.lab.training.environment import describe_environment

    found = describe_environment()
    git = found["git"] or {}
    return {
        "command": shlex.join(["python", "-m", "tests.soak", *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "seed": arguments.seed,
        "workers": arguments.workers,
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "versions": found["versions"],
        "hardware": {"platform": platform.platform(), **found["hardware"]},
        "programs": {
            outcome.program.name: {
                "seconds": round(outcome.seconds, 1),
                "counts": {
                    name: outcome.counts[name] for name in ("cases", *outcome.program.counted)
                },
                **({} if outcome.complete is None else {"complete": outcome.complete}),
                "failures": len(outcome.failures),
            }
            for outcome in outcomes
        },
        "failures": [as_json(failure) for outcome in outcomes for failure in outcome.failures],
    }


if __name__ == "__main__":
    sys.exit(main())
