"""Pages and plots from the lab's records: `write_report(folder)` and `write_density(record)`.

Records on disk, finished or not, become runs (`runs`) and a study (`study_records`), and those of a
study with axes its points (`points`); `arm_names` gives the arms short names. `training_plots` and
`curvature_plots` say what to draw as a `plot`; `drawing` draws it with the colors of `palette`, and
`svg` makes the drawing fit a page.
`result_chart` (as a PNG: `result_picture`), `result_tables` and `verdicts` put the results into a
picture, rows and sentences, with the number formats of `formatting`, for each of the `references`;
`headings` say what the page is. `page` puts it all into one HTML file.
"""

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from neumann.lab.errors import UsageError, missing_package
from neumann.lab.report.curvature_plots import plot_density
from neumann.lab.report.plot import Plot
from neumann.lab.report.points import Overview, has_points, read_overview
from neumann.lab.report.study_records import Study, read_study
from neumann.lab.storage.atomic_files import describe_os_error, write_atomically
from neumann.lab.storage.folders import refuse_link
from neumann.lab.storage.reading import read_json_object

if TYPE_CHECKING:
    from neumann.lab.report.drawing import Picture
    from neumann.lab.report.result_chart import ResultChart

__all__ = ["write_density", "write_report"]

REPORT, PLOTS = "report.html", "plots"


def write_report(folder: Path) -> Path:
    """Write `report.html` of a run, a comparison or a sweep, and a PNG of every plot.

    A study with axes has a page for all points, which links to a page for each.

    Each file is replaced as a whole, the page last, so a reader sees the old report or the new one.
    Returns the path of the page. Raises UsageError if the folder holds nothing to report, a package
    is missing or the folder cannot be written, and RecordsError if the records are damaged.
    """
    folder = Path(folder)
    if not has_points(folder):
        return _write_page(folder, read_study(folder))
    overview = read_overview(folder)
    for point in overview.points:
        if point.study is not None:
            _write_page(folder / point.folder, point.study)
    return _write_page(folder, overview)


def _write_page(folder: Path, content: Study | Overview) -> Path:
    for name in (PLOTS, REPORT):
        refuse_link(folder / name)
    draw = _import_drawing("a report")
    try:
        from neumann.lab.report.page import Artist, render_overview, render_page
        from neumann.lab.report.result_picture import draw_result
    except ImportError as error:
        raise _missing(error, "a report") from error
    pngs: dict[str, bytes] = {}

    def draw_svg(plot: Plot) -> str:
        picture = draw(plot)
        pngs[f"{plot.name}.png"] = picture.png
        return picture.svg

    def draw_chart(chart: "ResultChart") -> str:
        pngs["result.png"] = draw_result(chart)
        return f"{PLOTS}/result.png"

    artist = Artist(draw_svg, draw_chart, PLOTS)
    if isinstance(content, Study):
        page = render_page(content, artist)
    else:
        page = render_overview(content, artist)
    try:
        (folder / PLOTS).mkdir(exist_ok=True)
        for name, png in pngs.items():
            write_atomically(folder / PLOTS / name, [png])
        write_atomically(folder / REPORT, [page.encode()])
    except OSError as error:
        message = f"cannot write the report into {folder}: {describe_os_error(error)}"
        raise UsageError(message) from error
    return folder / REPORT


def write_density(record: Path) -> Path:
    """Draw the density in a record of `neumann spectrum` into a PNG file next to it."""
    content = read_json_object(record)
    if not isinstance(content.get("density"), dict):
        raise UsageError(f"{record} holds no density: neumann spectrum --density measures one")
    draw = _import_drawing("a plot")
    path = record.with_suffix(".png")
    try:
        write_atomically(path, [draw(plot_density(content)).png])
    except OSError as error:
        raise UsageError(f"cannot write {path}: {describe_os_error(error)}") from error
    return path


def _import_drawing(wanted_by: str) -> "Callable[[Plot], Picture]":
    """Import matplotlib, which would first read the settings in a matplotlibrc of the working
    folder. That folder may be someone else's, and such settings can start programs.
    """
    try:
        with chdir(Path(__file__).parent / "templates"):
            from neumann.lab.report.drawing import draw
    except ImportError as error:
        raise _missing(error, wanted_by) from error
    return draw


def _missing(error: ImportError, wanted_by: str) -> UsageError:
    package = (error.name or "matplotlib").partition(".")[0]
    return missing_package(package, "lab", wanted_by)
