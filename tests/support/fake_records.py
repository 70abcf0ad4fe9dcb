"""Records of runs that never took place, written the way the lab writes them."""

import json
import math
from functools import cache
from pathlib import Path

from neumann.lab.config import TrainConfig
from neumann.lab.contenders import get_name
from neumann.lab.optimizers.arms import Arm
from neumann.lab.storage import strict_json
from neumann.lab.studies.study_files import get_run_folder
from neumann.lab.training.records import Records

PER_EPOCH = 20
SCORES = ("accuracy", "accuracy_recalibrated", "loss", "perplexity", "bits_per_byte", "top5")


def fake_run(
    folder: Path,
    opt: str = "sgd",
    seed: int = 0,
    *,
    epochs: int = 6,
    ended: int | None = None,  # recorded epochs; if fewer than all, there is no summary
    best: float = 97.0,  # %, the accuracy that it approaches
    batchnorm: bool = False,
    diverged: int | None = None,  # the step
    log_every: int = 7,
    target: float | None = None,
    spectrum: int = 0,  # steps between measurements of the curvature
    timetable: bool = True,  # False: as before runs recorded their timetable
    **settings,
) -> Path:
    """Write one run, deterministic in its arguments."""
    text = str(settings.get("data", "")).startswith("text:")
    config = TrainConfig(opt="sgd", seed=seed, epochs=epochs, target=target, device="cpu")
    values = {**config.resolve().as_dict(), "opt": opt, "lr": _lr(opt)}
    values |= {"log_every": log_every, "spectrum_every": spectrum, **settings}
    for key in ("output", "resume", "download", "workers"):
        values.pop(key, None)
    last = epochs if ended is None else ended
    steps = min(last * PER_EPOCH, math.inf if diverged is None else diverged - 1)
    with Records(folder).begin(values) as records:
        if timetable and opt.startswith("neumann"):
            warmup, resets = _timetable(opt)
            planned = [step for step in resets if step <= epochs * PER_EPOCH]
            records.append(kind="timetable", step=0, warmup_steps=warmup, resets=planned)
        if spectrum:
            records.append(**_spectrum_line(0, opt, seed, values["lr"], epochs))
        for step in range(1, int(steps) + 1):
            if step % log_every == 0 or step % PER_EPOCH == 0:
                records.append(**_step_line(step, opt, seed, values["lr"], epochs))
            if spectrum and step % spectrum == 0:
                records.append(**_spectrum_line(step, opt, seed, values["lr"], epochs))
            if step % PER_EPOCH == 0:
                records.append(**_epoch_line(step, opt, seed, best, batchnorm, text))
        if diverged is not None:
            failure = {"step": diverged, "lr": values["lr"], "checkpoint": None}
            records.finish({"diverged": failure})
        elif last == epochs:
            line = _epoch_line(last * PER_EPOCH, opt, seed, best, batchnorm, text)
            reached = None if target is None or line["accuracy"] < target else 2 * PER_EPOCH
            records.finish(
                {key: line[key] for key in SCORES if key in line}
                | {"train_loss": line["train_loss"], "steps": last * PER_EPOCH}
                | {"seconds": line["seconds"], "compile_seconds": 0.0, "steps_to_target": reached}
                | {"epochs_to_target": None if reached is None else 2.0}
            )
    return folder


def fake_comparison(
    folder: Path, arms: dict[str, dict], seeds: int = 3, *, target: float | None = None, **common
) -> Path:
    """Write a comparison of arms, given the arguments of their runs.

    An arm's `only` says how many of its seeds have started, `diverged_seeds` which diverged.
    """
    for index, (arm, given) in enumerate(arms.items()):
        options = {"best": 97.0 - 0.4 * index, **common, **given}
        started = options.pop("only", seeds)
        failed = options.pop("diverged_seeds", ())
        for seed in range(started):
            run = {**options, "diverged": 33} if seed in failed else options
            opt = arm.removeprefix(f"{get_name(arm)}=")
            fake_run(get_run_folder(folder, arm, seed), opt, seed, target=target, **run)
    settings = {"data": "digits", "model": "mlp", "lr": None, "epochs": common.get("epochs", 6)}
    settings |= {key: common[key] for key in ("data", "tokens") if key in common}
    content = {"arms": list(arms), "seeds": seeds, "target": target, "settings": settings}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_bytes(strict_json.dumps(content))
    return folder


def fake_sweep(
    folder: Path,
    grid: dict[str, list[float]],
    winners: dict[str, float] | None,
    *,
    search_seeds: int = 2,
    seeds: int = 3,
    final: bool = True,
    peak: float = 0.4,
    wild: float = 3.0,  # learning rates above it diverge
) -> Path:
    """Write a sweep whose accuracy is best at the learning rate `peak`."""
    arms = {}
    for text, rates in grid.items():
        for lr in rates:
            # Adam needs about a hundredth of SGD's learning rate.
            middle = peak / 100 if text.startswith("adam") else peak
            best = 97.0 - len(text) % 3 - 1.5 * math.log(lr / middle) ** 2
            given = {"best": best, "held_out": True, "epochs": 2}
            arms[str(Arm.parse(text).with_options(lr=lr))] = given | (
                {"diverged": 9} if lr > wild else {}
            )
    fake_comparison(folder / "search", arms, search_seeds)
    if winners is not None and final:
        chosen = [str(Arm.parse(text).with_options(lr=lr)) for text, lr in winners.items()]
        fake_comparison(folder / "final", {arm: {} for arm in chosen}, seeds)
    content = {
        "format": 1,
        "grid": grid,
        "winners": winners,
        "search_seeds": search_seeds,
        "seeds": seeds,
    }
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def fake_study(
    folder: Path, arms: dict[str, dict], points: list[str], axes: dict | None = None
) -> Path:
    """Write a study with axes, whose last point has not started."""
    for name in points[:-1]:
        fake_comparison(folder / name, arms, seeds=3, epochs=2)
    values = [dict(pair.split("=") for pair in name.split(",")) for name in points]
    values = [{key: int(value) for key, value in each.items()} for each in values]
    content = {
        "title": "Batches",
        "about": "A & B.",
        "axes": axes or {"batch_size": [each["batch_size"] for each in values]},
        "points": [{"folder": n, "values": v} for n, v in zip(points, values, strict=True)],
    }
    folder.mkdir(exist_ok=True)
    (folder / "study.json").write_text(json.dumps(content))
    return folder


