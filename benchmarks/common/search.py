"""Searches over one bracketed number, such as a learning rate, and a few fixed choices beside it.

The number is given by its index on a grid, and the caller decides what index 1 means. The caller's
score is better the higher it is; it may raise an exception for a run that is missing.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Choice = TypeVar("Choice", bound=Hashable)  # everything but the bracketed number
MAX_TIES = 12  # this many scores, all the same, give a search no direction: it ends


def find_bracketed_best(
    score: Callable[[int, Choice], float], start: Sequence[tuple[int, Choice]], stride: int
) -> tuple[int, Choice]:
    """The best (index, choice), once it has a worse index at `stride` on either side.

    The pairs in `start` are tried in any case. Of equally good ones the first is taken. If all are
    equally good, as where every run diverges, the search ends after a few.
    """
    tried = list(start)
    while True:
        scores = {pair: score(*pair) for pair in tried}
        best = max(tried, key=lambda pair: scores[pair])
        beside = (_skip_ties(scores, best, side) for side in (-stride, stride))
        missing = [pair for pair in beside if pair not in scores]
        flat = len(scores) >= MAX_TIES and len(set(scores.values())) == 1
        if not missing or flat:
            return best
        tried += missing


def find_range(score: Callable[[int], float], start: int, margin: float) -> tuple[int, int]:
    """The lowest and the highest index around the best with scores within `margin` of it."""
    scores = {start: score(start)}
    while True:
        best = max(scores, key=lambda index: scores[index])
        low = high = best
        while scores.get(low - 1, -math.inf) >= scores[best] - margin:
            low -= 1
        while scores.get(high + 1, -math.inf) >= scores[best] - margin:
            high += 1
        missing = {low - 1, high + 1} - set(scores)
        if not missing:
            return low, high
        scores |= {index: score(index) for index in missing}


def _skip_ties(
    scores: dict[tuple[int, Choice], float], best: tuple[int, Choice], stride: int
) -> tuple[int, Choice]:
    """The nearest pair on one side of the best that is not known to be as good."""
    index, choice = best
    while scores.get((index, choice)) == scores[best]:
        index += stride
    return index, choice
