"""What the spectral form could gain: one change at a time, compared with the default.

    python -m benchmarks.ablations.spectral_variants --batch 8192 --data-dir data --seeds 3
    python -m benchmarks.ablations.spectral_variants --batch 8192 --table

ResNet-9 on CIFAR-10, scored on the 5,000 held-out training images, with the setting that the
contest chose for the batch size and runs as long as its searches. A variant that changes the
momentum μ keeps lr/(1 − μ) and lr·decay; one that changes lr keeps lr·decay. Every run is a line in
results/spectral-variants.jsonl and is not repeated.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from benchmarks.common.jobs import parse_shared
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.entrants import RESULTS, ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.stages import Contest, ContestOptions
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner
from neumann.lab.config import TrainConfig
from neumann.lab.optimizers.arms import Arm
from neumann.lab.storage.run_files import Summary
from neumann.lab.studies.statistics import paired_difference, select_common_seeds
from neumann.lab.training.loop import Training

ENTRANT = "Neumann spectral"
BASELINE = "as it is"  # the name under which the ledger has it


@dataclass(frozen=True)
class Variant:
    """One change to the spectral form."""

    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    momentum: float | None = None  # μ
    lr: float | None = None
    average: bool = False  # score the average v of the weights, not w − μm
    drift: float | None = None  # ρ of the scale-free repulsion

    def apply_to(self, setting: Setting) -> Setting:
        """The contest's setting, changed as the variant says."""
        if self.momentum is None and self.lr is None:
            return setting
        momentum = setting.momentum if self.momentum is None else self.momentum
        lr = self.lr or setting.lr * (1 - momentum) / (1 - setting.momentum)
        return Setting(lr, setting.decay * setting.lr / lr, momentum)


def with_preconditioner(name: str) -> Variant:
    return Variant({"precondition": f"benchmarks.ablations.variant_preconditioners:{name}"})


def with_average(decay: float) -> Variant:
    """Scores the average. It exists only if there is a force, so this adds a negligible one."""
    return Variant({"cubic": 1e-30, "average": decay}, average=True)


def with_drift(drift: float, decay: float = 0.99) -> Variant:
    return Variant({"repulsive": 1e-30, "average": decay}, drift=drift)


VARIANTS = {
    BASELINE: Variant(),
    "no momentum before P": with_preconditioner("without_momentum"),
    "momentum 0.3 before P": with_preconditioner("short_momentum"),
    "momentum 0.8 before P": with_preconditioner("long_momentum"),
    "first layer diagonal": with_preconditioner("FirstDiagonal"),
    "classifier diagonal": with_preconditioner("ClassifierDiagonal"),
    "rows made equal": with_preconditioner("EqualRows"),
    "UVᵀ to three digits": with_preconditioner("Polished"),
    "vectors five times as fast": with_preconditioner("quick_vectors"),
    "GGᵀ accumulated, 0.5": with_preconditioner("briefly_accumulated"),
    "GGᵀ accumulated, 0.9": with_preconditioner("Accumulated"),
    "Adam in the basis of GGᵀ": with_preconditioner("Rotated"),
    "μ = 0": Variant(momentum=0.0),
    "μ = 0.4": Variant(momentum=0.4),
    "μ = 0.8": Variant(momentum=0.8),
    # benchmarks.spectrum.preconditioned_hessian measures λ_max.
    "η = 1.45/λ_max of PH": Variant(lr=0.002),
    "warm-up of an epoch": Variant({"warmup_epochs": 1}),
    "resets after 4, 12 epochs": Variant({"reset_steps": None, "reset_epochs": 4}),
    "the paper's forces": Variant({"cubic": 1e-7, "repulsive": 1e-5}),
    "drift ρ = 0.3": with_drift(0.3),
    "drift ρ = 0.1 from 10 steps": with_drift(0.1, 0.9),
    "drift ρ = 0.3 from 10 steps": with_drift(0.3, 0.9),
    "drift ρ = 1 from 10 steps": with_drift(1.0, 0.9),
    "average of 5 steps": with_average(0.8),
    "average of 20 steps": with_average(0.95),
    "decay of norms too": Variant({"decay_norms": True}),
}


