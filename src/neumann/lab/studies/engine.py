"""A study: arms with their settings at every point of some axes, tuned, then tested over seeds.

It is what `compare`, `sweep` and `study` run. A comparison is a study without axes and tuning, a
sweep one with tuning. Each point of the axes has a folder, which is that of a comparison, or of a
sweep if its learning rates are tuned there. Without axes it is the folder of the study itself.

    study.json       the title, the axes, and the folder of each point
    batch_size=512/  a comparison or a sweep, whose reports show all about one point

The search of all points trains first, then the test; runs of different points train side by side.
Called again, a study continues. More points, arms and seeds can be added; any other change is a
UsageError, as for comparisons and sweeps.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neumann.lab.config import TrainConfig
from neumann.lab.storage.reading import CONFIG, is_finished, read_summary
from neumann.lab.studies import study_files
from neumann.lab.studies.comparison import Session, check_trainable, plan_runs, run_comparisons
from neumann.lab.studies.lr_sweep import (
    ArmSearch,
    SearchPlan,
    find_winners,
    make_final_config,
    search_all,
)
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.settings import CompareConfig, SweepConfig
from neumann.lab.studies.study_files import (
    COMPARISON,
    FINAL,
    SEARCH,
    STUDY,
    SWEEP,
    get_part_folder,
    lock_folder,
    write_object,
)
from neumann.lab.studies.workers import get_output_folder

Found = Mapping[Path, list[ArmSearch]]  # what was chosen, by the folder of a sweep


@dataclass(frozen=True)
class Point:
    """A point on the axes, and what is compared there."""

    folder: Path
    config: CompareConfig | SweepConfig
    values: Mapping[str, Any] = field(default_factory=dict)  # by axis
    tuned_at: Path | None = None  # the folder of the point that it takes learning rates from
    factor: float = 1.0  # on those learning rates

    @property
    def is_tuned(self) -> bool:
        """Whether learning rates are tried at this point."""
        return isinstance(self.config, SweepConfig) and self.tuned_at is None


@dataclass(frozen=True)
class PlannedRun:
    stage: str  # "search", "final", or empty without tuning
    arm: str  # with the point that it is at
    seed: int
    config: TrainConfig
    lr_is_known: bool = True  # False: it will be the chosen one

    @property
    def state(self) -> str:
        folder = get_output_folder(self.config)
        if not is_finished(folder):
            return "started" if (folder / CONFIG).exists() else "to do"
        return "diverged" if "diverged" in (read_summary(folder) or {}) else "finished"


@dataclass(frozen=True)
class Study:
    folder: Path
    points: tuple[Point, ...]
    title: str = ""
    about: str = ""
    axes: Mapping[str, list[Any]] = field(default_factory=dict)
    seconds: float | None = None  # after which no run starts

    @staticmethod
    def of(config: CompareConfig | SweepConfig, folder: Path) -> "Study":
        """The study of a single comparison or sweep."""
        return Study(folder, (Point(folder, config),), seconds=config.seconds)

    @property
    def sweeps(self) -> dict[Path, SweepConfig]:
        """The points where learning rates are tried, by folder."""
        return {
            point.folder: point.config
            for point in self.points
            if isinstance(point.config, SweepConfig) and point.is_tuned
        }

    def search(self, session: Session) -> Found:
        """Choose the learning rates on held-out data; nothing to do without tuning."""
        if not self.sweeps:
            return {}
        return search_all(self.sweeps, self.folder, session)

    def test(self, found: Found, session: Session) -> list[Comparison]:
        """Compare the arms at every point, over all seeds."""
        parts = self.list_tests(found)
        data = None if found else check_trainable(parts)
        with ExitStack() as stack:
            for folder in {self.folder, *self.sweeps} - parts.keys():
                stack.enter_context(lock_folder(folder))
            return run_comparisons(parts, self.folder, session, data)

    def list_tests(self, found: Found) -> dict[Path, CompareConfig]:
        """List the comparisons on the test set, by folder."""
        parts: dict[Path, CompareConfig] = {}
        for point in self.points:
            if isinstance(point.config, CompareConfig):
                parts[point.folder] = point.config
                continue
            chosen = found[point.tuned_at or point.folder]
            part = get_part_folder(point.folder, FINAL) if point.is_tuned else point.folder
            parts[part] = make_final_config(point.config, chosen, point.factor)
        return parts

    def check(self) -> None:
        """Raise a UsageError for what cannot work, before anything is written."""
        check_trainable(self.check_folders())

    def check_folders(self) -> dict[Path, CompareConfig]:
        """Raise a UsageError if the folders hold something else; return what will be tested."""
        kind = STUDY if self.axes else SWEEP if self.sweeps else COMPARISON
        study_files.check_no_other_study(self.folder, kind)
        for folder, config in self.sweeps.items():
            SearchPlan.make(config).check_folder(folder)
        tests = self.list_tests(self._find_winners())
        for folder, comparison in tests.items():
            study_files.check_comparison_folder(folder, comparison)
        return tests

    def write(self) -> None:
        """Write study.json, which reports are made from."""
        points = [
            {"folder": str(point.folder.relative_to(self.folder)), "values": dict(point.values)}
            for point in self.points
        ]
        content = {"title": self.title, "about": self.about, "axes": self.axes, "points": points}
        write_object(self.folder / STUDY, content)

    def list_runs(self) -> list[PlannedRun]:
        """List all runs; the learning rates of the test may be unknown."""
        listed: list[PlannedRun] = []
        if self.sweeps:
            trials = {
                get_part_folder(folder, SEARCH): SearchPlan.make(config).make_trials()
                for folder, config in self.sweeps.items()
            }
            runs = plan_runs(trials, self.folder)
            listed += [PlannedRun(SEARCH, *key, run) for key, run in runs.items()]
        found = self._find_winners()
        known = all(study_files.has_winners(folder) for folder in self.sweeps)
        stage = FINAL if self.sweeps else ""
        runs = plan_runs(self.list_tests(found), self.folder)
        return listed + [PlannedRun(stage, *key, run, known) for key, run in runs.items()]

    def _find_winners(self) -> Found:
        return {folder: find_winners(config, folder) for folder, config in self.sweeps.items()}
