"""What is tuned about each arm of the language benchmarks: coordinates, grids, starting points."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import recipe_space
from benchmarks.common.coordinates import Point, search_coordinates
from benchmarks.common.ledger import Runner
from benchmarks.language.language_arms import CONSTANT, Setting
from benchmarks.language.language_runs import RunKey, read_loss
from neumann.optim.recipe import FORGETTING

# Every coordinate has a grid; a search may end at the edge of one. `forgetting` is lr · decay ·
# steps: unlike `decay`, it lets the learning rate move without the decay of a run.
RATES = tuple(0.001 * 2.0**index for index in range(-6, 12))
GRIDS: dict[str, tuple[float, ...]] = {
    "lr": RATES,
    "embedding": RATES,
    "output": RATES,
    "momentum": (0.0, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9),
    "before": (0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95),
    "decay": (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4),
    "forgetting": (0.0, 0.02, 0.04, 0.08, *recipe_space.GRIDS["forgetting"]),
    "power": recipe_space.GRIDS["power"],
    "slow": recipe_space.GRIDS["slow"],
    "cooling": (0.0, 0.5, 1.0),
}
# For peers in the contest: as close together as the recipe's learning rates.
FINE_RATES = tuple(sorted({*RATES, *(rate * 2**0.5 for rate in RATES)}))
# Between the best values of ours and of Muon in 50 steps. Of the contest alone: it would move the
# starts of searches that have ended.
FINE_FORGETTING = 0.85
MAY_BE_SLOW = (
    "recipe",
    "muon",
    "muon original",
    "muon by norm",
    "normuon by norm",
)  # slow momentum

DECAY_200 = 0.2  # of a peer in 200 steps; the searches of recipe_untuned ended near it

_SPECTRAL = {"lr": 0.008, "momentum": 0.6, "before": 0.8, "decay": 1.6, "cooling": 0.0}
_ADAMW = {"lr": 0.001, "momentum": 0.9, "decay": 0.8}
_MUON = {"lr": 0.016, "before": 0.9, "decay": 0.8}
START: dict[str, Point] = {
    "spectral": {**_SPECTRAL, "embedding": 0.032, "output": 0.016},
    "spectral embedding": {**_SPECTRAL, "embedding": 0.064, "output": 0.016},
    "spectral output": {**_SPECTRAL, "embedding": 0.032, "output": 0.032},
    "spectral everywhere": {**_SPECTRAL, "embedding": 0.064, "output": 0.032},
    "spectral by norm": {**_SPECTRAL, "embedding": 0.032, "output": 0.016},
    "muon": {**_MUON, "embedding": 0.016, "output": 0.016},
    "muon original": {**_MUON, "embedding": 0.016, "output": 0.016},
    "muon by norm": {**_MUON, "lr": 0.064, "embedding": 0.008, "output": 0.016},
    "normuon": {**_MUON, "embedding": 0.016, "output": 0.016},
    "normuon by norm": {**_MUON, "lr": 0.064, "embedding": 0.008, "output": 0.016},
    "soap": {"lr": 0.004, "momentum": 0.9, "decay": 0.2, "embedding": 0.016, "output": 0.016},
    "schedule-free": {**_ADAMW, "embedding": 0.016, "output": 0.008},
    "diagonal": {**_ADAMW, "embedding": 0.004, "output": 0.001},
    "paper": {**_ADAMW, "lr": 0.128, "embedding": 0.128, "output": 0.128},
    "adamw": {**_ADAMW, "embedding": 0.016, "output": 0.008},
}
ORDER = ("lr", "decay", "forgetting", "output", "embedding", "momentum", "before", "power")
RECIPE = "recipe"  # its coordinates are those of recipe_space: scales of roles, lr · decay · steps


def make_setting(arm: str, point: Point, steps: int = 1) -> Setting:
    """The setting at a point; rates become multiples of the learning rate."""
    values: dict[str, Any] = {**point}
    if "forgetting" in point:
        values["decay"] = values.pop("forgetting") / (point["lr"] * steps)
    if arm != RECIPE:
        values |= {role: point[role] / point["lr"] for role in ("embedding", "output")}
    return Setting(arm, **values)


def choose_start(arm: str) -> Point:
    """A start for runs of any length, with `forgetting` in place of the decay."""
    slow = {"slow": 0.0} if arm in MAY_BE_SLOW else {}
    if arm == RECIPE:
        return {**recipe_space.START, "forgetting": FORGETTING, "power": 1.0, **slow}
    start = dict(START[arm])
    del start["decay"]
    forgetting = start["lr"] * DECAY_200 * 200
    start["forgetting"] = _find_nearest(GRIDS["forgetting"], forgetting)
    return start if arm in CONSTANT else {**start, "power": 1.0, **slow}


def find_point(setting: Setting, steps: int, *, fine: bool = False) -> Point:
    """The point on the grids of a setting for so many steps; it means the same at any length."""
    values = {name: getattr(setting, name, 0.0) for name in choose_start(setting.arm)}
    values["forgetting"] = setting.decay * setting.lr * steps
    if setting.arm != RECIPE:
        values |= {role: values[role] * setting.lr for role in ("embedding", "output")}
    grids = get_grids(setting.arm, fine=fine)
    return {name: _find_nearest(grids[name], value) for name, value in values.items()}


def get_grids(arm: str, *, fine: bool = False) -> dict[str, tuple[float, ...]]:
    """The values of each coordinate of an arm, with those of the contest if they are to be fine."""
    grids = recipe_space.GRIDS if arm == RECIPE else GRIDS
    if not fine:
        return grids
    forgetting = tuple(sorted({*grids["forgetting"], FINE_FORGETTING}))
    rates = grids["lr"] if arm == RECIPE else FINE_RATES
    return {**grids, "forgetting": forgetting, "lr": rates}


def _find_nearest(grid: Sequence[float], value: float) -> float:
    """By ratio; 0 only for 0."""
    if value == 0:
        return 0.0
    return min((x for x in grid if x > 0), key=lambda x: abs(math.log(x / value)))


def search_setting(
    runner: Runner[RunKey],
    arm: str,
    make_key: Callable[[Setting], RunKey],
    order: Sequence[str] = ORDER,
    limit: int | None = None,
    *,
    start: Point | None = None,
    steps: int = 1,
    fine: bool = False,
    tried: Sequence[Setting] = (),
) -> Setting:
    """The setting of an arm that no coordinate improves; MissingRunError if the time is up.

    Args:
        runner: several processes may share out the runs.
        arm: a name in START, or the recipe.
        make_key: the run that scores a setting.
        order: which coordinates move, and in which order.
        limit: the number of runs.
        start: where the search begins; START of the arm by default.
        steps: of a run; the recipe's decay follows from them.
        fine: whether the grids are those of the contest, with learning rates a factor of √2 apart.
        tried: settings that earlier searches have tried; they count towards the limit.
    """

    def loss(point: Point) -> float:
        return read_loss(runner.finish(make_key(make_setting(arm, point, steps))))

    def announce(point: Point) -> None:
        runner.run(make_key(make_setting(arm, point, steps)))

    begin = START[arm] if start is None else start
    points = [find_point(setting, steps, fine=fine) for setting in tried]
    grids = get_grids(arm, fine=fine)
    best = search_coordinates(loss, begin, grids, order, announce, limit, points)
    return make_setting(arm, best, steps)
