"""A study as a TOML file.

    title = "Regularizers at batch 4,096"
    about = "Table 4 of the paper."       # a sentence for the report

    [settings]                            # of all runs: any flag of `neumann train`
    data = "cifar10"
    epochs = 40

    [arms.neumann]                        # the first arm is compared with the others
    opt = "neumann:warmup=2.2%"

    [arms."no regularizers"]
    opt = "neumann:warmup=2.2%,cubic=0,repulsive=0"
    lr = "neumann"                        # that arm's rate; or LOW:HIGH:COUNT. Without [tuning] a
                                          # number, or "0.1/256": 0.1 for each 256 of batch_size
    bn_batch = 32                         # a setting that only this arm has

    [axes]                                # everything is repeated at each point
    batch_size = [512, 4096]              # a setting, or an option of an optimizer:
    "neumann:reset_growth" = [1, 2]

    [tuning]                              # lr alone, on held-out data
    lr = "0.05:3.2:7"
    seeds = 1
    epochs = 20                           # by default those of the settings
    at = {batch_size = 512}               # tune only there; other points take these rates,
    scale = "linear"                      # in proportion to their batch_size, or its root: "sqrt"

    [test]
    seeds = 10

Everything else is a UsageError of one line, which suggests the nearest name.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from neumann.lab.config import Settings, TrainConfig, TrainingSettings
from neumann.lab.config_files import read_toml
from neumann.lab.contenders import OWN, compose, parse_setting
from neumann.lab.errors import UsageError, require, unknown
from neumann.lab.optimizers.arms import Arm
from neumann.lab.storage.field_types import find_wrong_field
from neumann.lab.storage.folders import make_folder_name
from neumann.lab.studies.engine import Point, Study
from neumann.lab.studies.settings import CompareConfig, SweepConfig

NOT_IN_FILES = ("output",)  # a flag of the command
_RATE = r"[0-9.]\S*"  # a number, LOW:HIGH:COUNT or RATE/IMAGES
NOT_CHANGED = (*NOT_IN_FILES, "lr")  # by --set: arms and [tuning] have their own


@dataclass(frozen=True)
class Tuning:
    lr: str | None = None  # LOW:HIGH:COUNT
    seeds: int = 1
    epochs: int | None = None
    at: dict[str, Any] = field(default_factory=dict)
    scale: Literal["none", "linear", "sqrt"] = "none"


@dataclass(frozen=True)
class Test:
    seeds: int = 3


@dataclass(frozen=True)
class StudyText:
    """What a file says, checked key by key."""

    arms: dict[str, dict[str, Any]]
    title: str = ""
    about: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    test: dict[str, Any] = field(default_factory=dict)


def read_study_toml(
    path: Path,
    folder: Path,
    changes: Sequence[str] = (),
    *,
    jobs: int = 1,
    seconds: float | None = None,
) -> Study:
    """Read a study, with SETTING=VALUE `changes` in place of what the file says about a setting."""
    content = read_toml(path)
    changed = dict(_parse_change(text) for text in changes)
    try:
        return _make_study(content, folder, changed, {"jobs": jobs, "seconds": seconds})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _make_study(
    content: dict[str, Any], folder: Path, changed: dict[str, Any], of_command: dict[str, Any]
) -> Study:
    for key, value in dict(content.get("axes") or {}).items():
        good = isinstance(value, list)
        require(good, f"[axes]: {key} must be a list, as in {key} = [{_show(value)}]")
    text: StudyText = _parse_table("file", content, StudyText)
    tuning: Tuning | None = None
    if text.tuning is not None:
        tuning = _parse_table("[tuning]", text.tuning, Tuning)
        tuning = replace(tuning, at=_without(tuning.at, changed))
        if tuning.epochs is not None and "epochs" in changed:  # --set shortens the search too
            tuning = replace(tuning, epochs=min(tuning.epochs, changed["epochs"]))
    test: Test = _parse_table("[test]", text.test, Test)
    known = Settings if tuning else TrainingSettings
    allowed = [f.name for f in fields(known) if f.name not in NOT_IN_FILES]
    settings = _parse_settings("[settings]", text.settings, allowed) | changed
    axes = {
        key: values for key, values in _parse_axes(text.axes, allowed).items() if key not in changed
    }
    arms = {name: _parse_arm(name, table, axes) for name, table in text.arms.items()}
    arms = {name: (opt, _without(own, changed)) for name, (opt, own) in arms.items()}
    require(bool(arms), "add an [arms.NAME] table")
    _check_names(text.arms, axes, {Arm.parse(opt).name for opt, _ in arms.values()})
    sources = _parse_sources(tuning, axes, settings)
    points = []
    for values in _list_points(axes):
        point_settings = settings | {k: v for k, v in values.items() if ":" not in k}
        if point_settings.get("data_dir") is not None:
            point_settings["data_dir"] = Path(point_settings["data_dir"])
        texts = tuple(
            compose(name, _scale_lr(_set_options(opt, values), point_settings | own), own)
            for name, (opt, own) in arms.items()
        )
        shared = {**point_settings, "arms": texts, "seeds": test.seeds, **of_command}
        config: CompareConfig | SweepConfig
        if tuning is None:
            config = CompareConfig(**shared)
        else:
            shared |= {"search_seeds": tuning.seeds, "search_epochs": tuning.epochs}
            config = SweepConfig(**shared, lr=tuning.lr)
        source, factor = sources.find(values, point_settings)
        tuned_at = None if source == values else folder / _name_folder(source)
        points.append(Point(folder / _name_folder(values), config, values, tuned_at, factor))
    seconds = of_command["seconds"]
    return Study(folder, tuple(points), text.title, text.about, axes, seconds)


# ---------------------------------------------------------------------- the tables of a file


def _parse_table(where: str, table: dict[str, Any], kind: type[Any]) -> Any:
    names = [each.name for each in fields(kind)]
    for key in table:
        if key not in names:
            raise unknown(f"key of {where}" if where[0] == "[" else "key", key, names)
    wrong = find_wrong_field(table, kind)
    if wrong is not None:
        raise UsageError(f"{where}: {wrong}" if where[0] == "[" else wrong)
    return kind(**table)


def _parse_settings(where: str, table: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    settings = {key.replace("-", "_"): value for key, value in table.items()}
    for key, value in settings.items():
        if key not in allowed:
            raise unknown(f"setting in {where}", key, sorted(allowed))
        wrong = find_wrong_field({key: value}, TrainConfig)
        require(wrong is None, f"{where}: {wrong}")
    return settings


def _parse_change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    name = key.strip().replace("-", "_")
    names = [f.name for f in fields(TrainingSettings) if f.name not in NOT_CHANGED]
    if name not in names:
        raise unknown("setting in --set", key, names)
    require(bool(equals), f"--set must be SETTING=VALUE, got {text!r}")
    return name, parse_setting(name, value.strip())


def _parse_arm(
    name: str, table: dict[str, Any], axes: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The optimizer of an arm, with its learning rate, and the settings that it has alone."""
    where = f"[arms.{name}]"
    given = dict(table)
    opt, lr = given.pop("opt", name), given.pop("lr", None)
    require(isinstance(opt, str), f"{where}: opt must be text, got {opt!r:.40}")
    arm = Arm.parse(opt)
    if lr is not None:
        named = isinstance(lr, int | float | str) and not isinstance(lr, bool)
        require(named, f"{where}: lr must be a number, LOW:HIGH:COUNT or an arm, got {lr!r:.40}")
        require("," not in str(lr), f"{where}: lr cannot name an arm with a comma, got {lr!r:.40}")
        require("lr" not in dict(arm.options), f"{where}: lr is set twice, here and in opt")
        opt = f"{opt}{',' if ':' in opt else ':'}lr={lr}"
    own = _parse_settings(where, given, OWN)
    twice = next((key for key in own if key in axes), None)
    require(twice is None, f"{where}: {twice} is an axis; remove it from the arm")
    return opt, own


