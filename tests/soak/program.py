"""What a program of the soak is: a stream of numbered cases that count what they did."""

import random
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

MOST_FAILURES = 20  # per process: a broken build must not fill the disk


class Broken(AssertionError):
    """A promise that did not hold."""


def check(holds: bool, promise: str) -> None:
    """Raise Broken unless the promise holds. Unlike an assert, it also works under `python -O`."""
    if not holds:
        raise Broken(promise)


@dataclass(frozen=True)
class Failure:
    program: str
    case: int
    message: str  # one line
    trace: str
    repeat: str  # the command that runs this case again


class Program(ABC):
    """One way to break things.

    `counted` names what a case may count, in the order of the table. `weight` is its share of the
    time. A program with a known number of cases ends when it has run all of them.
    """

    name: ClassVar[str]
    counted: ClassVar[tuple[str, ...]]
    weight: ClassVar[float] = 1.0

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder  # empty, and for this process alone

    def count_cases(self) -> int | None:
        """How many cases there are; None if they never end."""
        return None

    @abstractmethod
    def run(self, case: int, counts: Counter[str]) -> None:
        """Run one case and add what it did to the counts. Any exception is a failure."""

    @classmethod
    def judge(cls, counts: Counter[str]) -> str | None:
        """What the counts of all cases together say against the library, if anything."""
        return None

    def chance(self, case: int) -> random.Random:
        """The random numbers of a case."""
        return random.Random(f"{self.name} {self.seed} {case}")

    def close(self) -> None:  # noqa: B027
        """Free what the program holds."""


def repeat_command(name: str, seed: int, case: int) -> str:
    return f"python -m tests.soak --only {name} --seed {seed} --case {case}"


def run_case(program: Program, case: int, counts: Counter[str]) -> Failure | None:
    """Run a case; returns how it failed, if it did."""
    try:
        program.run(case, counts)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        message = f"{type(error).__name__}: {lines[0]}"
        repeat = repeat_command(program.name, program.seed, case)
        return Failure(program.name, case, message, traceback.format_exc(), repeat)
    counts["cases"] += 1
    return None


def run_cases(
    program: Program,
    cases: Iterator[int],
    go_on: Callable[[], bool],
    report: Callable[[Counter[str], Failure | None], Any] = lambda counts, failure: None,
) -> tuple[Counter[str], list[Failure]]:
    """Run cases until they end, `go_on` says no, or too many have failed."""
    total: Counter[str] = Counter()
    failures: list[Failure] = []
    last = program.count_cases()
    for case in cases:
        if (last is not None and case >= last) or not go_on() or len(failures) >= MOST_FAILURES:
            break
        counts: Counter[str] = Counter()
        failure = run_case(program, case, counts)
        total += counts
        failures += [failure] if failure else []
        report(counts, failure)
    return total, failures


def as_json(failure: Failure) -> dict[str, Any]:
    return asdict(failure)
