"""Damage to every file of a run, a comparison and a sweep: the right result, or one line of error.

A case damages one file of a folder and runs a command on it, in this process. Allowed outcomes:

    right     exit code 0, and the result of the undamaged folder: the same page, the same output,
              and for a resumed run the same weights and records
    refused   exit code 2 or 3, and an error of one line that names the file or its folder
    other     exit code 0 and another result, if another run could have written the damaged file;
              or if it is the curvature at an older checkpoint, and a line says so

Anything else is a failure, above all a traceback and a wrong result that nobody mentions.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from neumann.lab.commands.main import main
from neumann.lab.commands.parser import parse_flags
from neumann.lab.config import TrainConfig
from neumann.lab.report import drawing
from neumann.lab.storage.reading import read_metrics
from neumann.lab.training import records
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.signals import Interrupted
from tests.soak.kills import read_result
from tests.soak.mutations import damage_file, is_plausible, restore
from tests.soak.program import Broken, Program, check
from tests.soak.same_bits import same_bits
from tests.support.damage import draw_damages

OPTIMIZER = "neumann:warmup_steps=2,reset_steps=3,foreach=true"
SETTINGS = ("--batch-size", "512", "--log-every", "1", "--device", "cpu")
RUN = ("--opt", OPTIMIZER, "--epochs", "3", *SETTINGS)
STUDY = ("--epochs", "1", *SETTINGS, "--seeds", "2")
COMPARE = ("--arms", OPTIMIZER, "sgd", *STUDY)
SWEEP = ("--arms", "sgd", "--lr", "0.1:0.4:2", "--search-seeds", "1", *STUDY)


@dataclass(frozen=True)
class Command:
    """A command on a folder, and how to read what it made."""

    words: Callable[[Path], tuple[str, ...]]
    result: Callable[[Path, str], Any]  # of the folder and what the command printed
    weight: int = 1


def read_page(folder: Path, output: str) -> str:
    return (folder / "report.html").read_text()


def read_spectrum(folder: Path, output: str) -> Any:
    return json.loads((folder / "spectrum.json").read_text())["extremes"]


def read_output(folder: Path, output: str) -> str:
    """All there is of a study or a run that had finished before."""
    return output


def read_resumed(folder: Path, output: str) -> Any:
    """The result of a run; lines that were there before are not computed by the command."""
    found = read_result(folder)
    lines = read_metrics(folder)
    names = [(line.get("kind"), line.get("step")) for line in lines]
    return {**found, "metrics": names}


REPORT = Command(lambda folder: ("report", str(folder)), read_page, 3)
RESUME = Command(
    lambda folder: ("train", *RUN, "--output", str(folder), "--resume", "auto"), read_resumed, 3
)
MEASURE = Command(
    lambda folder: (
        *("spectrum", "--checkpoint", str(folder), "--device", "cpu"),
        *("--examples", "16", "--max-products", "4"),
    ),
    read_spectrum,
)
COMMANDS: dict[str, tuple[Command, ...]] = {
    "run": (REPORT, replace(RESUME, result=read_output), MEASURE),
    "stopped": (replace(REPORT, weight=1), RESUME, MEASURE),
    "comparison": (
        REPORT,
        Command(lambda folder: ("compare", *COMPARE, "--output", str(folder)), read_output),
    ),
    "sweep": (
        REPORT,
        Command(lambda folder: ("sweep", *SWEEP, "--output", str(folder)), read_output),
    ),
}
SHARES = {"run": 4, "stopped": 4, "comparison": 3, "sweep": 3}


class Damage(Program):
    name = "damage"
    counted = ("damaged files", "right", "refused", "other")
    weight = 2.0

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        torch.set_num_threads(1)
        self._before = (drawing.draw, records.describe_environment)
        found = records.describe_environment()  # runs git
        records.describe_environment = lambda: found
        drawing.draw = lambda plot: drawing.Picture("<svg></svg>", b"png")
        self._right: dict[tuple[str, int], Any] = {}
        self._made: set[str] = set()

    def close(self) -> None:
        drawing.draw, records.describe_environment = self._before

    def run(self, case: int, counts: Counter[str]) -> None:
        chance = self.chance(case)
        kind = chance.choices(list(SHARES), list(SHARES.values()))[0]
        commands = COMMANDS[kind]
        number = chance.choices(range(len(commands)), [c.weight for c in commands])[0]
        command = commands[number]
        right = self._find_right(kind, number, command)
        folder = self.folder / kind
        restore(self._template(kind), folder)
        if chance.random() < 0.5:
            damage = next(draw_damages(folder, chance))
            path, done, apply = damage.file, damage.kind, damage.apply
            original = path.read_bytes()
            apply()
        else:
            path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
            original = path.read_bytes()
            done = damage_file(path, chance)
        name = str(path.relative_to(folder))
        counts["damaged files"] += 1
        code, output, errors = run_command(command.words(folder))
        story = f"{command.words(folder)[0]} on a {kind}, {name} ({done})"
        if code != 0:
            check(code in (2, 3), f"{story}: exit code {code}; {errors[-300:]!r}")
            check_error(story, path, folder, errors)
            counts["refused"] += 1
            return
        if same_result(command, folder, output, right):
            counts["right"] += 1
            return
        harmless = is_plausible(path, original) or is_like_a_kill(kind, command, path)
        told = command is MEASURE and names_older_checkpoint(path, output, errors)
        check(harmless or told, f"{story}: silently wrong; {errors[-300:]!r}")
        counts["other"] += 1

    def _template(self, kind: str) -> Path:
        folder = self.folder / f"template-{kind}"
        if kind not in self._made:
            # Made where it will be used: a page and a config name their folder.
            made = self.folder / kind
            make_folder(kind, made)
            shutil.rmtree(made / "plots", ignore_errors=True)
            (made / "report.html").unlink(missing_ok=True)
            shutil.move(made, folder)
            self._made.add(kind)
        return folder

    def _find_right(self, kind: str, number: int, command: Command) -> Any:
        """What the command makes of the undamaged folder."""
        if (kind, number) not in self._right:
            folder = self.folder / kind
            restore(self._template(kind), folder)
            code, output, errors = run_command(command.words(folder))
            check(code == 0, f"{command.words(folder)} fails on an undamaged folder: {errors}")
            self._right[kind, number] = command.result(folder, output)
        return self._right[kind, number]


def make_folder(kind: str, folder: Path) -> None:
    if kind == "stopped":
        stop_run(folder)
        return
    words = {
        "run": ("train", *RUN),
        "comparison": ("compare", *COMPARE),
        "sweep": ("sweep", *SWEEP),
    }
    code, _, errors = run_command((*words[kind], "--output", str(folder)))
    check(code == 0, f"cannot make a {kind}: {errors}")


def stop_run(folder: Path) -> None:
    """A run that was stopped by SIGTERM in its last epoch."""
    config: TrainConfig = parse_flags("train", [*RUN, "--output", str(folder)])

    def stop(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        Training(config.resolve(), Process()).run(folder, stop)
    except Interrupted:
        return
    raise Broken("a run did not stop at SIGTERM")


def run_command(words: tuple[str, ...]) -> tuple[int, str, str]:
    """Run the command `neumann` in this process; returns exit code, output and errors."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(list(words))
        except Exception:
            raise Broken(f"{words[0]}: a traceback: {_last_lines()}") from None
    return code, output.getvalue(), errors.getvalue()