def _check_names(
    arms: Mapping[str, Mapping[str, Any]], axes: Mapping[str, Any], optimizers: set[str]
) -> None:
    """Raise for the rate of an arm, or an axis of an optimizer, that the file does not have."""
    for name, table in arms.items():
        lr = table.get("lr")
        if isinstance(lr, str) and lr not in arms and not re.fullmatch(_RATE, lr):
            raise unknown(f"arm as lr of [arms.{name}]", lr, arms)
    for key in axes:
        optimizer, colon, _ = key.partition(":")
        if colon and optimizer not in optimizers:
            raise unknown("optimizer in [axes]", optimizer, sorted(optimizers))


def _without(table: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in changed}


# ---------------------------------------------------------------------- axes


def _parse_axes(table: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for key, values in table.items():
        require(bool(values), f"[axes]: {key} has no values")
        if ":" in key:
            optimizer, _, option = key.partition(":")
            Arm.parse(f"{optimizer}:{option}=1").check()
            axes[key] = values
        else:
            checked = [_parse_settings("[axes]", {key: value}, allowed) for value in values]
            ((name, _),) = checked[0].items()
            axes[name] = [each[name] for each in checked]
        shown = [_show(value) for value in values]
        twice = next((text for text in shown if shown.count(text) > 1), None)
        require(twice is None, f"[axes]: {key} has {twice} twice")
    return axes


def _list_points(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _name_folder(values: Mapping[str, Any]) -> str:
    return make_folder_name(",".join(f"{key}={_show(value)}" for key, value in values.items()))


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set_options(opt: str, values: Mapping[str, Any]) -> str:
    """Set the options that axes name for this optimizer."""
    arm = Arm.parse(opt)
    named = (key.partition(":") for key in values if ":" in key)
    options = {option: values[f"{name}:{option}"] for name, _, option in named if name == arm.name}
    return str(arm.with_options(**options)) if options else opt


def _scale_lr(opt: str, settings: Mapping[str, Any]) -> str:
    """Turn the learning rate "0.1/256" into the one of this batch size."""
    arm = Arm.parse(opt)
    lr, slash, images = str(dict(arm.options).get("lr", "")).partition("/")
    if not slash:
        return opt
    try:
        scaled = float(lr) * settings.get("batch_size", Settings().batch_size) / int(images)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"lr = {lr}/{images} must be RATE/BATCH_SIZE, as in 0.1/256") from None
    return str(arm.with_options(lr=float(f"{scaled:.6g}")))


@dataclass(frozen=True)
class _Sources:
    """Which point each point takes its learning rates from."""

    at: Mapping[str, Any]
    scale: str
    settings: Mapping[str, Any]

    def find(
        self, values: dict[str, Any], settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float]:
        """The values of that point, and the factor on its learning rates."""
        source = {key: self.at.get(key, value) for key, value in values.items()}
        default = Settings().batch_size
        there = source.get("batch_size", self.settings.get("batch_size", default))
        ratio = settings.get("batch_size", default) / there
        factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
        return source, factors[self.scale]


def _parse_sources(
    tuning: Tuning | None, axes: Mapping[str, list[Any]], settings: Mapping[str, Any]
) -> _Sources:
    at = {} if tuning is None else tuning.at
    for key, value in at.items():
        require(bool(axes), f"[tuning]: at {key} = {value} needs {key} in [axes]")
        if key not in axes:
            raise unknown("axis in [tuning] at", key, axes)
        require(value in axes[key], f"[tuning]: at {key} = {value} is not one of {axes[key]}")
    scale = "none" if tuning is None else tuning.scale
    return _Sources(at, scale, settings)
