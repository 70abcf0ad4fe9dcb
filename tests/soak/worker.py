"""A worker of the soak: runs its share of one program's cases and prints what it counts."""

import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.soak.program import Failure, as_json, run_cases
from tests.soak.programs import PROGRAMS

EVERY = 0.5  # seconds between lines


def main(
    program: str,
    seed: int,
    first: int,
    every: int,
    seconds: float | None,
    cases: int | None,
    folder: str,
) -> None:
    """Run the cases first, first + every, …: for so many seconds, or all below `cases`."""
    pipe, sys.stdout = sys.stdout, sys.stderr  # what cases print must not mix with the report
    end = math.inf if seconds is None else time.monotonic() + seconds
    running = PROGRAMS[program](seed, Path(folder))
    total = running.count_cases()
    pending: Counter[str] = Counter()
    spoken, last = 0.0, first

    def say(**report: object) -> None:
        print(json.dumps(report), file=pipe, flush=True)

    def report(counts: Counter[str], failure: Failure | None) -> None:
        nonlocal spoken
        pending.update(counts)
        if failure is not None or time.monotonic() > spoken + EVERY:
            say(counts=pending, failures=[as_json(failure)] if failure else [])
            pending.clear()
            spoken = time.monotonic()

    def list_cases() -> Iterator[int]:
        nonlocal last
        for last in itertools.count(first, every):
            if cases is not None and last >= cases:
                return
            yield last

    try:
        run_cases(running, list_cases(), lambda: time.monotonic() < end, report)
    finally:
        running.close()
    say(counts=pending, complete=None if total is None else last >= total)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
