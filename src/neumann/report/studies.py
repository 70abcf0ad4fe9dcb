"""What a folder holds: one run, a comparison or a sweep, each readable at any moment.

sweep.json     the grid of learning rates by arm, the winners (null while searching), the seeds
search/        a comparison of held-out runs: every arm at every learning rate of its grid
final/         the comparison of the winners on the test set, once they are known

Any other folder is a UsageError, and so is one whose file this version did not write.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neumann.lab.comparison import (
    COMPARISON,
    SWEEP,
    Comparison,
    is_comparison,
    run_folder,
    warmup_note,
)
from neumann.lab.comparison import read as read_comparison
from neumann.lab.errors import UsageError
from neumann.lab.reading import CONFIG, read_object
from neumann.report.curves import ArmRuns
from neumann.report.runs import is_run, number, read_run
from neumann.report.sensitivity import Sensitivity, of_comparison, without_lr

SEARCH, FINAL = "search", "final"
FORMAT = 1  # of sweep.json


@dataclass(frozen=True)
class Search:
    """How far a sweep's search has come."""

    winners: dict[str, float] | None  # lr by arm; None while searching
    missing: int  # trainings of the search that have not ended
    trainings: int  # wanted of the search
    final_missing: int  # trainings of the test of the winners that have not ended
    final_trainings: int
    warmups: tuple[str, ...] = ()  # sentences about arms that only warmed up


@dataclass(frozen=True)
class Study:
    """All that a report is made of."""

    name: str  # of the folder
    arms: tuple[ArmRuns, ...]  # whose curves are drawn
    comparison: Comparison | None  # None for one run, and for a sweep before its test
    settings: dict[str, Any]  # of the first run: what all share is the same in each
    sensitivities: tuple[Sensitivity, ...] = ()
    search: Search | None = None  # of a sweep

    @property
    def target(self) -> float | None:
        """%, the accuracy whose first time was noted."""
        if self.comparison is not None:
            return self.comparison.target
        target = self.settings.get("target")
        return target if isinstance(target, int | float) else None


def read_study(folder: Path) -> Study:
    """What the folder holds."""
    folder = Path(folder)
    if (folder / SWEEP).is_file():
        return _sweep(folder)
    if is_comparison(folder):
        comparison, settings = _comparison(folder)
        found = of_comparison(comparison, settings.get("lr"))
        arms = _arms(folder, comparison)
        return Study(_name(folder), arms, comparison, _settings(arms) or settings, found)
    if is_run(folder):
        run = read_run(folder)
        arm = ArmRuns(str(run.config.get("opt", "run")), 0, (run,))
        return Study(_name(folder), (arm,), None, run.config)
    raise UsageError(
        f"{folder} holds nothing to report: a run has a {CONFIG}, a comparison a {COMPARISON}, "
        f"a sweep a {SWEEP}"
    )


def _sweep(folder: Path) -> Study:
    path = folder / SWEEP
    content = read_object(path)
    grid, winners = content.get("grid"), content.get("winners")
    if (
        content.get("format") != FORMAT
        or not isinstance(grid, dict)
        or not isinstance(winners, dict | None)
    ):
        raise UsageError(f"{path} is not a sweep that this version wrote")
    chosen = None
    if winners is not None:
        chosen = {without_lr(arm): number(lr) for arm, lr in winners.items()}
    order = [without_lr(arm) for arm in grid]
    sensitivities: tuple[Sensitivity, ...] = ()
    settings: dict[str, Any] = {}
    warmups: tuple[str, ...] = ()
    wanted = content.get("search_seeds", 0) * sum(len(lrs) for lrs in grid.values())
    missing = wanted
    if is_comparison(folder / SEARCH):
        searched, settings = _comparison(folder / SEARCH)
        sensitivities = tuple(
            replace(found, place=_place(order, found.arm))
            for found in of_comparison(searched, settings.get("lr"), chosen, least=1)
        )
        wanted, missing = searched.seeds * len(searched.rows), searched.missing
        steps = {without_lr(row.arm): row.warmup for row in searched.rows if row.warmup is not None}
        warmups = tuple(warmup_note(arm, count) for arm, count in steps.items())
    if not is_comparison(folder / FINAL):
        tested = content.get("seeds", 0) * len(grid if chosen is None else chosen)
        search = Search(chosen, missing, wanted, tested, tested, warmups)
        return Study(_name(folder), (), None, settings, sensitivities, search)
    final, settings = _comparison(folder / FINAL)
    arms = tuple(
        replace(arm, place=_place(order, without_lr(arm.name), arm.place))
        for arm in _arms(folder / FINAL, final)
    )
    tested = final.seeds * len(final.rows)
    search = Search(chosen, missing, wanted, final.missing, tested, warmups)
    return Study(_name(folder), arms, final, _settings(arms) or settings, sensitivities, search)


def _comparison(folder: Path) -> tuple[Comparison, dict[str, Any]]:
    path = folder / COMPARISON
    content = read_object(path)
    arms, seeds, target = (content.get(key) for key in ("arms", "seeds", "target"))
    sound = (
        isinstance(arms, list)
        and arms
        and all(isinstance(arm, str) for arm in arms)
        and isinstance(seeds, int)
        and (target is None or number(target) == target)
    )
    if not sound:
        raise UsageError(f"{path} is not a comparison that this version wrote")
    settings = content.get("settings")
    return read_comparison(folder), settings if isinstance(settings, dict) else {}


def _arms(folder: Path, comparison: Comparison) -> tuple[ArmRuns, ...]:
    found = []
    for place, row in enumerate(comparison.rows):
        folders = [run_folder(folder, row.arm, seed) for seed in range(comparison.seeds)]
        runs = tuple(read_run(each) for each in folders if is_run(each))
        found.append(ArmRuns(row.arm, place, runs))
    return tuple(found)


def _settings(arms: tuple[ArmRuns, ...]) -> dict[str, Any]:
    return next((run.config for arm in arms for run in arm.runs), {})


def _place(order: list[str], arm: str, otherwise: int = 0) -> int:
    return order.index(arm) if arm in order else otherwise


def _name(folder: Path) -> str:
    return folder.resolve().name
