"""The contest's plots: loss against steps, and steps to equal loss against batch size.

Loss is that of training at the middle batch, averaged over the tested seeds. Steps to equal loss
have bootstrap intervals of 95 %. What the runs do not allow yet is left out.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.labels import spread_labels
from benchmarks.common.ledger import MissingRunError
from benchmarks.language.contest_rules import LENGTHS, MIDDLE, OURS, make_key
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_tables import NAMES
from benchmarks.language.contest_verdicts import Verdict, find_verdicts
from neumann.lab.report.palette import ARMS, GRID, INK, MUTED

LOSS, SAVING = "contest-loss.png", "contest-saving.png"
SHOWN_FROM = 0.1  # of the run: before that the loss falls too far for one scale
LABEL_GAP = 0.05  # of the height, between labels

Curve = tuple[
    str, "np.ndarray[tuple[int], np.dtype[np.float64]]", float
]  # name, losses, at the end


def draw_all(contest: LanguageContest, folder: Path) -> list[Path]:
    """Draw what the runs so far allow; the files that were written."""
    figures = {}
    if curves := collect_curves(contest):
        figures[folder / LOSS] = draw_losses(curves)
    if verdicts := collect_savings(contest):
        figures[folder / SAVING] = draw_savings(verdicts)
    for path, figure in figures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=160)
    return list(figures)


def show_plots(contest: LanguageContest, folder: str) -> str:
    """The plots in Markdown, with alternative text and captions; empty if there are none yet."""
    parts = []
    if curves := collect_curves(contest):
        ends = ", ".join(f"{NAMES[arm]} {final:.3f}" for arm, _, final in curves)
        alt = f"Training loss falls over {LENGTHS[MIDDLE]} steps of {MIDDLE:,} tokens. "
        alt += f"Test losses at the end: {ends}"
        caption = (
            f"*Training loss against steps at {MIDDLE:,} tokens per step, the best setting of "
        )
        caption += "each on the validation set, mean over its tested seeds. Next to each name is "
        caption += "its test loss.*"
        parts += [f"![{alt}]({folder}/{LOSS})", caption]
    if verdicts := collect_savings(contest):
        needed = ", ".join(
            f"{100 * (1 - v.saving.middle):.0f} % at {v.batch:,} tokens per step"
            for v in verdicts
            if v.saving is not None
        )
        alt = f"{NAMES[OURS]} needs these shares of the best peer's steps for its loss: {needed}"
        caption = (
            "*Steps to the test loss of the best peer, in % of the peer's, against batch size, "
        )
        caption += "with bootstrap intervals of 95 %. Below 100 %, steps are saved.*"
        parts += [f"![{alt}]({folder}/{SAVING})", caption]
    return "\n\n".join(parts)


def collect_savings(contest: LanguageContest) -> list[Verdict]:
    """The batch sizes at which the saving is known."""
    return [v for v in find_verdicts(contest) if v.primary and v.saving is not None]


def collect_curves(contest: LanguageContest) -> list[Curve]:
    """Ours, the best peer and AdamW at the middle batch: training losses and test losses.

    AdamW is tested last. Without it there are two curves; without one of the others there is none.
    """
    steps = LENGTHS[MIDDLE]
    curves = []
    try:
        compared = OURS, contest.find_peer(MIDDLE, steps)
        for arm in dict.fromkeys((*compared, "adamw")):
            best = contest.list_finalists(arm, MIDDLE, steps)[0]
            runs = contest.ledger.find_seeds(make_key("test", MIDDLE, steps, best, 0))
            found = [run for run in runs.values() if run["loss"] is not None]
            if found:
                losses = np.array([run["losses"] for run in found], float).mean(0)  # None: NaN
                curves.append((arm, losses, float(np.mean([run["loss"] for run in found]))))
    except MissingRunError:
        return []
    return curves if {arm for arm, _, _ in curves} >= set(compared) else []


def draw_losses(curves: Sequence[Curve]) -> Figure:
    """Training loss against steps, each line named at its end with its test loss."""
    steps = LENGTHS[MIDDLE]
    stride = max(1, steps // 50)  # as `language_runs` records them
    figure, axes = _make_figure(
        f"Training loss at {MIDDLE:,} tokens per step (names: test loss), nats per token"
    )
    ends = []
    for index, (arm, losses, final) in enumerate(curves):
        places = stride * np.arange(len(losses)) + 1
        shown = places >= SHOWN_FROM * steps
        color = ARMS[index][0]
        axes.plot(places[shown], losses[shown], color=color, linewidth=2.4 if arm == OURS else 1.4)
        ends.append((float(losses[-1]), f"{NAMES[arm]}: {final:.3f}", color))
    last = stride * (len(curves[0][1]) - 1) + 1
    bottom, top = axes.get_ylim()
    heights = spread_labels([height for height, _, _ in ends], LABEL_GAP * (top - bottom))
    for (height, text, color), placed in zip(ends, heights, strict=True):
        axes.annotate(
            text,
            (last, height),
            (1.03 * steps, placed),
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6},
        )
    axes.set_xlim(0, 1.02 * steps)
    axes.set_xlabel("steps", color=INK)
    return figure


def draw_savings(verdicts: Sequence[Verdict]) -> Figure:
    """Our steps to the peer's loss, in % of the peer's, against batch size."""
    figure, axes = _make_figure("Steps to the loss of the best peer, % of its steps")
    batches = [verdict.batch for verdict in verdicts]
    savings = [v.saving for v in verdicts if v.saving is not None]
    needed = [100 * (1 - saving.middle) for saving in savings]
    low = [100 * (saving.high - saving.middle) for saving in savings]
    high = [100 * (saving.middle - saving.low) for saving in savings]
    color = ARMS[0][0]
    axes.axhline(100, color=MUTED, linewidth=1.4)
    axes.errorbar(
        batches, needed, yerr=[low, high], color=color, marker="o", linewidth=2.4, capsize=3
    )
    for index, verdict in enumerate(verdicts):
        percent = needed[index]
        rise = needed[min(index + 1, len(needed) - 1)] - needed[max(index - 1, 0)]
        side = "right" if rise < -1 else "left" if rise > 1 else "center"  # away from the line
        text = f"{percent / 100 * verdict.steps:.0f} of {verdict.steps} steps"
        text += " or fewer" if savings[index].high >= savings[index].longest else ""
        _write(axes, text, (verdict.batch, percent - low[index]), (0, -7), color, side, "top")
        _write(axes, NAMES[verdict.peer], (verdict.batch, 100), (0, 5), MUTED)
    _write(axes, NAMES[OURS], (batches[-1], needed[-1]), (9, 0), color, ha="left", va="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set_xlim(batches[0] / 2.2, batches[-1] * 2.4)
    tops = [each + more for each, more in zip(needed, high, strict=True)]
    axes.set_ylim(min(78.0, min(needed) - max(low) - 4), max(103.0, max(tops) + 2))
    axes.set_xlabel("tokens per step", color=INK)
    return figure


def _write(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    color: str,
    ha: str = "center",
    va: str = "baseline",
) -> None:
    """A label beside a point."""
    axes.annotate(text, point, offset, textcoords="offset points", color=color, ha=ha, va=va)


def _make_figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, color=INK, loc="left")
    axes.grid(color=GRID)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
