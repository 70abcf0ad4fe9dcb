"""The page of a report: one HTML file that needs nothing else, neither network nor scripts.

Tabs and the choice of a reference are radio buttons; dark mode is a media query. The templates
escape all text (autoescape), so text from records cannot become markup. The only markup that they
do not escape is made by `breakable`, `unbroken` and `highlight`, which escape their text
themselves, and by `svg`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import neumann
from neumann.lab.report import formatting, result_tables, training_plots
from neumann.lab.report.curvature_plots import plot_curvature
from neumann.lab.report.formatting import format_count, format_list, join_sentences
from neumann.lab.report.headings import (
    compose_subtitle,
    compose_title,
    describe_kind,
    describe_overview,
)
from neumann.lab.report.palette import ARMS, PARTS, line_style
from neumann.lab.report.plot import AXES, Axis, Plot, explain_marks
from neumann.lab.report.points import INTERVALS, Overview, plot_points, tabulate_points
from neumann.lab.report.references import compare_with_each
from neumann.lab.report.result_chart import ResultChart, chart_result
from neumann.lab.report.study_records import Study
from neumann.lab.report.verdicts import Verdict, state_verdict
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.wording import CORRECTED

# How many arms, and characters of their names, a legend may have to stay in view.
STICKY_ARMS, STICKY_CHARACTERS = 6, 120
MAX_WHOLE = 24  # characters of a word that may keep its hyphens in one line of a phone
FEW_STEPS = 500  # up to here, curves are against steps at first


@dataclass(frozen=True)
class Figures:
    """Plots that share a legend and a note."""

    plots: Mapping[Axis | None, Sequence[Plot]]  # by the axis to choose; None: there is no choice
    arms: Sequence[tuple[str, int]]  # name and index
    note: str = ""

    @property
    def sticky(self) -> bool:
        """Whether the legend is small enough to stay in view."""
        characters = sum(len(name) for name, _ in self.arms)
        return len(self.arms) <= STICKY_ARMS and characters <= STICKY_CHARACTERS


@dataclass(frozen=True)
class Artist:
    """What draws the pictures of a page; it is asked for each once."""

    draw_svg: Callable[[Plot], str]  # returns markup; the PNG will be in the folder
    draw_chart: Callable[[ResultChart], str]  # returns the path of the PNG
    folder: str


def render_page(study: Study, artist: Artist) -> str:
    return _render("report.html", _gather(study), artist)


def render_overview(overview: Overview, artist: Artist) -> str:
    """Render the page of a study with axes; its points have charts, and PNGs of them elsewhere."""
    plots, arms = plot_points(overview), overview.arms
    legend = [(arm, index) for index, arm in enumerate(arms)]
    by_point = zip(*overview.compared.values(), strict=True)
    verdicts = [[_judge(point.study) for point in compared] for compared in by_point]
    points = [point for compared in overview.compared.values() for point in compared]
    tests = [point.comparison.p_value_count for point in points if point.comparison]
    content = {
        "version": neumann.__version__,
        "name": overview.name,
        "kind": describe_overview(overview),
        "title": overview.title or overview.name,
        "about": overview.about,
        "references": _choose_references(list(overview.compared)),
        "points": [
            (point, found, None if point.study is None else chart_result(point.study))
            for point, found in zip(
                overview.points,
                verdicts or [[_judge(p.study)] for p in overview.points],
                strict=True,
            )
        ],
        "arm_names": set(arms),
        "figures": plots and Figures({None: plots}, legend, INTERVALS),
        "tables": tabulate_points(overview),
        "tables_note": f"At each point, {CORRECTED}." if max(tests, default=0) > 1 else "",
    }
    return _render("overview.html", content, artist)


def _choose_references(arms: list[str]) -> list[str]:
    """Return the arms to choose from; none if there is no choice."""
    return arms if len(arms) > 1 else []


def _judge(study: Study | None) -> Verdict:
    return Verdict((), ("Not started.",)) if study is None else state_verdict(study)


def _render(template: str, content: dict[str, Any], artist: Artist) -> str:
    environment = Environment(
        loader=PackageLoader("neumann.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "highlight": highlight,
        "unbroken": unbroken,
    }
    environment.globals |= {
        "arm_colors": ARMS,
        "part_names": PARTS,
        "line_style": line_style,
        "draw_svg": lambda plot: Markup(artist.draw_svg(plot)),
        "draw_chart": artist.draw_chart,
        "plots_folder": artist.folder,
    }
    return formatting.printable(environment.get_template(template).render(content))


def breakable(text: str) -> Markup:
    """Escape a name and let it break after its separators, but not at hyphens."""
    return Markup("<wbr>").join(map(unbroken, re.findall(r"[^:,/]+[:,/]*|[:,/]+", text)))


def unbroken(text: str) -> Markup:
    """Escape text and let no line break at a hyphen, as in neumann-spectral."""
    whole = Markup('<span class="whole">{}</span>')
    return Markup("").join(
        whole.format(piece) if "-" in piece and len(piece) <= MAX_WHOLE else piece
        for piece in re.split(r"(\s+)", text)
    )


def highlight(text: str, names: Iterable[str]) -> Markup:
    """Escape a sentence and set the arms' names, which are not words, in bold."""
    # The longest first: one name may start with another.
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pieces = re.split(rf"(?<!\S)({either})(?=[\s;.,]|: |$)", text) if either else [text]
    bold = Markup("<b>{}</b>")
    return Markup("").join(
        bold.format(breakable(piece)) if index % 2 else _keep_together(piece)
        for index, piece in enumerate(pieces)
    )


