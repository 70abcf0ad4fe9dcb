"""The files that describe a study on disk.

A comparison's folder:

    comparison.json   the arms, the number of seeds, the target, and the settings all runs share
    ARM/seed-N/       the records of one run

A sweep's folder:

    sweep.json        the learning rates tried for each arm, and the chosen ones
    search/           the comparison that tried them on held-out data
    final/            the comparison of the winners on the test set

A study's folder, beside these files or above folders that hold them:

    study.json        the title, the axes, and the folder of each point on them

A folder that holds something else, is in use, or cannot be written is a UsageError.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from neumann.lab.config import TrainingSettings
from neumann.lab.config_files import fill_in_defaults, refuse_difference
from neumann.lab.contenders import get_name
from neumann.lab.errors import UsageError
from neumann.lab.storage import strict_json
from neumann.lab.storage.atomic_files import explain_os_errors, write_atomically
from neumann.lab.storage.field_types import Finite, find_wrong_field
from neumann.lab.storage.folders import FolderLock, make_folder_name, refuse_link
from neumann.lab.storage.reading import CONFIG, RESTORE, RecordsError, read_json_object
from neumann.lab.studies.settings import CompareConfig

COMPARISON, SWEEP, STUDY = "comparison.json", "sweep.json", "study.json"
SEARCH, FINAL = "search", "final"  # the two comparisons of a sweep
SWEEP_FORMAT = 1
MAX_SEEDS = 10_000  # more are a damaged number


@dataclass(frozen=True)
class ComparisonFile:
    """What comparison.json holds."""

    arms: list[str]
    seeds: int
    target: Finite | None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepFile:
    """What sweep.json holds."""

    format: int
    grid: dict[str, list[Finite]]  # learning rates by arm
    winners: dict[str, Finite] | None  # None while searching
    search_seeds: int
    seeds: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PointFile:
    folder: str  # relative to the study's
    values: dict[str, Any]  # by axis


@dataclass(frozen=True)
class StudyFile:
    """What study.json holds."""

    title: str
    about: str
    axes: dict[str, list[Any]]
    points: list[PointFile]


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARISON).is_file()


def get_run_folder(folder: Path, arm: str, seed: int) -> Path:
    found = folder / make_folder_name(get_name(arm)) / f"seed-{seed}"
    refuse_link(found.parent)
    refuse_link(found)
    return found


def get_part_folder(folder: Path, part: str) -> Path:
    """Return the folder of a sweep's search or final comparison."""
    refuse_link(folder / part)
    return folder / part


def describe_part(folder: Path, root: Path) -> str:
    """Name a comparison by the folders between its study's and its own."""
    between = folder.relative_to(root).parts
    return " ".join(part for part in between if part not in (SEARCH, FINAL))


def read_comparison_file(folder: Path) -> dict[str, Any]:
    content = _read_checked(folder / COMPARISON, ComparisonFile)
    return _refuse_many_seeds(folder / COMPARISON, content, len(content["arms"]))


def read_sweep_file(folder: Path) -> dict[str, Any]:
    if read_json_object(folder / SWEEP).get("format") != SWEEP_FORMAT:
        raise UsageError(f"{folder / SWEEP} is not a sweep that this version can read")
    content = _read_checked(folder / SWEEP, SweepFile)
    return _refuse_many_seeds(folder / SWEEP, content, len(content["grid"]))


def has_winners(folder: Path) -> bool:
    """Whether the folder holds a sweep that has chosen its learning rates."""
    return (folder / SWEEP).exists() and read_sweep_file(folder)["winners"] is not None


def read_study_file(folder: Path) -> dict[str, Any]:
    content = _read_checked(folder / STUDY, StudyFile)
    for point in content["points"]:
        name = point["folder"]
        if name != "." and (name != make_folder_name(name) or name.startswith(".")):
            wrong = f"{name!r:.40} is not the folder of a point"
            raise RecordsError(f"{folder / STUDY} is damaged: {wrong}; {RESTORE}")
    return content


def _read_checked(path: Path, kind: type[Any]) -> dict[str, Any]:
    content = read_json_object(path)
    wrong = find_wrong_field(content, kind)
    if wrong is not None:
        raise RecordsError(f"{path} is damaged: {wrong}; {RESTORE}")
    return content


def _refuse_many_seeds(path: Path, content: dict[str, Any], arms: int) -> dict[str, Any]:
    for key in ("seeds", "search_seeds"):
        seeds = content.get(key, 1)
        if not (1 <= seeds <= MAX_SEEDS and arms > 0):
            wrong = f"{arms} arms with {key} = {seeds}"
            raise RecordsError(f"{path} is damaged: it names {wrong}; {RESTORE}")
    return content


def lock_folder(folder: Path) -> FolderLock:
    """Create the folder of a study if needed, and reserve it for this process."""
    with explain_os_errors(UsageError, f"cannot write into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder)


def check_comparison_folder(folder: Path, config: CompareConfig) -> None:
    """Refuse a folder that holds something else, or a comparison with other shared settings."""
    check_no_other_study(folder, COMPARISON)
    if is_comparison(folder):
        before = read_comparison_file(folder).get("settings")
        now, defaults = _shared_settings(config), TrainingSettings().as_dict()
        check_same_settings(folder, "a comparison", before, now, defaults)


def write_comparison(folder: Path, config: CompareConfig) -> None:
    content = {key: getattr(config, key) for key in ("arms", "seeds", "target")}
    write_object(folder / COMPARISON, content | {"settings": _shared_settings(config)})


def _shared_settings(config: CompareConfig) -> dict[str, Any]:
    names = {field.name for field in fields(TrainingSettings)}
    return {key: value for key, value in config.as_record().items() if key in names}


def check_no_other_study(folder: Path, expected: str) -> None:
    """Refuse a folder with another main file than the `expected` one."""
    with_points = (folder / STUDY).exists() and read_study_file(folder)["axes"]
    files = {CONFIG: "a run", COMPARISON: "a comparison", SWEEP: "a sweep", STUDY: "a study"}
    for name, what in files.items():
        if name == STUDY and not with_points:
            continue  # only a title for the others
        if name != expected and (folder / name).exists():
            raise UsageError(f"{folder} already holds {what}; choose another folder")


def check_same_settings(
    folder: Path, study: str, before: Any, now: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Refuse other settings than those before. One that was not written then had its default."""
    now = strict_json.encode(now)
    if isinstance(before, dict):
        before = fill_in_defaults(before, now, strict_json.encode(defaults))
    refuse_difference(folder, f"{study} with other settings", strict_json.encode(before), now)


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object atomically, creating the folder if needed."""
    with explain_os_errors(UsageError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [strict_json.dumps(content, indent=2)])
