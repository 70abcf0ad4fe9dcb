"""What results/paper keeps of a run: one JSON line, in the file of its study.

A line has what verdicts and figures need: the setting that the study varies, the score, losses,
the curves of the score and of the training loss over the epochs, and for Neumann its two forces and
the norm of the gradient along the run. Runs of a search keep their score alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.ledger import Ledger, Run
from neumann.lab.contenders import get_name
from neumann.lab.metrics import choose_metric
from neumann.lab.storage.reading import is_finished
from neumann.lab.storage.run_files import RunFiles, Summary, read_run_files
from neumann.lab.studies.study_files import (
    COMPARISON,
    FINAL,
    SEARCH,
    STUDY,
    SWEEP,
    get_run_folder,
    read_comparison_file,
    read_study_file,
    read_sweep_file,
)

FORCE_POINTS = 24  # of a run, at which the forces are kept


@dataclass(frozen=True)
class RunKey:
    """Which run of a study it is."""

    stage: str  # "search" on held-out data, or "final" on the test set
    point: str  # on the axes, as its folder is called; empty without axes
    arm: str
    seed: int


class Results:
    """The runs in a folder such as results/paper, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ledgers: dict[str, Ledger[RunKey]] = {}

    def open(self, study: str) -> Ledger[RunKey]:
        if study not in self._ledgers:
            self._ledgers[study] = Ledger(self.folder / f"{study}.jsonl", RunKey)
        return self._ledgers[study]

    def find(self, study: str, arm: str, point: str = "") -> dict[int, Run]:
        """The runs of an arm on the test set, by seed."""
        return self.open(study).find_seeds(RunKey(FINAL, point, arm, 0))


def name_point(**values: Any) -> str:
    """The folder of a point, as `neumann study` calls it."""
    return ",".join(f"{key}={value}" for key, value in values.items())


def collect_study(folder: Path) -> dict[RunKey, Run]:
    """Read all finished runs in the folder of a study, which may still be running."""
    points = [""]
    if (folder / STUDY).exists():
        found = [point["folder"] for point in read_study_file(folder)["points"]]
        points = ["" if point == "." else point for point in found]
    runs: dict[RunKey, Run] = {}
    for point in points:
        runs |= _list_lost(_find_sweep(folder, point, points), point)
        for stage, place in (
            (SEARCH, folder / point / SEARCH),
            (FINAL, folder / point / FINAL),
            (FINAL, folder / point),
        ):
            if (place / COMPARISON).exists():
                runs |= _collect_comparison(place, stage, point)
    return runs


def _find_sweep(folder: Path, point: str, points: Sequence[str]) -> Path:
    """The folder of the search whose rates a point takes: its own, or that of the nearest point."""
    values = set(point.split(","))
    found = [each for each in points if (folder / each / SWEEP).exists()]
    nearest = max(found, key=lambda each: len(values & set(each.split(","))), default=point)
    return folder / nearest


def _list_lost(folder: Path, point: str) -> dict[RunKey, Run]:
    """The runs that an arm would have had on the test set: it diverged at every learning rate."""
    if not (folder / SWEEP).exists():
        return {}
    content = read_sweep_file(folder)
    winners = content["winners"]
    if winners is None:  # the search has not ended
        return {}
    return {
        RunKey(FINAL, point, get_name(arm), seed): {"diverged": True}
        for arm in content["grid"]
        if arm not in winners
        for seed in range(content["seeds"])
    }


def _collect_comparison(folder: Path, stage: str, point: str) -> dict[RunKey, Run]:
    content = read_comparison_file(folder)
    places = {
        RunKey(stage, point, get_name(arm), seed): get_run_folder(folder, arm, seed)
        for arm in content["arms"]
        for seed in range(content["seeds"])
    }
    return {
        key: describe_run(read_run_files(place), curves=stage == FINAL)
        for key, place in places.items()
        if is_finished(place)
    }


def describe_run(files: RunFiles, *, curves: bool) -> Run:
    """What is kept of a run that has ended."""
    config, result = files.config, files.result
    metric = choose_metric(config)
    kept: Run = {
        key: config[key]
        for key in ("data", "model", "opt", "lr", "epochs", "batch_size")
        if key in config
    }
    if "data" in kept:  # without the folders of the machine
        kind, colon, files_named = kept["data"].partition(":")
        names = ",".join(Path(name).name for name in files_named.split(","))
        kept["data"] = f"{kind}{colon}{names}"
    if isinstance(result, Summary):
        kept |= {
            "score": getattr(result, metric.key),
            "accuracy_recalibrated": result.accuracy_recalibrated,
            "train_loss": result.train_loss,
            "loss": result.loss,
            "steps": result.steps,
            "seconds": round(result.seconds, 2),
            "gradients": result.gradients,
            "products": result.products,
        }
    else:
        kept["diverged"] = True
    if curves:
        epochs = [line for line in files.lines if line["kind"] == "epoch"]
        kept["curve"] = _round([line.get(metric.key) for line in epochs])
        recalibrated = [line.get("accuracy_recalibrated") for line in epochs]
        if any(value is not None for value in recalibrated):
            kept["recalibrated_curve"] = _round(recalibrated)
        kept["train_loss_curve"] = _round([line.get("train_loss") for line in epochs])
        kept["forces"] = _sample_forces(files)
    kept |= _describe_origin(files.environment)
    return {key: value for key, value in kept.items() if value not in (None, [])}


def _describe_origin(environment: Mapping[str, Any]) -> Run:
    """Commit, torch and device: without git, as on a rented machine, the commit is missing."""
    hardware = environment.get("hardware") or {}
    return {
        "commit": (environment.get("git") or {}).get("commit"),
        "torch": (environment.get("versions") or {}).get("torch"),
        "device": (hardware.get("gpu") or {}).get("name") or hardware.get("cpu"),
    }


def _sample_forces(files: RunFiles) -> list[list[float | None]]:
    """The share of the run, the cubic and the repulsive force, and the norm of the gradient."""
    lines = [
        line
        for line in files.lines
        if line["kind"] == "step" and line.get("optimizer") and line["optimizer"]["groups"]
    ]
    if not lines:
        return []
    total = files.summary.get("steps", lines[-1]["step"]) if files.summary else lines[-1]["step"]
    count = min(FORCE_POINTS, len(lines))
    chosen = [lines[round(k * (len(lines) - 1) / max(count - 1, 1))] for k in range(count)]
    found = []
    for line in chosen:
        group = line["optimizer"]["groups"][0]
        forces = (group["cubic_force"], group["repulsive_force"], line.get("gradient_norm"))
        found.append(_round([line["step"] / total, *forces]))
    return found


def _round(values: Sequence[float | None]) -> list[float | None]:
    """Four digits are enough for a curve; what is missing or not finite is None."""
    return [
        None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
        for value in values
    ]