def _keep_together(text: str) -> str:
    """Let no line break inside "0.40 ± 0.20 points" or "n = 3"."""
    pattern = r" (?=± )|(?<=±) |(?<=\b[np]) (?=[=<] )|(?<=\b[np] [=<]) |(?<=\d) (?=points\b|nats\b)"
    return re.sub(pattern, "\u00a0", text)


def _gather(study: Study) -> dict[str, Any]:
    """Gather what the template shows; a section that has nothing to show is empty or None."""
    comparison = study.comparison
    comparisons = [] if comparison is None else compare_with_each(comparison)
    references = [each.rows[each.reference].arm for each in comparisons]
    verdicts = [state_verdict(replace(study, comparison=each)) for each in comparisons]
    sensitivity = training_plots.plot_sensitivity(study.sensitivities, study.search is not None)
    score_plots = {axis: training_plots.plot_score(study, axis) for axis in AXES}
    scores = {axis: [plot] for axis, plot in score_plots.items() if plot is not None}
    metrics = {axis: training_plots.plot_metrics(study, axis) for axis in AXES}
    axes = _order_axes({axis: [*scores.get(axis, []), *metrics[axis]] for axis in AXES})
    first = axes[0] if axes else "epochs"
    recalibration = training_plots.plot_recalibration(study, first)
    results = None
    if comparison is not None:
        results = result_tables.tabulate_comparison(study, comparisons)
    elif study.search is None:
        results = result_tables.tabulate_run(study.arms[0].runs[0])
    return {
        "version": neumann.__version__,
        "name": study.name,
        "kind": describe_kind(study),
        "title": compose_title(study),
        "subtitle": compose_subtitle(study),
        "about": study.about,
        "arm_names": {arm.name for arm in study.arms} | {arm.arm for arm in study.sensitivities},
        "references": _choose_references(references),
        "verdicts": verdicts or [state_verdict(study)],
        "chart": chart_result(study),
        "results": results,
        "results_note": _explain_comparison(comparisons) if comparisons else "",
        "seeds": result_tables.tabulate_seeds(comparison) if comparison else None,
        "sensitivity": sensitivity
        and Figures(
            {None: [sensitivity]},
            [(arm.arm, arm.index) for arm in study.sensitivities],
            _explain_missing_rates(study),
        ),
        "trials": result_tables.tabulate_trials(study.sensitivities, study.metric),
        "axes": axes,
        "score": _collect(study, _sort(scores, axes), _explain_curves(study, scores)),
        "curves": _collect(study, _sort(metrics, axes)),
        "recalibration": _collect(study, {None: [recalibration] if recalibration else []}),
        "forces": _collect(study, {None: training_plots.plot_forces(study, first)}),
        "curvature": _collect(study, {None: plot_curvature(study, first)}),
        "settings": result_tables.tabulate_settings(study),
    }


