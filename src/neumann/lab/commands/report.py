"""`neumann report`: write an HTML page with plots into the folder of a study."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from neumann.extras import describe_install
from neumann.lab.commands.progress import show_activity
from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class ReportConfig:
    """Write an HTML page with plots of a run, a comparison, a sweep or a study into its folder."""

    folder: Annotated[Path | None, tyro.conf.Positional] = None
    """folder of a run, a comparison, a sweep or a study"""


def run(config: ReportConfig) -> None:
    if config.folder is None:
        raise UsageError(
            "neumann report needs the folder of a run, a comparison, a sweep or a study"
        )
    print(_write(config.folder))


def print_report(folder: Path) -> None:
    """Print where the records are; write the report and print where it is."""
    print(f"records: {folder}", flush=True)
    try:
        print(f"report: {_write(folder)}")
    except UsageError as error:
        print(f"neumann: no report: {error}", file=sys.stderr)


def _write(folder: Path) -> Path:
    try:
        from neumann.lab.report import write_report
    except ImportError as error:
        raise UsageError(
            f"a report needs the extra `lab` ({error}): {describe_install('lab')}"
        ) from error
    with show_activity("drawing the report"):
        return write_report(folder)
