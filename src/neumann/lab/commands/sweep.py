"""`neumann sweep`: choose each learning rate on held-out data, then compare the winners."""

from neumann.lab.commands.study import refuse_torchrun, run_and_print
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.engine import Study
from neumann.lab.studies.settings import SweepConfig


def run(config: SweepConfig) -> None:
    refuse_torchrun("sweep")
    run_and_print(Study.of(config, config.output or new_run_folder(config.title)))
