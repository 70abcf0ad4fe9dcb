"""What stands above a report: what the page is, its title, and a line about the settings."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from neumann.lab.config_files import flatten
from neumann.lab.report.formatting import format_count, format_list, format_setting
from neumann.lab.report.points import Overview, name_axis
from neumann.lab.report.runs import Run
from neumann.lab.report.study_records import Study

MAX_ARMS = 70  # characters of the arms in a title
NAMED_FIRST = 45  # characters of those that a title names if it cannot name all


def describe_kind(study: Study) -> str:
    """Say what the page shows, on which data and model."""
    kind = "Training run"
    if study.search is not None:
        kind = "Learning-rate sweep"
    elif study.comparison is not None:
        kind = f"Comparison of {format_count(len(study.arms), 'arm')}"
    return _join(kind, study)


def describe_overview(overview: Overview) -> str:
    started = next((point.study for point in overview.points if point.study is not None), None)
    varied = [
        f"{name_axis(key)} {format_list([format_setting(value) for value in values])}"
        for key, values in overview.axes.items()
    ]
    return _join("Study", started, overview.axes, *varied)


def _join(kind: str, study: Study | None, axes: Container[str] = (), *more: str) -> str:
    known = {} if study is None else study.settings
    parts = [known[key] for key in ("data", "model") if known.get(key) and key not in axes]
    return " · ".join([kind, *map(format_setting, parts), *more])


def compose_title(study: Study) -> str:
    if study.title:
        return study.title
    if study.search is None:
        title = name_arms([arm.name for arm in study.arms])
    else:
        title = f"Learning rates of {name_arms(study.search.arms)}"
    data = study.settings.get("data")
    return f"{title} on {format_setting(data)}" if data else title


def name_arms(names: Sequence[str]) -> str:
    """Name all arms, or the first ones and how many others there are."""
    if len(format_list(names)) <= MAX_ARMS or len(names) < 2:
        return format_list(names) or "no arms"
    shown = 1
    while len(", ".join(names[: shown + 1])) <= NAMED_FIRST:
        shown += 1
    return f"{', '.join(names[:shown])} and {format_count(len(names) - shown, 'other')}"


def compose_subtitle(study: Study) -> list[str]:
    """Return a line about the settings and, if a run has started, one about its environment."""
    known = _select_shared(study)
    parts = [
        _describe_length(study, known),
        f"batch {known['batch_size']}" if known.get("batch_size") else "",
        f"{known['sched']} schedule" if known.get("sched") else "",
    ]
    if study.comparison is not None:
        parts.append(format_count(study.comparison.seeds, "seed"))
    elif study.search is None:
        lr = known.get("lr")
        parts.append(f"lr {lr:g}" if isinstance(lr, float) else "")
        parts.append(f"seed {study.arms[0].runs[0].seed}")
    parts.append(describe_held_out(known) if known.get("held_out") else "")
    environments = [_describe_environment(run) for arm in study.arms for run in arm.runs]
    return [" · ".join(filter(None, parts)), *environments[:1]]


def _select_shared(study: Study) -> dict[str, Any]:
    """Return the settings that all runs have: an arm may have its own epochs or batch size."""
    configs = [run.config for arm in study.arms for run in arm.runs]
    return {
        key: value
        for key, value in study.settings.items()
        if all(config.get(key) == value for config in configs)
    }


def _describe_length(study: Study, known: Mapping[str, Any]) -> str:
    """Give the epochs and, if all finished runs took the same number, the steps."""
    if not isinstance(known.get("epochs"), int):
        return ""
    taken = [(run.summary or {}).get("steps") for arm in study.arms for run in arm.runs]
    steps = {count for count in taken if isinstance(count, int)}
    epochs = format_count(known["epochs"], "epoch")
    return f"{epochs} ({format_count(steps.pop(), 'step')})" if len(steps) == 1 else epochs


def describe_held_out(known: Mapping[str, Any]) -> str:
    """Text that is split by documents has a validation set of its own."""
    if str(known.get("data", "")).startswith("text:") and known.get("tokens", "chars") != "chars":
        return "scored on the validation documents"
    return "a tenth of the training set held out"


def _describe_environment(run: Run) -> str:
    known = flatten(run.environment)
    torch, ours, commit = map(known.get, ("versions.torch", "versions.neumann", "git.commit"))
    parts = [
        known.get("hardware.gpu.name") or known.get("hardware.cpu"),
        torch and f"torch {torch}",
        ours and f"neumann {ours}",
        commit and f"commit {str(commit)[:10]}",
        known.get("git.dirty") is True and "with uncommitted changes",
    ]
    return " · ".join(str(part) for part in parts if part)