class VariantTrainer(Trainer):
    """Trains the variant that a key names."""

    def configure(self, key: RunKey) -> TrainConfig:
        config = super().configure(dataclasses.replace(key, stage="search", entrant=ENTRANT))
        arm = Arm.parse(config.opt).with_options(**VARIANTS[key.entrant].options)
        return dataclasses.replace(config, opt=str(arm))

    def fit(self, key: RunKey, training: Training, folder: Path) -> Summary:
        variant = VARIANTS[key.entrant]
        if variant.drift is not None:
            training.learner.optimizer.register_step_pre_hook(make_repulsion_hook(variant.drift))
        summary = training.run(folder)
        if not variant.average:
            return summary
        plain, recalibrated = evaluate_average(training)
        return dataclasses.replace(summary, accuracy=plain, accuracy_recalibrated=recalibrated)


def make_repulsion_hook(drift: float) -> Callable[..., None]:
    """Sets β = ρ³‖w‖³(1 − γ)(1 − μ)/(γη) before each step.

    With this β, repulsion alone would settle at r = ρ‖w‖.
    """

    def set_repulsion(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        tensors = [p for each in optimizer.param_groups for p in each["params"]]
        norm = float(get_total_norm(tensors))
        lr, momentum, average = float(group["lr"]), group["momentum"], group["average"]
        beta = (drift * norm) ** 3 * (1 - average) * (1 - momentum) / (average * max(lr, 1e-12))
        for each in optimizer.param_groups:
            each["repulsive"] = beta / len(tensors)

    return set_repulsion


def evaluate_average(training: Training) -> tuple[float, float | None]:
    """The accuracy of v after a run, with running and with recalibrated BatchNorm statistics."""
    optimizer: Any = training.learner.optimizer
    average = optimizer.average_params()
    optimizer.eval()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        for p, v in zip(parameters, average, strict=True):
            p.copy_(v)
    plain, recalibrated = training.learner.evaluate()
    return plain.accuracy, None if recalibrated is None else recalibrated.accuracy


def format_scores(ledger: ContestLedger, keys: dict[str, list[RunKey]]) -> str:
    """Means over seeds, and the paired difference to the baseline."""
    runs = {
        name: {key.seed: ledger.runs[key] for key in own if key in ledger.runs}
        for name, own in keys.items()
    }
    scores = {
        name: {seed: read_accuracy(run) for seed, run in own.items()} for name, own in runs.items()
    }
    rows = []
    for name, own in scores.items():
        if not own:
            continue
        loss = statistics.fmean(run.get("train_loss", math.nan) for run in runs[name].values())
        cells = [name, f"{statistics.fmean(own.values()):.2f}", str(len(own)), f"{loss:.3f}"]
        if name == BASELINE:
            cells += ["", ""]
        else:
            found = paired_difference(*select_common_seeds(own, scores[BASELINE]))
            cells.append(format_difference(found.mean, found.low, found.high))
            cells.append(format_cell(found.p, "{:.2g}"))
        rows.append(cells)
    heads = ["", "held out, %", "n", "training loss", "difference", "p"]
    return format_table(heads, "lrrrrr", rows)


def main() -> None:
    parser = create_training_parser(
        __doc__,
        Path("results/spectral-variants.jsonl"),
        "use this setting instead of the contest's",
    )
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    parser.add_argument("--contest", type=Path, default=RESULTS, help="the contest's ledger")
    arguments = parse_shared(parser)
    options = ContestOptions(epochs=arguments.epochs)
    contest = Contest(ContestLedger(arguments.contest), None, options)
    given = arguments.setting
    chosen = Setting(*given) if given else contest.find_chosen(ENTRANT, arguments.batch)
    if chosen is None:
        raise SystemExit(f"the contest has not chosen a setting for batch {arguments.batch} yet")
    epochs = contest.search(ENTRANT, arguments.batch).epochs
    keys = {
        name: [
            RunKey("lead", arguments.model, arguments.batch, epochs, name, setting, seed)
            for setting in [VARIANTS[name].apply_to(chosen)]
            for seed in range(arguments.seeds)
        ]
        for name in arguments.variants
    }
    ledger, runner = open_runner(arguments, VariantTrainer)
    for seed in range(0 if arguments.table else arguments.seeds):
        for name in arguments.variants:
            runner.run(keys[name][seed])
    ledger.refresh()
    print(format_scores(ledger, keys))


if __name__ == "__main__":
    main()