def _last_lines() -> str:
    lines = traceback.format_exc().strip().splitlines()
    files = [line.strip() for line in lines if line.strip().startswith("File")]
    return f"{lines[-1]} ({files[-1] if files else ''})"


def check_error(story: str, path: Path, folder: Path, errors: str) -> None:
    """One line that says which file, or which folder has to be looked at."""
    lines = [line for line in errors.splitlines() if line.startswith("neumann: ")]
    check(bool(lines), f"{story}: no error was printed: {errors[-300:]!r}")
    others = [line for line in errors.splitlines() if not line.startswith("neumann: ")]
    # The lines before the last say what else is damaged, or show progress.
    told = [line for line in others if "Traceback" in line or line.startswith("  File")]
    check(not told, f"{story}: a traceback was printed: {errors[-300:]!r}")
    names = (path.name, str(path.parent))
    named = any(name in lines[-1] for name in names)
    check(named, f"{story}: the error does not name the file: {lines[-1]!r}")


def same_result(command: Command, folder: Path, output: str, right: Any) -> bool:
    try:
        return same_bits(command.result(folder, output), right)
    except Exception:  # a result that cannot be read is not the right one
        return False


def names_older_checkpoint(path: Path, output: str, errors: str) -> bool:
    """Whether a line names the damaged checkpoint or, if it is gone, the step measured."""
    if path.suffix == ".pt" and not os.path.lexists(path):
        left = max(path.parent.glob("*.pt")).stem.rpartition("-")[2]
        return f"of step {int(left)}." in output
    return path.name in errors


def is_like_a_kill(kind: str, command: Command, path: Path) -> bool:
    """Whether the folder looks like that of a run that was killed: then its report ends there."""
    if command.result is not read_page:
        return False
    if path.name == "summary.json":
        return not path.exists()
    return path.name == "metrics.jsonl" and path.is_file() and kind == "stopped"
