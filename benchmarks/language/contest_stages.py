"""The stages of the language contest: which runs each needs, and what follows from them.

Settings are chosen on the validation set, before any run of the test stage.
"""

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.common.coordinates import Point
from benchmarks.common.ledger import Ledger, MissingRunError, Run, Runner
from benchmarks.language.finalists import Finalists, Length, read_finalists, write_finalists
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import RunKey, read_loss
from benchmarks.language.search_space import (
    ORDER,
    RECIPE,
    choose_start,
    find_point,
    get_grids,
    search_setting,
)

RESULTS = Path("results/language/contest.jsonl")
DATA = "text:mdn.txt.xz,dotnet.txt.xz,sql.txt.xz"
TESTS = ("test", "saving", "124m")  # what the finalists are trained for
STAGES = ("screen", "tune", *TESTS)
OURS = RECIPE
MUON = ("muon", "muon original", "muon by norm")
OUR_OTHERS = ("diagonal", "paper")
OTHERS = ("normuon", "soap", "adamw", "schedule-free", *OUR_OTHERS)
ROWS = "normuon by norm"  # what NorMuon adds to Muon, on top of Muon's best setting
LENGTHS = {65_536: 800, 262_144: 200, 1_048_576: 50}  # tokens per step: steps
MIDDLE = 262_144
LONGER = (MIDDLE, 400)
TESTED_FIRST = (MIDDLE, 1_048_576, 65_536)  # the goal asks for a lead at the first two
POWER = 0.7  # of the cooldown, where searches start: it suits the recipe and Muon better than 1
SLOW_SHARE = 0.6  # of slow momentum, where our search starts; leads.py found it
COORDINATES = (*ORDER, "slow")
# Of each searched arm at a batch size, whatever its number of coordinates; all its runs there
# count. Enough to try every value beside the best setting again after the last coordinate moved.
RUNS = {65_536: 42, MIDDLE: 44, 1_048_576: 56}
RUNS_OF_RATE = 4  # where the learning rate alone moves: at twice the length, and of ROWS at first
# Then the other coordinates of ROWS move, where the goal asks for a lead: a peer that is tuned too
# little proves nothing. It begins at Muon's best, so a dozen runs reach every value beside that.
RUNS_OF_ROWS = {(batch, LENGTHS[batch]): 16 for batch in TESTED_FIRST[:2]}
# Not among the seeds that have chosen the recipe's numbers and its options.
SEEDS, SEEDS_OF_OTHERS = range(101, 111), range(101, 106)
SHARES = (0.80, 0.85, 0.90, 0.95)


