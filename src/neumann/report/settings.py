"""What was run: what all arms share, where they differ, and the environment."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from neumann.report import wording
from neumann.report.curves import ArmRuns
from neumann.report.markup import Child, breakable, tag
from neumann.report.runs import Run
from neumann.report.tables import Cell, arm_name, scrolling

OWN = ("seed",)  # differs between the runs of an arm, as it should


def settings_section(arms: Sequence[ArmRuns], fallback: Mapping[str, Any]) -> list[Child]:
    """Config and environment, folded; differences between arms in the open."""
    runs = [run for arm in arms for run in arm.runs]
    configs = {arm.name: _merged([run.config for run in arm.runs]) for arm in arms if arm.runs}
    keys = list(dict.fromkeys(key for config in configs.values() for key in config))
    differing = [key for key in keys if key not in OWN and _differs(key, list(configs.values()))]
    made: list[Child] = []
    if len(configs) > 1 and differing:
        made += [
            tag("h3", "Where the arms differ"),
            _differences(configs, differing),
        ]
    shared = _merged([run.config for run in runs]) if runs else flat(fallback)
    shown = {key: value for key, value in shared.items() if key not in differing}
    made.append(_folded("Settings" if len(configs) < 2 else "Settings that all arms share", shown))
    environments = [flat(run.environment) for run in runs]
    if environments:
        mixed = [key for key in _merged_keys(environments) if _differs(key, environments)]
        if mixed:
            made.append(
                tag(
                    "p",
                    f"The runs were not all made in the same environment: {wording.listed(mixed)} "
                    f"{'differs' if len(mixed) == 1 else 'differ'}.",
                    class_="warning",
                )
            )
        made.append(_folded("Environment", _merged(environments)))
    return made


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values by their path, as in "hardware.cpu"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def _merged(all_values: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Each setting as text; what differs with all it was."""
    flattened = [flat(values) for values in all_values]
    return {
        key: ", ".join(dict.fromkeys(wording.plain(values.get(key)) for values in flattened))
        for key in _merged_keys(flattened)
    }


def _merged_keys(all_values: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for values in all_values for key in values))


def _differs(key: str, all_values: Sequence[Mapping[str, Any]]) -> bool:
    return len({wording.plain(values.get(key)) for values in all_values}) > 1


def _differences(configs: Mapping[str, Mapping[str, str]], keys: Sequence[str]) -> Element:
    """An arm a row; what is not as in the first arm stands out."""
    first = next(iter(configs.values()))

    def cell(config: Mapping[str, str], key: str) -> Cell:
        value = config.get(key, wording.NOTHING)
        same = value == first.get(key, wording.NOTHING)
        return tag("span" if same else "mark", breakable(value))

    rows = [
        [arm_name(name), *(cell(config, key) for key in keys)] for name, config in configs.items()
    ]
    return scrolling(["arm", *keys], rows, words=len(keys) + 1, label="Where the arms differ")


def _folded(title: str, values: Mapping[str, Any]) -> Element:
    rows = [[key, wording.plain(value)] for key, value in values.items()]
    return tag(
        "details",
        tag("summary", title),
        scrolling(["setting", "value"], rows, words=2, label=title),
    )


def environment_line(run: Run) -> str:
    """Versions and hardware in a few words."""
    known = flat(run.environment)
    parts = [
        known.get("hardware.gpu.name") or known.get("hardware.cpu"),
        f"torch {known['versions.torch']}" if known.get("versions.torch") else None,
        f"neumann {known['versions.neumann']}" if known.get("versions.neumann") else None,
        f"commit {str(known['git.commit'])[:10]}" if known.get("git.commit") else None,
        "with changes" if known.get("git.dirty") is True else None,
    ]
    return " · ".join(str(part) for part in parts if part)
