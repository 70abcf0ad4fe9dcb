"""The page: one HTML file that needs nothing else, neither network nor scripts.

What came out stands first, then the table, then the pictures, then what was run. Tabs are radio
buttons, dark mode is a media query; without either the page still says everything.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from xml.etree.ElementTree import Element

import neumann
from neumann.lab.comparison import UNCORRECTED
from neumann.report import wording
from neumann.report.curves import AXES, Axis
from neumann.report.legends import is_short, legend, parts_legend
from neumann.report.markup import Child, breakable, tag
from neumann.report.palette import ARMS
from neumann.report.plots import Plot, guide
from neumann.report.settings import environment_line, settings_section
from neumann.report.studies import Study
from neumann.report.tables import comparison_table, run_table, seeds_table, trials_table
from neumann.report.verdicts import verdict_of

NAMED = 4  # optimizers that a title names


@dataclass(frozen=True)
class Figure:
    """A plot and its picture."""

    plot: Plot
    svg: Element
    file: str  # of the PNG, from the page


@dataclass(frozen=True)
class Figures:
    """The pictures of a page, by where they stand."""

    metrics: Mapping[Axis, Sequence[Figure]]
    sensitivity: Figure | None
    forces: Sequence[Figure]
    recalibration: Figure | None
    curvature: Sequence[Figure]


def page(study: Study, figures: Figures) -> Element:
    """The whole page."""
    sections = [
        ("verdict", "Verdict", _verdict(study)),
        ("results", "Results", _results(study)),
        ("sensitivity", "Learning rates", _sensitivity(study, figures.sensitivity)),
        ("curves", "Curves", _curves(study, figures.metrics)),
        ("batchnorm", "BatchNorm", _recalibration(study, figures.recalibration)),
        ("forces", "Distance and forces", _pictures(study, figures.forces)),
        ("curvature", "Curvature", _pictures(study, figures.curvature)),
        ("settings", "Settings", settings_section(study.arms, study.settings)),
    ]
    present = [(name, title, content) for name, title, content in sections if content]
    contents = [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in present]
    heading = _title(study)
    return tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", heading),
            # An empty icon of its own: browsers otherwise ask a server for one.
            tag("link", rel="icon", href="data:,"),
            tag("style", _style()),
        ),
        tag(
            "body",
            tag(
                "header",
                tag("p", study.name, class_="name"),
                tag("h1", heading),
                tag("p", _subtitle(study), class_="subtitle"),
                tag("nav", tag("ul", contents), aria_label="Contents"),
            ),
            tag(
                "main",
                [
                    tag("section", tag("h2", title), content, id=name)
                    for name, title, content in present
                ],
            ),
            tag("footer", tag("p", f"Made by neumann {neumann.__version__} from its records.")),
        ),
        lang="en",
    )


def _style() -> str:
    sheet = files("neumann.report").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f"--arm-{index}: {pair[side]}; " for index, pair in enumerate(ARMS))
        for side in (0, 1)
    )
    return (
        f"{sheet}\n:root {{ {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    )


def _title(study: Study) -> str:
    names = [each.arm for each in study.sensitivities] if study.search else []
    names = names or [arm.name for arm in study.arms]
    optimizers = list(dict.fromkeys(name.partition(":")[0] for name in names))
    who = f"{len(names)} arms"
    if optimizers and len(optimizers) <= NAMED:
        who = wording.listed(optimizers)
    data = study.settings.get("data")
    where = f" on {wording.plain(data)}" if data else ""
    if study.search is not None:
        return f"Learning rates of {who}{where}"
    return f"{who}{where}"


def _subtitle(study: Study) -> list[Child]:
    known = study.settings
    parts = [
        wording.plain(known["model"]) if known.get("model") else "",
        wording.count(known["epochs"], "epoch") if isinstance(known.get("epochs"), int) else "",
        f"batch {known['batch_size']}" if known.get("batch_size") else "",
        f"{known['sched']} schedule" if known.get("sched") else "",
    ]
    if study.comparison is not None:
        parts.append(wording.count(study.comparison.seeds, "seed"))
    elif study.search is None:
        run = study.arms[0].runs[0]
        parts += [
            f"lr {known['lr']:g}" if isinstance(known.get("lr"), float) else "",
            f"seed {run.seed}",
        ]
    if known.get("held_out"):
        parts.append("a tenth of the training set held out")
    lines: list[Child] = [" · ".join(part for part in parts if part)]
    first = next((run for arm in study.arms for run in arm.runs), None)
    if first is not None:
        lines += [tag("br"), environment_line(first)]
    return lines


def _verdict(study: Study) -> list[Child]:
    found = verdict_of(study)
    made: list[Child] = [tag("p", text, class_="warning") for text in found.warnings]
    if found.findings:
        items = [tag("li", _with_names(text, study)) for text in found.findings]
        made.append(tag("ul", items, class_="findings"))
    return made or [tag("p", "No training has ended yet.", class_="warning")]


def _with_names(text: str, study: Study) -> list[Child]:
    """The sentence with the arms standing out: their names are no words."""
    names = {arm.name for arm in study.arms} | {each.arm for each in study.sensitivities}
    # The longest first: one arm's name may begin another's.
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pieces = re.split(rf"(?<!\S)({either})(?=[\s;.,]|$)", text) if names else [text]
    return [tag("b", breakable(piece)) if piece in names else piece for piece in pieces]


def _results(study: Study) -> list[Child]:
    if study.comparison is None:
        found = run_table(study.arms[0].runs[0]) if study.arms else None
        return [] if found is None else [found]
    notes = "The interval of the mean is Student’s. "
    if len(study.comparison.rows) > 1:
        notes += (
            "Differences are paired by seed, which gives both arms the same initial weights and "
            "data order: a positive one says that the first arm is ahead. "
        )
    if study.comparison.tests > 1:
        notes += f"The {UNCORRECTED}. "
    if study.comparison.target is not None:
        notes += "Steps and epochs to the target are means over the seeds that reached it. "
    notes += "Diverged runs are counted and left out of the means."
    return [
        comparison_table(study, study.comparison),
        tag("p", notes, class_="note"),
        tag(
            "details",
            tag("summary", "Accuracy of each seed, %"),
            seeds_table(study.comparison),
        ),
    ]


def _curves(study: Study, metrics: Mapping[Axis, Sequence[Figure]]) -> list[Child]:
    shown = [axis for axis in AXES if metrics.get(axis)]
    if not shown:
        return []
    radios = [
        tag(
            "input",
            type="radio",
            name="axis",
            id=f"axis-{axis}",
            checked="checked" if axis == shown[0] else None,
        )
        for axis in shown
    ]
    labels = [tag("label", axis, for_=f"axis-{axis}") for axis in shown]
    drawn = {
        curve.label for figures in metrics.values() for f in figures for curve in f.plot.curves
    }
    arms = [(arm.name, arm.place) for arm in study.arms if arm.name in drawn]
    bar = tag(
        "div",
        tag("div", tag("span", "against"), labels, class_="switch"),
        legend(arms),
        class_="bar" if is_short(arms) else "bar loose",
    )
    plots = [
        tag("div", [_figure(figure) for figure in metrics[axis]], class_=f"plots by-{axis}")
        for axis in shown
    ]
    notes = [_guide(metrics[shown[0]]), *_not_drawn(study)]
    if "seconds" in shown and any(len(arm.drawn) > 1 for arm in study.arms):
        notes.append("Against seconds, a step lies at the mean of the times of its seeds.")
    note = tag("p", " ".join(text for text in notes if text), class_="note")
    return [*radios, bar, note, *plots]


def _not_drawn(study: Study) -> list[str]:
    """What the curves leave out."""
    waiting = sum(
        run.summary is None for arm in study.arms for run in arm.runs if run not in arm.drawn
    )
    silent = [
        arm.name
        for arm in study.arms
        if arm.diverged and not arm.drawn and not any(run.lines for run in arm.diverged)
    ]
    notes = []
    if waiting:
        verb = "is" if waiting == 1 else "are"
        notes.append(
            f"{wording.count(waiting, 'run')} not ended yet {verb} left out of the curves."
        )
    if silent:
        notes.append(f"No curve: {wording.listed(silent)} diverged before anything was recorded.")
    return notes


def _sensitivity(study: Study, figure: Figure | None) -> list[Child]:
    if figure is None:
        return []
    arms = [(each.arm, each.place) for each in study.sensitivities]
    return [
        legend(arms),
        tag("div", _figure(figure), class_="plots single"),
        tag(
            "details",
            tag("summary", "Accuracy at each learning rate, %"),
            trials_table(study.sensitivities),
        ),
    ]


def _recalibration(study: Study, figure: Figure | None) -> list[Child]:
    if figure is None:
        return []
    drawn = {curve.label for curve in figure.plot.curves}
    arms = [(arm.name, arm.place) for arm in study.arms if arm.name in drawn]
    note = tag("p", _guide([figure]), class_="note")
    return [legend(arms), note, tag("div", _figure(figure), class_="plots single")]


def _pictures(study: Study, figures: Sequence[Figure]) -> list[Child]:
    if not figures:
        return []
    drawn = {curve.label for figure in figures for curve in figure.plot.curves}
    arms = [(arm.name, arm.place) for arm in study.arms if arm.name in drawn]
    note = tag("p", _guide(figures), class_="note")
    return [legend(arms), note, tag("div", [_figure(each) for each in figures], class_="plots")]


def _guide(figures: Sequence[Figure]) -> str:
    return guide([figure.plot for figure in figures])


def _figure(figure: Figure) -> Element:
    plot = figure.plot
    return tag(
        "figure",
        tag("h3", plot.title),
        tag("div", figure.svg, class_="picture"),
        tag(
            "figcaption",
            parts_legend(plot.curves),
            f"{plot.caption} " if plot.caption else None,
            tag("a", "PNG", href=figure.file),
        ),
        id=f"plot-{plot.name}",
        data_plot=plot.name,
    )