def _collect(
    study: Study, plots: Mapping[Axis | None, Sequence[Plot]], note: str | None = None
) -> Figures | None:
    """Give plots a legend of the arms they show, and by default a note on bands and marks."""
    found = [plot for of_axis in plots.values() for plot in of_axis]
    if not found:
        return None
    shown = {curve.label for plot in found for curve in plot.curves}
    arms = [(arm.name, arm.index) for arm in study.arms if arm.name in shown]
    first = next(iter(plots.values()))
    return Figures(plots, arms, explain_marks(first) if note is None else note)


def _sort(
    plots: Mapping[Axis, Sequence[Plot]], axes: Sequence[Axis]
) -> dict[Axis | None, Sequence[Plot]]:
    return {axis: plots[axis] for axis in axes if plots.get(axis)}


def _explain_comparison(comparisons: Sequence[Comparison]) -> str:
    """Say how to read the numbers of a comparison, given once for each reference."""
    comparison = comparisons[0]
    sentences = ["Intervals are 95 % confidence intervals of the means, by Student's t."]
    if len(comparison.rows) > 1:
        sentences.append(
            "Differences are paired by seed, which gives both arms the same initial weights and "
            "data order; a positive one means that the reference is ahead."
        )
    if any(each.p_value_count > 1 for each in comparisons):  # not with one that diverged
        sentences.append(f"The {CORRECTED}.")
    if comparison.target is not None:
        sentences.append("Steps and epochs to the target are means over the seeds that reached it.")
    return join_sentences(*sentences, "Diverged runs are counted and left out of the means.")


def _order_axes(plots: Mapping[Axis, Sequence[Plot]]) -> list[Axis]:
    """Steps first where they are few: then they are what a reader wants to save."""
    ends = [x for plot in plots["steps"] for curve in plot.curves for x in curve.x[-1:]]
    first: Axis = "steps" if ends and max(ends) <= FEW_STEPS else "epochs"
    return sorted((axis for axis in plots if plots[axis]), key=lambda axis: axis != first)


def _explain_missing_rates(study: Study) -> str:
    sources = [] if study.search is None else study.search.describe_sources()
    return f"No curve: {'; '.join(sources)}." if sources else ""


def _explain_curves(study: Study, plots: Mapping[Axis, Sequence[Plot]]) -> str:
    """Say how to read the curves, and what they leave out."""
    sentences = [explain_marks(next(iter(plots.values()), []))]
    waiting = sum(
        run.summary is None for arm in study.arms for run in arm.runs if run not in arm.averaged
    )
    if waiting:
        verb = "is" if waiting == 1 else "are"
        runs = format_count(waiting, "unfinished run")
        sentences.append(f"{runs} {verb} left out of the curves.")
    silent = [
        arm.name
        for arm in study.arms
        if arm.diverged and not arm.averaged and not any(run.last_step for run in arm.diverged)
    ]
    if silent:
        sentences.append(f"No curve: {format_list(silent)} diverged before anything was recorded.")
    if "seconds" in plots and any(len(arm.averaged) > 1 for arm in study.arms):
        sentences.append("Against seconds, each step is drawn at its average time over the seeds.")
    return join_sentences(*sentences)
