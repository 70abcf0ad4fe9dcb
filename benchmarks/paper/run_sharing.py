"""Give a study the finished runs of other studies that are the same run, instead of training twice.

The baselines of some studies are those of others: shorter-runs repeats three arms of main-cifar10,
scaling at 512 two of them, scaling-epochs the search of scaling. "whole" in accumulation is
"neumann" in regularizers; "neumann" in sensitivity is "2.2%" in warm-up and "doubling K 4.4%" in
reset-interval. Runs are the same if all settings are that decide what they
compute, seed included, and if the lender was evaluated and logged at least as often. Settings such
as the device are part of a run. Which runs of the test are the same is known after the search.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neumann.lab.errors import UsageError
from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import (
    CONFIG,
    FORMAT,
    METRICS,
    SUMMARY,
    RecordsError,
    is_finished,
)
from neumann.lab.storage.run_files import read_run_files
from neumann.lab.studies.engine import Study
from neumann.lab.studies.study_files import write_object
from neumann.lab.studies.workers import get_output_folder
from neumann.lab.training.records import CHECKPOINTS

WATCHING = ("eval_every", "log_every")  # how closely a run is watched does not change it


def share_runs(study: Study, folders: Sequence[Path]) -> list[Path]:
    """Copy what is the same from the folders of other studies; return the new runs."""
    finished: dict[str, list[tuple[dict[str, Any], Path]]] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"**/seed-*/{SUMMARY}")):
            with contextlib.suppress(RecordsError, UsageError):  # a damaged run lends nothing
                config = read_run_files(path.parent).config
                finished.setdefault(make_key(config), []).append((config, path.parent))
    shared = []
    for run in study.list_runs():
        target, record = get_output_folder(run.config), run.config.as_record()
        alike = finished.get(make_key(record), []) if run.lr_is_known else []
        source = next((path for config, path in alike if is_watched(config, record)), None)
        begun = (target / CHECKPOINTS).exists() or is_finished(target)
        if source is not None and not begun:
            _copy_run(source, target, record)
            shared.append(target)
    return shared


def _copy_run(source: Path, target: Path, record: dict[str, Any]) -> None:
    """Copy a run under another config, so that it is there as a whole or not at all."""
    part = target.with_name(f".{target.name}.part")  # left by a copy that was cut short
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    content = {"config": record, "environment": read_run_files(source).environment}
    write_object(part / CONFIG, {"format": FORMAT, **content})
    for name in (METRICS, SUMMARY):
        if (source / name).exists():  # a run that diverged before its first line has no metrics
            shutil.copyfile(source / name, part / name)
    shutil.rmtree(target, ignore_errors=True)  # a run that has no checkpoint yet
    part.rename(target)


def make_key(config: dict[str, Any]) -> str:
    """What a run computes, as text. A micro-batch of the whole batch is none."""
    size = config.get("micro_batch_size")
    whole = size is None or size >= config["batch_size"]
    settings = {**config, "micro_batch_size": None if whole else size}
    kept = {name: value for name, value in settings.items() if name not in WATCHING}
    return strict_json.dumps(dict(sorted(kept.items()))).decode()


def is_watched(config: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a run was looked at whenever another one would be."""
    return all(wanted[name] % config[name] == 0 for name in WATCHING)
