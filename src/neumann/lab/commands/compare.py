"""`neumann compare`: train several optimizers over the same seeds, and print how they differ."""

from pathlib import Path

from neumann.lab.commands.progress import show_study
from neumann.lab.commands.report import print_report
from neumann.lab.commands.tables import print_comparison
from neumann.lab.errors import UsageError
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.comparison import run_comparison
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.training.processes import count_processes


def run(config: CompareConfig) -> None:
    refuse_torchrun("compare")
    compare_and_print(config, config.output or new_run_folder(config.title))


def compare_and_print(config: CompareConfig, folder: Path) -> None:
    with show_study() as observer:
        comparison = run_comparison(config, folder, observer)
    print_comparison(comparison)
    print_report(folder)


def refuse_torchrun(command: str) -> None:
    """Raise UsageError under torchrun: studies start their own processes."""
    if count_processes() > 1:
        raise UsageError(
            f"neumann {command} runs in one process: start it without torchrun, and use --jobs to "
            "train side by side"
        )
