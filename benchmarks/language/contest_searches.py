"""The searches of the language contest: they choose settings on the validation set.

First every arm is screened over its learning rate, then the best ones are tuned. Several processes
may share the runs.
"""

import functools
import itertools
import random
from collections.abc import Collection, Iterable
from typing import TypeVar

from benchmarks.common.coordinates import Point
from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language.contest_rules import (
    COORDINATES,
    LENGTHS,
    LONGER,
    MIDDLE,
    MUON,
    OTHERS,
    OUR_OTHERS,
    OURS,
    POWER,
    ROWS,
    RUNS,
    RUNS_OF_RATE,
    RUNS_OF_ROWS,
    SLOW_SHARE,
    make_key,
)
from benchmarks.language.finalists import Length
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import RunKey, read_loss
from benchmarks.language.search_space import choose_start, find_point, get_grids, search_setting


class Searches:
    """The runs that choose settings, and what they have found so far."""

    def __init__(self, ledger: Ledger[RunKey], runner: Runner[RunKey]) -> None:
        self._ledger, self._runner = ledger, runner

    def screen(self) -> None:
        """Train every arm over its learning rate; MissingRunError if the time is up."""
        for arm in _shuffle((OURS, *MUON, *OTHERS)):
            self._screen(arm)

    def tune(self) -> None:
        """Search ours, Muon and the best other peer; MissingRunError if the time is up."""
        # Processes start together, or leave the screening together. So they know the same runs
        # here, and make the same choices.
        known = set(self._ledger.runs)
        middle = MIDDLE, LENGTHS[MIDDLE]
        first = [(arm, middle) for arm in self.list_tuned()]
        others = [length for length in LENGTHS.items() if length != middle]
        rest = list(itertools.product((OURS, self.find_muon()), others))
        # What has begun need not wait for the middle batch, whose best is where others start.
        begun = [each for each in rest if self._has_runs(*each, known)]
        for arm, length in _shuffle(first + begun):
            self._continue_search(arm, length, known, RUNS[length[0]])
        for arm, length in _shuffle(search for search in rest if search not in begun):
            self._continue_search(arm, length, known, RUNS[length[0]])
        for length in _shuffle(LENGTHS.items()):
            self._try_rows(length, known)
        for arm in _shuffle((OURS, ROWS)):  # ROWS stands for Muon here
            self._search_rate(arm, LONGER, self._find_middle_point(arm), known)

    def find_muon(self) -> str:
        """The scaling of Muon with the best run; only the best in the screening gets more runs."""
        return min(MUON, key=self._screened)

    def find_other(self) -> str:
        """The best peer that is not Muon, in the same way."""
        return min((arm for arm in OTHERS if arm not in OUR_OTHERS), key=self._screened)

    def list_tuned(self) -> tuple[str, ...]:
        """The arms that get a whole search; MissingRunError before the screening."""
        return OURS, self.find_muon(), self.find_other()

    def rank_settings(
        self, arm: str, batch: int, steps: int, known: Collection[RunKey] | None = None
    ) -> list[Setting]:
        """The settings of an arm by their validation loss, those that diverged last.

        MissingRunError without any. With `known`, they come from these runs alone.
        """
        found = {
            key.setting: read_loss(run)
            for key, run in self._ledger.runs.items()
            if key.stage == "tune"
            and (key.setting.arm, key.tokens_per_step, key.steps) == (arm, batch, steps)
            and (known is None or key in known)
        }
        if not found:
            raise MissingRunError(f"{arm} at {batch} tokens per step")
        return sorted(found, key=lambda setting: found[setting])

    def find_best_loss(self, arm: str, batch: int, steps: int) -> float:
        """The lowest validation loss of an arm; MissingRunError without any run."""
        best = self.rank_settings(arm, batch, steps)[0]
        return read_loss(self._ledger.find(make_key("tune", batch, steps, best, 0)))

    def find_unbracketed(
        self,
        arm: str,
        batch: int,
        steps: int,
        known: Collection[RunKey] | None = None,
        *,
        anywhere: bool = False,
    ) -> list[str]:
        """The tuned coordinates whose next values beside the best setting were not all tried.

        All that were tried are worse. 0 needs none below it.

        Args:
            arm: whose search to look at.
            batch: tokens per step.
            steps: of a run.
            known: the runs to look at; all by default.
            anywhere: whether it is enough that the best value beat the next ones at any setting,
                as it did if another coordinate moved afterwards.
        """
        try:
            searched = arm in self.list_tuned()
        except MissingRunError:
            searched = False  # the screening is not complete
        ranked = self.rank_settings(arm, batch, steps, known)
        fine = searched or arm == ROWS
        points = [find_point(setting, steps, fine=fine) for setting in ranked]  # best first
        grids = get_grids(arm, fine=fine)
        order = COORDINATES if fine and (batch, steps) != LONGER else ("lr",)

        def is_bracketed(name: str, place: int) -> bool:
            grid, point = grids[name], points[place]
            index = grid.index(point[name])
            worse = points[place + 1 :]
            below, above = grid[:index][-1:], grid[index + 1 :][:1]  # empty at an edge
            return all(
                value and {**point, name: value[0]} in worse
                for value in ((above,) if point[name] == 0 else (below, above))
            )

        unbracketed = []
        for name in (name for name in order if name in points[0]):
            places = [i for i, point in enumerate(points) if point[name] == points[0][name]]
            if not any(is_bracketed(name, place) for place in (places if anywhere else places[:1])):
                unbracketed.append(name)
        return unbracketed

    def _screened(self, arm: str) -> float:
        return self.find_best_loss(arm, MIDDLE, LENGTHS[MIDDLE])

    def _screen(self, arm: str) -> None:
        start = choose_start(arm)
        start = {**start, "power": POWER} if "power" in start else start
        start = {**start, "slow": SLOW_SHARE} if arm == OURS else start
        steps = LENGTHS[MIDDLE]
        make = functools.partial(_make_tuning_key, MIDDLE, steps)
        search_setting(self._runner, arm, make, ("lr",), start=start, steps=steps)

    def _has_runs(self, arm: str, length: Length, known: Collection[RunKey]) -> bool:
        try:
            return bool(self.rank_settings(arm, *length, known))
        except MissingRunError:
            return False

    def _find_middle_point(self, arm: str) -> Point:
        """The best one of the middle batch, where the other searches start."""
        steps = LENGTHS[MIDDLE]
        return find_point(self.rank_settings(arm, MIDDLE, steps)[0], steps, fine=True)

    def _continue_search(
        self, arm: str, length: Length, known: Collection[RunKey], limit: int
    ) -> None:
        """From the best setting among the known runs; without any, from the middle batch's best.

        Coordinates that were never bracketed come first: a search that is interrupted often would
        not get to the last ones.
        """
        try:
            tried = self.rank_settings(arm, *length, known)
            start = find_point(tried[0], length[1], fine=True)
            neglected = self.find_unbracketed(arm, *length, known, anywhere=True)
        except MissingRunError:
            tried, neglected, start = [], [], self._find_middle_point(arm)
        batch, steps = length
        search_setting(
            self._runner,
            arm,
            functools.partial(_make_tuning_key, batch, steps),
            sorted(COORDINATES, key=lambda x: x not in neglected),
            limit,
            start=start,
            steps=steps,
            fine=True,
            tried=tried,
        )

    def _try_rows(self, length: Length, known: Collection[RunKey]) -> None:
        """Muon's best setting with NorMuon's rows of equal size, then a search from there.

        The scaling of steps matters more than the rows, and NorMuon has another one.
        """
        best = self.rank_settings(self.find_muon(), *length)[0]
        rates = self._search_rate(ROWS, length, find_point(best, length[1], fine=True), known)
        if length in RUNS_OF_ROWS:
            found = {*known, *(_make_tuning_key(*length, setting) for setting in rates)}
            self._continue_search(ROWS, length, found, RUNS_OF_ROWS[length])

    def _search_rate(
        self, arm: str, length: Length, start: Point, known: Collection[RunKey]
    ) -> set[Setting]:
        """Learning rates around a point; the settings with all that were tried.

        Runs around what was the best point before stay apart.
        """
        batch, steps = length

        def is_around(setting: Setting) -> bool:
            return {**find_point(setting, steps, fine=True), "lr": start["lr"]} == start

        begun = self._has_runs(arm, length, known)
        ranked = self.rank_settings(arm, *length, known) if begun else []
        around = list(filter(is_around, ranked))
        tried = set(around)

        def make_tried(setting: Setting) -> RunKey:
            tried.add(setting)
            return _make_tuning_key(batch, steps, setting)

        search_setting(
            self._runner,
            arm,
            make_tried,
            ("lr",),
            RUNS_OF_RATE,
            start=start,
            steps=steps,
            fine=True,
            tried=around,
        )
        return tried


T = TypeVar("T")


def _shuffle(searches: Iterable[T]) -> list[T]:
    """In another order in each process, so that processes are on different searches."""
    found = list(searches)
    random.Random().shuffle(found)
    return found


def _make_tuning_key(batch: int, steps: int, setting: Setting) -> RunKey:
    return make_key("tune", batch, steps, setting, 0)
