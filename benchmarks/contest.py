"""The rules of the large-batch contest: who takes part, and what is tuned how.

Every optimizer is tuned alike: three learning rates in ratio 2, times two weight decays, times
momentum 0.6 and 0.9, which all of them have; then further learning rates beside the best of all
until it has a worse one on either side. Of equally good ones the first that was tried is taken.
Searches are shorter than the runs that are tested, and learning rate and decay depend on the
length. So the contenders at large batches, those within half a point of the best of ours or of the
others, are tuned once more in as many steps, their momentum kept. Scores are % of images classified
right; a run that diverged has 0.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ledger import Key, Missing, Setting

MOMENTA = (0.6, 0.9)
CONTENDING = 0.5  # points behind the best
OCTAVE = 2  # grid points, for learning rates in ratio √2
EPOCHS = 24  # of a run that is tested
LARGE = 8192  # the batch size from which on contenders are tuned once more


@dataclass(frozen=True)
class Entrant:
    """An optimizer in the contest. The grid begins at lr/2, lr, 2·lr."""

    opt: str  # an arm of the lab, with {momentum}
    lr: float
    decays: tuple[float, ...]
    sched: str = "linear"
    ours: bool = False

    def lr_at(self, point: int) -> float:
        """The learning rate that many half octaves above the first."""
        return float(self.lr * 2.0 ** (point / OCTAVE))


# The decays of Muon and of the spectral form are decoupled and act once a step, whatever the
# momentum; a step of ours is lr/(1 − μ) long and one of Muon lr. So ours are Muon's over 1 − 0.6.
ENTRANTS = {
    "SGD-Nesterov": Entrant("sgd:momentum={momentum}", 0.2, (5e-4, 5e-3)),
    "LARS": Entrant("lars:momentum={momentum}", 16.0, (5e-4, 5e-3)),
    "LAMB": Entrant("lamb:betas=({momentum},0.999)", 0.04, (0.01, 0.1)),
    "AdamW": Entrant("adamw:betas=({momentum},0.999)", 0.002, (0.05, 0.5)),
    "NAdamW": Entrant("nadamw:betas=({momentum},0.999)", 0.001, (0.05, 0.5)),
    "schedule-free AdamW": Entrant(
        "schedulefree:betas=({momentum},0.999)", 0.002, (0.05, 0.5), "constant"
    ),
    "Muon": Entrant("muon:momentum={momentum}", 0.04, (0.5, 2.0)),
    "Neumann (paper)": Entrant("neumann:momentum={momentum}", 0.2, (5e-4, 5e-3), ours=True),
    "Neumann diagonal": Entrant(
        "neumann:precondition=diagonal,momentum={momentum}", 0.00125, (0.1, 1.0), ours=True
    ),
    "Neumann spectral": Entrant(
        "neumann:precondition=spectral,momentum={momentum}", 0.03, (1.25, 5.0), ours=True
    ),
}


Score = Callable[[Key], float]
Place = tuple[int, float, float]  # half octaves from the entrant's first lr, decay, momentum


@dataclass(frozen=True)
class Search:
    """The search for an entrant's setting, on held-out images."""

    entrant: str
    batch: int
    epochs: int
    model: str = "resnet9"

    def key(self, point: int, decay: float, momentum: float) -> Key:
        return self.of(Setting(ENTRANTS[self.entrant].lr_at(point), decay, momentum))

    def beginning(
        self, decays: Iterable[float] | None = None, momenta: Iterable[float] = MOMENTA
    ) -> list[Key]:
        """The runs that every search has."""
        return [self.key(*place) for place in self._beginning(decays, momenta)]

    def best(
        self,
        score: Score,
        decays: Iterable[float] | None = None,
        momenta: Iterable[float] = MOMENTA,
    ) -> Setting:
        """The best setting; its learning rate is bracketed by two that are worse."""
        places = self._beginning(decays, momenta)
        while True:
            scores = {place: score(self.key(*place)) for place in places}
            best = max(places, key=lambda place: scores[place])
            beside = (_beyond_ties(scores, best, side) for side in (-OCTAVE, OCTAVE))
            missing = [place for place in beside if place not in scores]
            if not missing:
                return self.key(*best).setting
            places += missing

    def _beginning(self, decays: Iterable[float] | None, momenta: Iterable[float]) -> list[Place]:
        entrant = ENTRANTS[self.entrant]
        tried = tuple(decays or entrant.decays), tuple(momenta)
        return list(itertools.product((0, -OCTAVE, OCTAVE), *tried))

    def transferred(self, score: Score, setting: Setting) -> Setting:
        """For another model: nothing tuned but the learning rate."""
        return self.best(score, (setting.decay,), (setting.momentum,))

    def width(self, score: Score, setting: Setting, margin: float = 1.0) -> tuple[float, float]:
        """The learning rates within `margin` points of the best, in ratio √2 around the setting's.

        Both ends are bracketed: the next rate beyond either is further off.
        """
        entrant = ENTRANTS[self.entrant]
        point = next(p for p in _outwards() if entrant.lr_at(p) == setting.lr)
        scores = {point: self._at(score, point, setting)}
        while True:
            best = max(scores, key=lambda p: scores[p])
            low = high = best
            while scores.get(low - 1, -math.inf) >= scores[best] - margin:
                low -= 1
            while scores.get(high + 1, -math.inf) >= scores[best] - margin:
                high += 1
            missing = {low - 1, high + 1} - set(scores)
            if not missing:
                return entrant.lr_at(low), entrant.lr_at(high)
            scores |= {p: self._at(score, p, setting) for p in missing}

    def of(self, setting: Setting) -> Key:
        """The run with a setting."""
        return Key("search", self.model, self.batch, self.epochs, self.entrant, setting)

    def _at(self, score: Score, point: int, setting: Setting) -> float:
        return score(self.key(point, setting.decay, setting.momentum))


def _beyond_ties(scores: dict[Place, float], best: Place, side: int) -> Place:
    """The first learning rate on that side which is not as good, as far as is known."""
    point, decay, momentum = best
    while scores.get((point, decay, momentum)) == scores[best]:
        point += side
    return point, decay, momentum


def _outwards() -> Iterator[int]:
    yield 0
    for distance in range(1, 100):
        yield from (distance, -distance)


@dataclass(frozen=True)
class Tuning:
    """What the searches at one batch size come to; Missing where they are not over."""

    score: Score  # of runs that there are
    batch: int
    epochs: int  # of a search
    full: int  # epochs that have as many steps as a run that is tested

    def first(self, entrant: str) -> Key:
        """The best run of an entrant's search."""
        search = Search(entrant, self.batch, self.epochs)
        return search.of(search.best(self.score))

    def contends(self, entrant: str) -> bool:
        """Whether the entrant is tuned once more at full length."""
        own = self.score(self.first(entrant))
        best = own
        for other in ENTRANTS:
            with contextlib.suppress(Missing):
                if ENTRANTS[other].ours == ENTRANTS[entrant].ours:
                    best = max(best, self.score(self.first(other)))
        return self.epochs != self.full and own >= best - CONTENDING

    def again(self, entrant: str, score: Score) -> Key:
        """The best run of a contender's second search."""
        search = Search(entrant, self.batch, self.full)
        momentum = self.first(entrant).setting.momentum
        return search.of(search.best(score, momenta=(momentum,)))

    def chosen(self, entrant: str) -> Key:
        """The run that decides on the entrant's setting."""
        return self.again(entrant, self.score) if self.contends(entrant) else self.first(entrant)
