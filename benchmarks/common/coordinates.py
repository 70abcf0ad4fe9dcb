"""A search over several coordinates: one after another moves to its best value on a grid.

It ends when no coordinate moves any more. A coordinate may end at the edge of its grid.
"""

from collections.abc import Callable, Mapping, Sequence

Point = Mapping[str, float]  # the value of each coordinate
Grids = Mapping[str, Sequence[float]]
Key = tuple[tuple[str, float], ...]  # a point that can be looked up


def search_coordinates(
    loss: Callable[[Point], float],
    start: Point,
    grids: Grids,
    order: Sequence[str],
    announce: Callable[[Point], None] = lambda point: None,
    limit: int | None = None,
) -> Point:
    """The point with no better one beside it in any of the coordinates in `order`.

    Args:
        loss: what to make small; infinite for a run that diverged.
        start: a point on the grids.
        grids: the values of each coordinate, in order.
        order: which coordinates move, and in which order.
        announce: called with every candidate before their losses are asked for, so that several
            processes can share them out.
        limit: end after this many points, with the best of them.
    """
    known: dict[Key, float] = {}
    begun: set[Key] = set()

    def begin(candidate: Point) -> None:
        key = tuple(sorted(candidate.items()))
        if key not in begun and (limit is None or len(begun) < limit):
            begun.add(key)
            announce(candidate)

    def find_loss(candidate: Point) -> float:
        key = tuple(sorted(candidate.items()))
        begin(candidate)
        if key not in begun:
            raise _LimitReachedError
        if key not in known:
            known[key] = loss(candidate)
        return known[key]

    point = start
    try:
        while True:
            before = point
            for name in order:
                if name in point:
                    point = _move(find_loss, point, name, grids[name], begin)
            if point == before:
                return point
    except _LimitReachedError:
        best, _ = min(known.items(), key=lambda item: item[1])
        return dict(best)


class _LimitReachedError(Exception):
    """Every point that may be tried has been."""


def _move(
    loss: Callable[[Point], float],
    point: Point,
    name: str,
    grid: Sequence[float],
    begin: Callable[[Point], None],
) -> Point:
    """The best point along a coordinate, with a worse one, or the edge, on both sides."""
    while True:
        index = list(grid).index(point[name])
        beside = [{**point, name: grid[i]} for i in (index - 1, index + 1) if 0 <= i < len(grid)]
        for candidate in (point, *beside):
            begin(candidate)
        best = min((point, *beside), key=loss)
        if best == point:
            return point
        point = best
