"""Bring the finished runs of `neumann study` into results/paper, where verdicts are made from.

    python -m benchmarks.paper.collect_runs runs/main-cifar10 runs/scaling

The folder of a study has the name of its file. Collecting again adds what is new. A run that is
there already with another result is an error: results are never replaced silently.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.ledger import Ledger, Run
from benchmarks.paper.claim_tests import STUDIES, read_study
from benchmarks.paper.run_lines import Results, RunKey, collect_study
from neumann.lab.config_files import read_toml
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import is_finished
from neumann.lab.storage.run_files import read_run_files
from neumann.lab.studies.study_toml import read_study_toml
from neumann.lab.studies.workers import get_output_folder

ROOT = Path(__file__).parents[2]
COMPARED = ("data", "model", "opt", "score", "diverged", "lr", "epochs", "batch_size", "steps")
OF_STUDY = ("data", "model")  # settings that all runs of a study share
# Settings that a machine chooses, unless the file of the study does.
OF_MACHINE = {"device", "amp", "compile", "cuda_graph", "channels_last", "data_dir"}


def add_runs(ledger: Ledger[RunKey], runs: dict[RunKey, Run]) -> int:
    """Add the runs that the ledger lacks; return how many."""
    for key, run in runs.items():
        before = ledger.runs.get(key, run)
        changed = [name for name in COMPARED if before.get(name) != run.get(name)]
        if changed:
            name = changed[0]
            raise UsageError(
                f"{ledger.path} has {name} {before.get(name)} for {key.arm}, seed {key.seed} "
                f"({key.stage} {key.point}), but the folder has {run.get(name)}"
            )
    new = {key: run for key, run in runs.items() if key not in ledger.runs}
    if new:
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
    for key, run in new.items():
        ledger.add(key, run)
    return len(new)


def check_study(folder: Path, runs: dict[RunKey, Run]) -> None:
    """Raise a UsageError unless these are runs of the study that has the folder's name."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a study's folder")
    file = f"{folder.name}.toml"
    try:
        settings = read_study(folder.name)["settings"]
    except FileNotFoundError:
        raise UsageError(f"{folder}: there is no {file} in studies/paper") from None
    for key, run in runs.items():
        for name in OF_STUDY:
            if name in settings and name in run and _shorten(settings[name]) != run[name]:
                raise UsageError(
                    f"{folder}: {key.arm}, seed {key.seed} has {name} {run[name]}, and "
                    f"{file} has {settings[name]}"
                )


def check_settings(file: Path, folder: Path) -> None:
    """Raise a UsageError if a finished run has another setting than the file of its study.

    A trial with fewer epochs leaves such runs.
    """
    chosen = read_toml(file)["settings"].keys()
    ignored = (OF_MACHINE - chosen) | {"data"}  # `check_study` compares data without their folders
    for planned in read_study_toml(file, folder).list_runs():
        place = get_output_folder(planned.config)
        if not is_finished(place):
            continue
        expected, found = planned.config.as_record(), read_run_files(place).config
        for name in expected.keys() - ignored:
            is_chosen = name == "lr" and not planned.lr_is_known
            if not is_chosen and found.get(name) != expected[name]:
                raise UsageError(
                    f"{place} has {name} {found.get(name)}, and {file.name} has {expected[name]}"
                )


def check_steps(folder: Path, runs: dict[RunKey, Run]) -> None:
    """Raise a UsageError if runs of the same length and batch size have taken different steps.

    Then the data changed between them.
    """
    steps: dict[tuple[Any, ...], int] = {}
    for key, run in runs.items():
        if "steps" in run:
            length = key.stage, run["epochs"], run["batch_size"]
            known = steps.setdefault(length, run["steps"])
            if known != run["steps"]:
                raise UsageError(
                    f"{folder}: {key.arm}, seed {key.seed} took {run['steps']} steps and another "
                    f"run of as many epochs {known}, so they had different data"
                )


def _shorten(value: str) -> str:
    """Files without their folders, as they are kept."""
    kind, colon, files = value.partition(":")
    return f"{kind}:{','.join(Path(f).name for f in files.split(','))}" if colon else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--commit", help="of runs that were trained where git was not available")
    parser.add_argument("--results", type=Path, default=ROOT / "results/paper")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    for folder in arguments.folders:
        try:
            found = {
                key: {"commit": arguments.commit, **run} if arguments.commit else run
                for key, run in collect_study(folder).items()
            }
            check_study(folder, found)
            check_settings(STUDIES / f"{folder.name}.toml", folder)
            check_steps(folder, found)
            added = add_runs(results.open(folder.name), found)
        except UsageError as error:
            raise SystemExit(str(error)) from error
        print(f"{folder.name}: {len(found)} finished runs, {added} new")


if __name__ == "__main__":
    main()
