"""The stages of the language contest: which runs each needs, and what follows from them.

Settings are chosen on the validation set (`contest_searches`), before any run of the test stage.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.common.ledger import Ledger, MissingRunError, Run, Runner
from benchmarks.language.contest_rules import (
    LENGTHS,
    LONGER,
    MIDDLE,
    OTHERS,
    OURS,
    ROWS,
    SEEDS,
    SEEDS_OF_OTHERS,
    SHARES,
    TESTED_FIRST,
    UNTESTED,
    make_key,
)
from benchmarks.language.contest_searches import Searches
from benchmarks.language.finalists import Finalists, Length, read_finalists, write_finalists
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import RunKey, read_loss

RESULTS = Path("results/language/contest.jsonl")
DATA = "text:mdn.txt.xz,dotnet.txt.xz,sql.txt.xz"
TESTS = ("test", "saving", "124m")  # what the finalists are trained for
STAGES = ("screen", "tune", *TESTS)


class LanguageContest:
    """The runs of each stage, and what follows from them."""

    def __init__(self, ledger: Ledger[RunKey], runner: Runner[RunKey]) -> None:
        self.ledger, self._runner = ledger, runner
        self.searches = Searches(ledger, runner)
        self._finalists_path = ledger.path.with_name(f"{ledger.path.stem}-finalists.json")
        self.finalists: dict[Length, Finalists] = read_finalists(self._finalists_path)

    @classmethod
    def read(cls, path: Path) -> "LanguageContest":
        """The contest as far as the runs in a file go; it trains nothing."""
        ledger = Ledger(path, RunKey)
        return cls(ledger, Runner(ledger, _refuse))

    def run(self, stage: str) -> None:
        """Train what a stage lacks, the searches first: nothing is tested before they have ended.

        MissingRunError if the time is up.
        """
        if stage != "screen":
            self.run("screen" if stage == "tune" else "tune")
        if stage == "screen":
            self.searches.screen()
        elif stage == "tune":
            self.searches.tune()
        else:
            self._freeze_finalists()
            while keys := [key for key in self.list_keys(stage) if key not in self.ledger.runs]:
                for key in keys:
                    self._runner.run(key)
                for key in keys:  # another process may be on it still
                    self._runner.finish(key)

    def list_keys(self, stage: str) -> list[RunKey]:
        """The runs of a stage after the searches, as they follow each other.

        Which lengths the saving needs is known only from longer ones, so that list may grow.
        """
        lists = {"test": self._list_tests, "saving": self._list_savings, "124m": self.list_larger}
        return list(lists[stage]())

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
                settings.setdefault(arm, (self.searches.rank_settings(arm, batch, steps)[0],))
        return Finalists(peer, settings)

    def list_others(self) -> tuple[str, ...]:
        """All that are tested beside the recipe; of Muon's three scalings, the best."""
        others = (arm for arm in OTHERS if arm not in UNTESTED)
        return self.searches.find_muon(), ROWS, *others

    def list_finalists(self, arm: str, batch: int, steps: int) -> list[Setting]:
        """The settings that are tested: the two best, and one where the test is descriptive."""
        if frozen := self.finalists.get((batch, steps)):
            return list(frozen.settings[arm])
        ranked = self.searches.rank_settings(arm, batch, steps)
        return ranked[: 1 if (batch, steps) == LONGER else 2]

    def find_peer(self, batch: int, steps: int) -> str:
        """The peer with the lowest validation loss at a batch, chosen before any test."""
        if frozen := self.finalists.get((batch, steps)):
            return frozen.peer
        losses = {}
        for arm in (self.searches.find_muon(), self.searches.find_other(), ROWS):
            with contextlib.suppress(MissingRunError):  # not searched here
                losses[arm] = self.searches.find_best_loss(arm, batch, steps)
        if not losses:
            raise MissingRunError(f"peers at {batch} tokens per step")
        return min(losses, key=lambda arm: losses[arm])

    def find_losses(self, stage: str, batch: int, steps: int, setting: Setting) -> dict[int, float]:
        """The losses of a setting by seed; that of a run that diverged is infinite."""
        runs = self.ledger.find_seeds(make_key(stage, batch, steps, setting, 0))
        return {seed: read_loss(run) for seed, run in runs.items()}

    def find_training_losses(
        self, stage: str, batch: int, steps: int, setting: Setting
    ) -> list[float]:
        """The training losses of the runs that did not diverge."""
        runs = self.ledger.find_seeds(make_key(stage, batch, steps, setting, 0))
        found = [run["train_loss"] for run in runs.values() if run["loss"] is not None]
        return [float(loss) for loss in found if loss is not None]

    def list_larger(self) -> list[RunKey]:
        """Ours and the best peer at GPT-2's width and depth, with the small network's settings."""
        steps = LENGTHS[MIDDLE]
        arms = OURS, self.find_peer(MIDDLE, steps)
        best = [self.list_finalists(arm, MIDDLE, steps)[0] for arm in arms]
        keys = [make_key("124m", MIDDLE, steps, setting, SEEDS[0]) for setting in best]
        return [replace(key, model="gpt:124m") for key in keys]

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
        find_best_loss = self.searches.find_best_loss
        learning = (arm for arm in self.list_others() if find_best_loss(arm, *middle) < math.inf)
        others = [self.list_finalists(arm, *middle)[0] for arm in learning]
        yield from self._list_seeds("test", middle, others, SEEDS_OF_OTHERS)

    def _list_savings(self) -> Iterator[RunKey]:
        """In the same order, from long to short, as far as the runs so far show a need."""
        for batch in TESTED_FIRST:
            for keys in self.list_shorter(batch):
                yield from keys

    def list_shorter(self, batch: int) -> Iterator[list[RunKey]]:
        """Our shorter runs at a batch, length by length, to the first one that is short enough.

        That is where every seed ends above the peer, or the shortest of all. A length whose runs
        are not complete is the last for now.
        """
        steps = LENGTHS[batch]
        best = self.list_finalists(OURS, batch, steps)[0]
        for share in SHARES:
            length = batch, round(share * steps)  # 42 of 50 steps are 84 %, not 85 %
            keys = list(self._list_seeds("saving", length, [best], SEEDS_OF_OTHERS))
            yield keys
            found = self.find_losses("saving", *length, best)
            if len(found) < len(keys):
                return
            target = self.find_target(batch, steps)
            if all(found[seed] > target.get(seed, math.inf) for seed in found):
                return

    def find_target(self, batch: int, steps: int) -> dict[int, float]:
        """The peer's test losses by seed with the setting that did better in the test.

        Runs that diverged are left out; fewer of them count first. Empty before the test.
        """
        peer = self.find_peer(batch, steps)
        tested = [
            drop_diverged(self.find_losses("test", batch, steps, setting))
            for setting in self.list_finalists(peer, batch, steps)
        ]
        return min(
            filter(None, tested),
            key=lambda losses: (-len(losses), fmean(losses.values())),
            default={},
        )

    def _list_seeds(
        self, stage: str, length: Length, settings: Iterable[Setting], seeds: Iterable[int]
    ) -> Iterator[RunKey]:
        for seed, setting in itertools.product(seeds, settings):
            yield make_key(stage, *length, setting, seed)


def drop_diverged(losses: Mapping[int, float]) -> dict[int, float]:
    """The losses of the runs that did not diverge."""
    return {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}


def _refuse(key: RunKey) -> Run:
    raise MissingRunError(key)
