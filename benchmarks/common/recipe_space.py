"""What a search around the recipe varies, on images and on text: coordinates, grids, flags.

`forgetting` is lr · decay · steps. `embedding`, `output` and `vector` are the scales of the roles
(`RoleOptions`), `before` the momentum before P, and `eps` the ε of the diagonal P. `output_before`
is the momentum of the output layer alone; 0 means that it has none of its own. The learning rate
falls as (1 − t)^`power`, and with `cooling` above 0, μ falls with it. `slow` is the share of slow
momentum.
"""

import argparse
from collections.abc import Callable, Sequence

from benchmarks.common.coordinates import Point, search_coordinates

GRIDS: dict[str, tuple[float, ...]] = {
    "lr": (0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.16, 0.32),
    "forgetting": (0.16, 0.3, 0.6, 1.25, 2.5, 3.5, 5.0, 7.0, 10.0, 20.0, 40.0),
    "embedding": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.35, 0.7, 1.4, 2.8, 5.6),
    "output": (0.35, 0.7, 1.40625, 2.8125, 5.625, 12.0, 22.5, 45.0, 90.0, 180.0),
    "vector": (0.009375, 0.01875, 0.0375, 0.05, 0.075, 0.15, 0.3, 0.6),
    "momentum": (0.3, 0.45, 0.6, 0.7, 0.8),
    "before": (0.0, 0.4, 0.6, 0.7, 0.8, 0.9),
    "output_before": (0.0, 0.8, 0.9, 0.95),
    "ramp": (0.03, 0.08, 0.16),
    "power": (0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4),
    "slow": (0.0, 0.3, 0.6, 0.8),
    "cooling": (0.0, 0.5, 1.0),
    "eps": (1e-12, 1e-10, 1e-8, 1e-6),
}
START: Point = {
    "lr": 0.03,
    "forgetting": 3.5,
    "embedding": 0.1,
    "output": 45.0,
    "vector": 0.05,
    "momentum": 0.6,
    "before": 0.8,
    "eps": 1e-8,
}
SCALES = ("embedding", "output", "vector")


def add_search_flags(parser: argparse.ArgumentParser, coordinates: Sequence[str]) -> None:
    """The flags that say which coordinates move, and from where."""
    parser.add_argument("--coordinates", nargs="*", choices=coordinates, default=coordinates)
    parser.add_argument("--start", nargs="+", type=read_assignment, default=[], metavar="lr=0.02")
    parser.add_argument("--sweep", nargs="+", choices=coordinates, default=[])
    parser.add_argument("--seed", type=int, default=0)


def read_assignment(text: str) -> tuple[str, float]:
    """A coordinate and its value, from `lr=0.02`."""
    name, _, value = text.partition("=")
    if name not in GRIDS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GRIDS)}")
    for known in GRIDS[name]:
        if value in (str(known), f"{known:g}"):
            return name, known
    values = ", ".join(f"{known:g}" for known in GRIDS[name])
    raise argparse.ArgumentTypeError(f"{name} must be one of {values}, got {value!r}")


def search_recipe(
    arguments: argparse.Namespace,
    start: Point,
    loss: Callable[[Point], float],
    announce: Callable[[Point], None],
) -> Point:
    """Find the point that no coordinate improves, then train all values of the swept ones there."""
    start = {**start, **dict(arguments.start)}
    best = search_coordinates(loss, start, GRIDS, arguments.coordinates, announce)
    for name in arguments.sweep:
        for value in GRIDS[name]:
            announce({**best, name: value})
    return best
