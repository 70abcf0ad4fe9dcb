"""Flags of scripts that train runs into a ledger, and processes side by side that share the runs.

    python -m benchmarks.contest.recipe_images train --data-dir data --jobs 6

With `--jobs 6` the script starts itself six times. No run is trained twice, since each process
claims its runs in a folder that all of them know (`--share`). What they print is shown with the
number of the process, except tables. When all have ended, the script goes on alone, starts no run,
and prints its table once. If one of them failed, it ends there instead, with status 1.
"""

import math
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from neumann.lab.training.signals import raise_on_sigterm

LAST_LINES = 3  # of the error output of a process that failed


def add_ledger_flags(parser: ArgumentParser, results: Path | None) -> None:
    """The flags of a script that trains runs into a ledger."""
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--share", type=Path, help="folder in which processes claim their runs")
    parser.add_argument("--results", type=Path, default=results, help="the ledger of all runs")


def parse_shared(
    parser: ArgumentParser,
    given: Sequence[str] | None = None,
    prepare: Callable[[Namespace], object] = lambda arguments: None,
) -> Namespace:
    """The arguments. With `--jobs`, processes have trained the runs when this returns.

    `prepare` is called before they start, for what is better done once than by each of them.
    """
    given = sys.argv[1:] if given is None else given
    arguments = parser.parse_args(given)
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    if vars(arguments).get("stage") == "table" and arguments.results is not None:
        require_results(parser, arguments.results)
    if arguments.jobs > 1:
        prepare(arguments)
        spec = sys.modules["__main__"].__spec__
        program = sys.argv[:1] if spec is None else ["-m", spec.name]
        with tempfile.TemporaryDirectory() as folder:
            share = str(arguments.share or folder)
            command = [sys.executable, *program, *given, "--jobs", "1", "--share", share]
            failed = run_side_by_side([command] * arguments.jobs)
        if failed:
            explanation = "as shown above. The runs that had ended are kept."
            parser.exit(1, f"{failed} of {arguments.jobs} processes failed, {explanation}\n")
        arguments.seconds = 0.0
    return arguments


def require_results(parser: ArgumentParser, path: Path) -> None:
    """End the script with a line of explanation if there are no results to show."""
    if not path.exists():
        parser.error(f"{path} does not exist: start at the root of the repository")


def run_side_by_side(commands: Sequence[Sequence[str]]) -> int:
    """Run all commands at once and show what they print; the number of those that failed.

    They end with this process, also if it is terminated: left alone, they would train the same runs
    as the next command.
    """
    with raise_on_sigterm():
        return _run_side_by_side(commands)


def _run_side_by_side(commands: Sequence[Sequence[str]]) -> int:
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands
    ]
    try:
        watchers = [
            threading.Thread(target=_show_output, args=(index, process))
            for index, process in enumerate(started, 1)
        ]
        for watcher in watchers:
            watcher.start()
        for watcher in watchers:
            watcher.join()
    finally:
        for process in started:
            process.terminate()  # nothing happens to those that have ended
    return sum(process.wait() != 0 for process in started)


def _show_output(index: int, process: subprocess.Popen[str]) -> None:
    """Print the lines of a process until it ends, and its last error lines if it failed."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors: deque[str] = deque(maxlen=LAST_LINES)
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    for line in process.stdout:
        if line.strip() and not line.startswith("|"):
            print(f"[{index}] {line}", end="", flush=True)
    reader.join()
    if process.wait() != 0:
        print(f"[{index}] failed: {''.join(errors).strip()}", flush=True)
