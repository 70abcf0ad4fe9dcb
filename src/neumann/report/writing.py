"""From a folder of records to its report: `report.html`, and a PNG of every plot.

Files are written aside and renamed, the page last: who opens it sees the old report or the new.
UsageError, in one line, where the folder holds nothing to report, matplotlib is missing or nothing
can be written there; RecordsError where the records are damaged.
"""

from pathlib import Path

from neumann.lab.errors import UsageError, missing_package
from neumann.lab.files import reason, write_aside
from neumann.report.curvature import curvature_plots
from neumann.report.curves import AXES
from neumann.report.forces import force_plots
from neumann.report.markup import document
from neumann.report.metrics import metric_plots, recalibration_plot
from neumann.report.page import Figure, Figures, page
from neumann.report.plots import Plot
from neumann.report.studies import read_study
from neumann.report.tried import sensitivity_plot

REPORT, PLOTS = "report.html", "plots"


def write_report(folder: Path) -> Path:
    """Write the report of a run, a comparison or a sweep into its folder; returns the page."""
    folder = Path(folder)
    study = read_study(folder)
    try:
        from neumann.report.drawing import draw
    except ImportError as error:
        raise missing_package("matplotlib", "lab", "a report") from error
    drawn: dict[str, bytes] = {}

    def figure(plot: Plot) -> Figure:
        picture = draw(plot)
        drawn[f"{plot.name}.png"] = picture.png
        return Figure(plot, picture.svg, f"{PLOTS}/{plot.name}.png")

    sensitivity = sensitivity_plot(study.sensitivities, study.search is not None)
    recalibration = recalibration_plot(study)
    figures = Figures(
        {axis: [figure(plot) for plot in metric_plots(study, axis)] for axis in AXES},
        None if sensitivity is None else figure(sensitivity),
        [figure(plot) for plot in force_plots(study)],
        None if recalibration is None else figure(recalibration),
        [figure(plot) for plot in curvature_plots(study)],
    )
    content = document(page(study, figures))
    path = folder / REPORT
    try:
        (folder / PLOTS).mkdir(exist_ok=True)
        for name, png in drawn.items():
            write_aside(folder / PLOTS / name, [png])
        write_aside(path, [content])
    except OSError as error:
        raise UsageError(f"cannot write the report into {folder}: {reason(error)}") from error
    return path