def _lr(opt: str) -> float:
    try:
        return Arm.parse(opt).lr()
    except ValueError:
        return 0.1


def _noise(step: int, seed: int, opt: str) -> float:
    return math.sin(12.9898 * step + 78.233 * seed + len(opt)) * 0.3


def _step_line(step: int, opt: str, seed: int, lr: float, epochs: int) -> dict:
    share = step / (epochs * PER_EPOCH)
    line = {
        "kind": "step",
        "step": step,
        "epoch": step / PER_EPOCH,
        "lr": lr * (1 - (step - 1) / (epochs * PER_EPOCH)),
        "train_loss": 2.3 * math.exp(-6 * share) * (1 + 0.3 * _noise(step, seed, opt)),
    }
    if opt.startswith("neumann"):
        line["optimizer"] = _diagnostics(step, opt, lr)
    return line


def _spectrum_line(step: int, opt: str, seed: int, lr: float, epochs: int) -> dict:
    share = step / (epochs * PER_EPOCH)
    largest = (2 + 60 * share) * (1 + 0.3 * _noise(step, seed, opt)) * (1 + 0.2 * len(opt) % 1)
    line = {
        "kind": "spectrum",
        "step": step,
        "epoch": step / PER_EPOCH,
        "lr": lr * (1 - max(step - 1, 0) / (epochs * PER_EPOCH)),
        "momentum": 0.9,
    }
    for batch, factor in (("probe", 1.0), ("current", 1.2)):
        top, low = factor * largest, -factor * (1.5 - share)
        converged = step % 3 != 0
        error = 0.001 * top if converged else 0.1 * top
        line[batch] = {
            "examples": 64,
            "smallest": low,
            "smallest_error": error,
            "smallest_converged": converged,
            "largest": top,
            "largest_error": 1e-5 * top,
            "largest_converged": True,
            "products": 60 if converged else 100,
            "noise": 1e-6,
            "implied_momentum": top / (top - low),
            "implied_lr": 1 / top,
            "implied_momentum_outside": top / (top - low + error),
            "implied_lr_outside": 1 / (top + error),
        }
    return line


@cache
def _timetable(opt: str) -> tuple[int, list[int]]:
    """Return the warm-up and the resets of a Neumann arm, in steps counted from 1."""
    options = dict(Arm.parse(opt).options)
    usual = (5, 10) if options.get("precondition") is None else (0, 0)
    warmup = round(options.get("warmup_epochs", usual[0]) * PER_EPOCH)
    interval = options.get("reset_epochs", usual[1]) * PER_EPOCH
    resets = [warmup + 1]
    while interval and resets[-1] < 1000 * PER_EPOCH:
        resets.append(resets[-1] + round(interval))
        interval *= options.get("reset_growth", 2)
    return warmup, resets


def _diagnostics(step: int, opt: str, lr: float) -> dict:
    warmup, resets = _timetable(opt)
    t = max(step - warmup, 0)
    phase = "warm-up" if t == 0 else "reset" if step in resets else "iterate"
    following = next((reset for reset in resets if reset > step), None)
    distance = math.sqrt(step) / (1 + step / 200)
    return {
        "step": step,
        "skipped": 0,
        "phase": phase,
        "t": t,
        "distance": distance,
        "steps_to_reset": None if following is None else following - step,
        "groups": [
            {
                "lr": lr,
                "momentum": 0.9 if t else 0.0,
                "cubic_force": 1e-7 * distance**2,
                "repulsive_force": 0.0 if step < 10 else 1e-5 / distance**2,
            }
        ],
    }


def _epoch_line(step: int, opt: str, seed: int, best: float, batchnorm: bool, text: bool) -> dict:
    epoch = step // PER_EPOCH
    accuracy = best - 70 * math.exp(-1.3 * epoch) + _noise(step, seed, opt)
    loss = (100 - accuracy) / 30
    extras = {"perplexity": math.exp(loss), "bits_per_byte": loss / 2} if text else {}
    return {
        "kind": "epoch",
        "step": step,
        "epoch": epoch,
        "train_loss": 2.3 * math.exp(-epoch),
        "seconds": 0.5 * epoch * (1.3 if opt.startswith("neumann") else 1.0) + 0.02 * seed,
        "loss": loss,
        "accuracy": accuracy,
        **extras,
        "accuracy_recalibrated": accuracy + 0.6 if batchnorm else None,
    }
