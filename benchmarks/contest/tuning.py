"""The rules by which every optimizer is tuned.

A search tries three learning rates a factor of 2 apart, times two weight decays, times momentum
0.6 and 0.9, then further learning rates beside the best setting until that has a worse one on
either side.

Searches are shorter than the final runs, and the best setting depends on the length. So at large
batches the contenders, those within half a point of the best of their side (ours or the others),
are tuned again in as many steps as the final runs have, with their momentum kept. Scores are % of
images classified correctly; a run that diverged scores 0.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.common.ledger import MissingRunError
from benchmarks.common.search import find_bracketed_best, find_range
from benchmarks.contest.entrants import ENTRANTS, GRID_POINTS_PER_OCTAVE, RunKey, Setting

MOMENTA = (0.6, 0.9)
FINAL_EPOCHS = 24
CONTENDER_MARGIN = 0.5  # points behind the best
LARGE_BATCH = 8192  # from here on, contenders are tuned again

Score = Callable[[RunKey], float]


def count_search_epochs(batch: int) -> int:
    """Half the length of a final run; at batch 16384 that would leave only 24 steps."""
    return 12 if batch <= 8192 else FINAL_EPOCHS


def count_full_epochs(batch: int) -> int:
    """Epochs of the 45,000 images left for a search that have as many steps as a final run."""
    return round(FINAL_EPOCHS * (50_000 // batch) / (45_000 // batch))


@dataclass(frozen=True)
class Search:
    """The search for an entrant's setting, on held-out images."""

    entrant: str
    batch: int
    epochs: int
    model: str = "resnet9"

    def key(self, setting: Setting) -> RunKey:
        return RunKey("search", self.model, self.batch, self.epochs, self.entrant, setting)

    def start_keys(
        self, decays: Iterable[float] = (), momenta: Iterable[float] = MOMENTA
    ) -> list[RunKey]:
        """The runs that the search needs in any case, with the entrant's decays by default."""
        return [self._key(index, choice) for index, choice in self._start(decays, momenta)]

    def find_best(
        self, score: Score, decays: Iterable[float] = (), momenta: Iterable[float] = MOMENTA
    ) -> Setting:
        """The best setting; its learning rate is bracketed by two that are worse."""
        start, stride = self._start(decays, momenta), GRID_POINTS_PER_OCTAVE
        best = find_bracketed_best(lambda *pair: score(self._key(*pair)), start, stride)
        return self._key(*best).setting

    def find_lr(self, score: Score, setting: Setting) -> Setting:
        """The same setting with the learning rate tuned again, for another model."""
        return self.find_best(score, (setting.decay,), (setting.momentum,))

    def find_lr_range(
        self, score: Score, setting: Setting, margin: float = 1.0
    ) -> tuple[float, float]:
        """The learning rates around the setting's that are within `margin` points of the best."""
        entrant, choice = ENTRANTS[self.entrant], (setting.decay, setting.momentum)
        indices = sorted(range(-100, 101), key=abs)
        start = next(index for index in indices if entrant.lr_at(index) == setting.lr)
        low, high = find_range(lambda index: score(self._key(index, choice)), start, margin)
        return entrant.lr_at(low), entrant.lr_at(high)

    def _start(
        self, decays: Iterable[float], momenta: Iterable[float]
    ) -> list[tuple[int, tuple[float, float]]]:
        indices = (0, -GRID_POINTS_PER_OCTAVE, GRID_POINTS_PER_OCTAVE)
        choices = itertools.product(decays or ENTRANTS[self.entrant].decays, momenta)
        return list(itertools.product(indices, choices))

    def _key(self, index: int, choice: tuple[float, float]) -> RunKey:
        return self.key(Setting(ENTRANTS[self.entrant].lr_at(index), *choice))


@dataclass(frozen=True)
class Tuning:
    """The outcome of the searches at one batch size.

    Every method raises MissingRunError if a search that it needs is not finished.
    """

    score: Score
    batch: int
    epochs: int  # of a search
    full_epochs: int  # of a second search; the same as `epochs` if there is none

    def find_first(self, entrant: str) -> RunKey:
        """The best run of an entrant's search."""
        search = Search(entrant, self.batch, self.epochs)
        return search.key(search.find_best(self.score))

    def is_contender(self, entrant: str) -> bool:
        """Whether the entrant is tuned again at full length."""
        own = self.score(self.find_first(entrant))
        best = own
        for other in ENTRANTS:
            with contextlib.suppress(MissingRunError):
                if ENTRANTS[other].ours == ENTRANTS[entrant].ours:
                    best = max(best, self.score(self.find_first(other)))
        return self.epochs != self.full_epochs and own >= best - CONTENDER_MARGIN

    def find_second(self, entrant: str, score: Score) -> RunKey:
        """The best run of a contender's second search."""
        search = Search(entrant, self.batch, self.full_epochs)
        momentum = self.find_first(entrant).setting.momentum
        return search.key(search.find_best(score, momenta=(momentum,)))

    def find_chosen(self, entrant: str) -> RunKey:
        """The run that decides on the entrant's setting."""
        if self.is_contender(entrant):
            return self.find_second(entrant, self.score)
        return self.find_first(entrant)