class LanguageContest:
    """The runs of each stage, and what follows from them."""

    def __init__(self, ledger: Ledger[RunKey], runner: Runner[RunKey]) -> None:
        self.ledger, self._runner = ledger, runner
        self._finalists_path = ledger.path.with_name(f"{ledger.path.stem}-finalists.json")
        self.finalists: dict[Length, Finalists] = read_finalists(self._finalists_path)

    @classmethod
    def read(cls, path: Path) -> "LanguageContest":
        """The contest as far as the runs in a file go; it trains nothing."""
        ledger = Ledger(path, RunKey)
        return cls(ledger, Runner(ledger, _refuse))

    def make_key(self, stage: str, batch: int, steps: int, setting: Setting, seed: int) -> RunKey:
        return RunKey(stage, "gpt:small", 256, batch, steps, setting, seed)

    def run(self, stage: str) -> None:
        """Train what a stage lacks, the searches first: nothing is tested before they have ended.

        MissingRunError if the time is up.
        """
        if stage != "screen":
            self.run("screen" if stage == "tune" else "tune")
        if stage == "screen":
            for arm in _shuffle((OURS, *MUON, *OTHERS)):
                self._screen(arm)
        elif stage == "tune":
            self._tune()
        else:
            self._freeze_finalists()
            keys = self.list_keys(stage)
            for key in keys:
                self._runner.run(key)
            for key in keys:  # another process may be on it still
                self._runner.finish(key)

    def list_keys(self, stage: str) -> list[RunKey]:
        """The runs of a stage after the searches, as they follow each other."""
        lists = {"test": self._list_tests, "saving": self._list_savings, "124m": self.list_larger}
        return list(lists[stage]())

    def _tune(self) -> None:
        # Processes start together, or leave the screening together. So they know the same runs
        # here, and make the same choices.
        known = set(self.ledger.runs)
        middle = MIDDLE, LENGTHS[MIDDLE]
        first = [(arm, middle) for arm in self.list_tuned()]
        others = [length for length in (*LENGTHS.items(), LONGER) if length != middle]
        rest = list(itertools.product((OURS, self.find_muon()), others))
        # What has begun need not wait for the middle batch, whose best is where others start. At
        # twice the length the learning rate alone moves, so what the middle batch finds matters.
        begun = [each for each in rest if each[1] != LONGER and self._has_runs(*each, known)]
        for arm, length in _shuffle(first + begun):
            self._continue_search(arm, length, known, RUNS[length[0]])
        for arm, length in _shuffle(search for search in rest if search not in begun):
            if length == LONGER:
                self._search_rate(arm, length, self._find_middle_point(arm), known)
            else:
                self._continue_search(arm, length, known, RUNS[length[0]])
        for length in _shuffle((*LENGTHS.items(), LONGER)):
            self._try_rows(length, known)

    def _freeze_finalists(self) -> None:
        if not self.finalists:
            chosen = {
                length: self._choose_finalists(*length) for length in (*LENGTHS.items(), LONGER)
            }
            write_finalists(self._finalists_path, chosen, self.ledger.origin)
            self.finalists = read_finalists(self._finalists_path)

    def _choose_finalists(self, batch: int, steps: int) -> Finalists:
        peer = self.find_peer(batch, steps)
        settings = {arm: tuple(self.list_finalists(arm, batch, steps)) for arm in (OURS, peer)}
        if (batch, steps) == (MIDDLE, LENGTHS[MIDDLE]):
            for arm in self.list_others():  # the test is descriptive, except for the best of them
                settings.setdefault(arm, (self.rank_settings(arm, batch, steps)[0],))
        return Finalists(peer, settings)

    def find_muon(self) -> str:
        """The scaling of Muon with the best run; only the best in the screening gets more runs."""
        return min(MUON, key=self._screened)

    def find_other(self) -> str:
        """The best peer that is not Muon, in the same way."""
        return min((arm for arm in OTHERS if arm not in OUR_OTHERS), key=self._screened)

    def list_others(self) -> tuple[str, ...]:
        """All that are tested beside the recipe; of Muon's three scalings, the best."""
        return self.find_muon(), ROWS, *OTHERS

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
            for key, run in self.ledger.runs.items()
            if key.stage == "tune"
            and (key.setting.arm, key.tokens_per_step, key.steps) == (arm, batch, steps)
            and (known is None or key in known)
        }
        if not found:
            raise MissingRunError(f"{arm} at {batch} tokens per step")
        return sorted(found, key=lambda setting: found[setting])

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

    def list_finalists(self, arm: str, batch: int, steps: int) -> list[Setting]:
        """The settings that are tested: the two best, and one where the test is descriptive."""
        if frozen := self.finalists.get((batch, steps)):
            return list(frozen.settings[arm])
        return self.rank_settings(arm, batch, steps)[: 1 if (batch, steps) == LONGER else 2]

    def find_peer(self, batch: int, steps: int) -> str:
        """The peer with the lowest validation loss at a batch, chosen before any test."""
        if frozen := self.finalists.get((batch, steps)):
            return frozen.peer
        losses = {}
        for arm in (self.find_muon(), self.find_other(), ROWS):
            with contextlib.suppress(MissingRunError):  # not searched here
                losses[arm] = self.find_best_loss(arm, batch, steps)
        if not losses:
            raise MissingRunError(f"peers at {batch} tokens per step")
        return min(losses, key=lambda arm: losses[arm])

    def find_losses(self, stage: str, batch: int, steps: int, setting: Setting) -> dict[int, float]:
        """The losses of a setting by seed; that of a run that diverged is infinite."""
        runs = self.ledger.find_seeds(self.make_key(stage, batch, steps, setting, 0))
        return {seed: read_loss(run) for seed, run in runs.items()}

    def find_training_losses(
        self, stage: str, batch: int, steps: int, setting: Setting
    ) -> list[float]:
        """The training losses of the runs that did not diverge."""
        runs = self.ledger.find_seeds(self.make_key(stage, batch, steps, setting, 0))
        found = [run["train_loss"] for run in runs.values() if run["loss"] is not None]
        return [float(loss) for loss in found if loss is not None]

    def find_best_loss(self, arm: str, batch: int, steps: int) -> float:
        """The lowest validation loss of an arm; MissingRunError without any run."""
        best = self.rank_settings(arm, batch, steps)[0]
        return read_loss(self.ledger.find(self.make_key("tune", batch, steps, best, 0)))

    def list_larger(self) -> list[RunKey]:
        """Ours and the best peer at GPT-2's width and depth, with the small network's settings."""
        steps = LENGTHS[MIDDLE]
        arms = OURS, self.find_peer(MIDDLE, steps)
        best = [self.list_finalists(arm, MIDDLE, steps)[0] for arm in arms]
        keys = [self.make_key("124m", MIDDLE, steps, setting, SEEDS[0]) for setting in best]
        return [replace(key, model="gpt:124m") for key in keys]

    def _screened(self, arm: str) -> float:
        return self.find_best_loss(arm, MIDDLE, LENGTHS[MIDDLE])

    def _screen(self, arm: str) -> None:
        start = choose_start(arm)
        start = {**start, "power": POWER} if "power" in start else start
        start = {**start, "slow": SLOW_SHARE} if arm == OURS else start
        steps = LENGTHS[MIDDLE]
        make_key = functools.partial(self._make_tuning_key, MIDDLE, steps)
        search_setting(self._runner, arm, make_key, ("lr",), start=start, steps=steps)

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
            functools.partial(self._make_tuning_key, batch, steps),
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
            found = {*known, *(self._make_tuning_key(*length, setting) for setting in rates)}
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

        def make_key(setting: Setting) -> RunKey:
            tried.add(setting)
            return self._make_tuning_key(batch, steps, setting)

        search_setting(
            self._runner,
            arm,
            make_key,
            ("lr",),
            RUNS_OF_RATE,
            start=start,
            steps=steps,
            fine=True,
            tried=around,
        )
        return tried

    def _make_tuning_key(self, batch: int, steps: int, setting: Setting) -> RunKey:
        return self.make_key("tune", batch, steps, setting, 0)

    def _list_tests(self) -> Iterator[RunKey]:
        """Seed by seed, so that a stage that is interrupted leaves complete pairs.

        What the verdicts are about comes first, then what is descriptive.
        """
        lengths = [(batch, LENGTHS[batch]) for batch in TESTED_FIRST]
        for length in (*lengths, LONGER):
            arms = OURS, self.find_peer(*length)
            settings = [s for arm in arms for s in self.list_finalists(arm, *length)]
            seeds = SEEDS_OF_OTHERS if length == LONGER else SEEDS
            yield from self._list_seeds("test", length, settings, seeds)
        middle = MIDDLE, LENGTHS[MIDDLE]
        learning = (arm for arm in self.list_others() if self._screened(arm) < math.inf)
        others = [self.list_finalists(arm, *middle)[0] for arm in learning]
        yield from self._list_seeds("test", middle, others, SEEDS_OF_OTHERS)

    def _list_savings(self) -> Iterator[RunKey]:
        """In the same order; at each seed all lengths."""
        for batch in TESTED_FIRST:
            steps = LENGTHS[batch]
            best = self.list_finalists(OURS, batch, steps)[0]
            for key in self._list_seeds("saving", (batch, steps), [best], SEEDS_OF_OTHERS):
                for share in SHARES:
                    yield replace(key, steps=round(share * steps))

    def _list_seeds(
        self, stage: str, length: Length, settings: Iterable[Setting], seeds: Iterable[int]
    ) -> Iterator[RunKey]:
        for seed, setting in itertools.product(seeds, settings):
            yield self.make_key(stage, *length, setting, seed)


T = TypeVar("T")


def _shuffle(searches: Iterable[T]) -> list[T]:
    """In another order in each process, so that processes are on different searches."""
    found = list(searches)
    random.Random().shuffle(found)
    return found


def _refuse(key: RunKey) -> Run:
    raise MissingRunError(key)
