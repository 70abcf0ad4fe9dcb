"""`neumann study`: run a study from a file; and what `compare`, `sweep` and `demo` run like it."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from neumann.lab.commands.arm_legend import name_rows
from neumann.lab.commands.progress import show_study
from neumann.lab.commands.report import print_report
from neumann.lab.commands.tables import print_comparison, print_search
from neumann.lab.commands.terminal import make_table, print_table
from neumann.lab.config import check_at_least
from neumann.lab.config_files import list_code
from neumann.lab.errors import UsageError
from neumann.lab.report.arm_names import shorten_names
from neumann.lab.studies.comparison import Budget, OutOfTime, Session
from neumann.lab.studies.engine import PlannedRun, Study
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.study_files import FINAL, describe_part, get_part_folder
from neumann.lab.studies.study_toml import read_study_toml
from neumann.lab.studies.workers import Team
from neumann.lab.training.processes import Process, count_processes, join_processes
from neumann.lab.user_code import refuse_code


@dataclass(frozen=True)
class StudyConfig:
    """Run a study from a TOML file: arms with their own settings, at every point of some axes.

    Learning rates are chosen on held-out data, then tested over seeds. Run it again to continue.
    """

    file: Annotated[Path | None, tyro.conf.Positional] = None
    """the study, a TOML file"""
    list: bool = False
    """print all runs and their state, and train nothing"""
    set: tuple[str, ...] = ()
    """settings in place of the file's, for all arms, as in data-dir=data epochs=1"""
    output: Path | None = None
    """folder for the records; by default runs/ and the name of the file"""
    jobs: int = 1
    """runs trained side by side; on a GPU, they share it"""
    seconds: float | None = None
    """start no new run after this many seconds; run the same command again to continue"""
    search_only: bool = False
    """choose the learning rates and stop before the test; run again without it to continue"""
    allow_code: tyro.conf.SuppressFixed[tyro.conf.Fixed[tuple[str, ...]]] = ()  # from --allow-code


def run(config: StudyConfig) -> None:
    check_at_least(config, jobs=1, seconds=0)
    if config.file is None:
        raise UsageError("neumann study needs a TOML file, such as studies/paper/scaling.toml")
    folder = config.output or Path("runs") / config.file.stem
    study = read_study_toml(
        config.file, folder, config.set, jobs=config.jobs, seconds=config.seconds
    )
    for point in study.points:
        refuse_code(config.file, list_code(point.config), config.allow_code)
    if config.search_only and not study.sweeps:
        raise UsageError(f"{config.file} has no [tuning], so there is nothing to search")
    if config.list:
        study.check_folders()
        print_runs(study.list_runs())
        return
    if count_processes() == 1:
        _start(study, config)
        return
    if config.jobs > 1:
        raise UsageError("torchrun's processes train one run together, so --jobs must be 1")
    with join_processes() as process:
        _start_together(study, config, process)


def _start(study: Study, config: StudyConfig, team: Team | None = None) -> None:
    study.check()
    study.write()
    run_and_print(study, team, search_only=config.search_only, file=config.file)


def _start_together(study: Study, config: StudyConfig, process: Process) -> None:
    """A separate function, so that what was trained is freed before the process group ends."""
    team = Team(process)
    if not process.is_leader:
        team.follow()
        return
    try:
        _start(study, config, team)
    finally:
        team.dismiss()


def run_and_print(
    study: Study,
    team: Team | None = None,
    print_comparison: Callable[[Comparison], None] = print_comparison,
    search_only: bool = False,
    file: Path | None = None,
) -> None:
    """Train what is not finished, and print the results. `file` is what the study was read from."""
    budget = Budget(study.seconds)
    try:
        with show_study("search" if study.sweeps else "") as observer:
            found = study.search(Session(observer, budget, team))
        for folder, chosen in found.items():
            _print_place(folder, study)
            print_search(chosen, file)
        if search_only:
            print_report(study.folder)
            return
        with show_study("final" if study.sweeps else "") as observer:
            comparisons = study.test(found, Session(observer, budget, team))
    except OutOfTime as stop:
        print_report(study.folder)
        print(f"neumann: {stop}", file=sys.stderr)
        return
    searches = {get_part_folder(folder, FINAL): chosen for folder, chosen in found.items()}
    for comparison in comparisons:
        _print_place(comparison.folder, study)
        print_comparison(name_rows(comparison, searches.get(comparison.folder, ())))
    print_report(study.folder)


def _print_place(folder: Path, study: Study) -> None:
    if study.axes:
        print(f"\n{describe_part(folder, study.folder)}\n")


def print_runs(runs: Sequence[PlannedRun]) -> None:
    table = make_table("stage", "arm", "seed", "lr", "epochs", "batch", "state", left=2)
    names = shorten_names([run.arm for run in runs])
    for run in runs:
        lr = f"{run.config.lr:g}" if run.lr_is_known else "to be chosen"
        cells = (run.seed, lr, run.config.epochs, run.config.batch_size, run.state)
        table.add_row(*map(Text, (run.stage, names[run.arm], *map(str, cells))))
    states = Counter(run.state for run in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    print_table(table, [f"{len(runs)} runs: {counts}"])


def refuse_torchrun(command: str) -> None:
    """Raise UsageError under torchrun, which is for `train` and `study`."""
    if count_processes() > 1:
        raise UsageError(
            f"neumann {command} runs in one process: start it without torchrun, and use --jobs to "
            "train side by side"
        )
