"""`neumann compare`: train several optimizers over the same seeds, and print how they differ."""

from neumann.lab.commands.study import refuse_torchrun, run_and_print
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.engine import Study
from neumann.lab.studies.settings import CompareConfig


def run(config: CompareConfig) -> None:
    refuse_torchrun("compare")
    run_and_print(Study.of(config, config.output or new_run_folder(config.title)))
