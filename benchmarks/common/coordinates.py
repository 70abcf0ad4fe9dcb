"""A search over several coordinates: one after another moves to its best value on a grid.

It ends when no coordinate moves any more; a coordinate may end at the edge of its grid. With a
limit it goes on until the limit is used up, so that searches with few and with many coordinates
have the same number of points.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    tried: Iterable[Point] = (),
) -> Point:
    """The point with no better one beside it in any of the coordinates in `order`.

    Args:
        loss: what to make small; infinite for a run that diverged.
        start: a point on the grids.
        grids: the values of each coordinate, in order.
        order: which coordinates move, and in which order.
        announce: called with every candidate before their losses are asked for, so that several
            processes can share them out.
        limit: end after exactly this many points, with the best of them. If no coordinate moves
            before that, points further away are tried. If `tried` uses it up, `start` is returned.
        tried: points that an earlier search has tried. They count towards the limit.
    """
    known: dict[Key, float] = {}
    begun = {_make_key(point) for point in tried}

    def begin(candidate: Point) -> None:
        key = _make_key(candidate)
        if key not in begun and (limit is None or len(begun) < limit):
            begun.add(key)
            announce(candidate)

    def find_loss(candidate: Point) -> float:
        key = _make_key(candidate)
        begin(candidate)
        if key not in begun:
            raise _LimitReachedError
        if key not in known:
            known[key] = loss(candidate)
        return known[key]

    point = start
    names = [name for name in order if name in start]
    try:
        while True:
            before = point
            for name in names:
                point = _move(find_loss, point, name, grids[name], begin)
            if point == before and limit is None:
                return point
            if point == before:
                further = list(_list_further(point, grids, names))
                for candidate in further:
                    begin(candidate)
                point = min((point, *further), key=find_loss)  # raises once the limit is reached
                if point == before:
                    return point
    except _LimitReachedError:
        best = min(known, key=lambda tried_point: known[tried_point], default=None)
        return start if best is None else dict(best)


def _make_key(point: Point) -> Key:
    return tuple(sorted(point.items()))


def _list_further(point: Point, grids: Grids, names: Sequence[str]) -> Iterator[Point]:
    """Points two steps away along a coordinate, then those one step away along two of them."""

    def step(start: Point, name: str, by: int) -> Iterator[Point]:
        grid = grids[name]
        index = list(grid).index(start[name]) + by
        if 0 <= index < len(grid):
            yield {**start, name: grid[index]}

    for name, by in itertools.product(names, (-2, 2)):
        yield from step(point, name, by)
    for (first, second), a, b in itertools.product(
        itertools.combinations(names, 2), (-1, 1), (-1, 1)
    ):
        for moved in step(point, first, a):
            yield from step(moved, second, b)


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
