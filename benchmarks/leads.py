"""What the series could gain under the spectral P: every lead beside it as it is.

    python benchmarks/leads.py --batch 8192 --data-dir data --seeds 3
    python benchmarks/leads.py --batch 8192 --table

ResNet-9 on CIFAR-10, scored on the 5,000 held-out training images with the setting that the
contest chose for the batch size (`large_batch`, whose book tells it) and the length of its
searches; where a lead changes the momentum μ, lr/(1 − μ) and lr·decay stay; where it changes lr,
lr·decay does. Every run is a line in results/leads.jsonl; one that is there is not repeated.
"""

import argparse
import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from environment import origin
from large_batch import RESULTS, Contest, Trainer, add_training_arguments
from ledger import Key, Ledger, Setting
from markdown_cells import cell, difference, line

from neumann.lab.config import TrainConfig
from neumann.lab.optimizers import Arm
from neumann.lab.outcome import Summary
from neumann.lab.statistics import common_seeds, paired_difference
from neumann.lab.training import Training

OURS = "Neumann spectral"
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Lead:
    """One change. `options` are the arm's; `momentum` is μ."""

    options: dict[str, Any] = field(default_factory=dict)
    momentum: float | None = None
    lr: float | None = None
    average: bool = False  # score the average v of the weights, not w − μm
    drift: float | None = None  # ρ of the scale-free repulsion


def preconditioner(name: str) -> Lead:
    return Lead({"precondition": f"lead_preconditioners:{name}"})


def averaged(decay: float) -> Lead:
    """The average is kept where there is a force: one too weak to matter."""
    return Lead({"cubic": 1e-30, "average": decay}, average=True)


def drifting(drift: float, decay: float = 0.99) -> Lead:
    """Away from the average, by the scale-free repulsion."""
    return Lead({"repulsive": 1e-30, "average": decay}, drift=drift)


LEADS = {
    AS_IT_IS: Lead(),
    "no momentum before P": preconditioner("without_momentum"),
    "momentum 0.3 before P": preconditioner("short_momentum"),
    "momentum 0.8 before P": preconditioner("long_momentum"),
    "first layer diagonal": preconditioner("FirstDiagonal"),
    "classifier diagonal": preconditioner("ClassifierDiagonal"),
    "rows made equal": preconditioner("EqualRows"),
    "UVᵀ to three digits": preconditioner("Polished"),
    "vectors five times as fast": preconditioner("quick_vectors"),
    "GGᵀ accumulated, 0.5": preconditioner("briefly_accumulated"),
    "GGᵀ accumulated, 0.9": preconditioner("Accumulated"),
    "Adam in the basis of GGᵀ": preconditioner("Rotated"),
    "μ = 0": Lead(momentum=0.0),
    "μ = 0.4": Lead(momentum=0.4),
    "μ = 0.8": Lead(momentum=0.8),
    "η = 1.45/λ_max of PH": Lead(lr=0.002),  # `preconditioned_spectrum`
    "warm-up of an epoch": Lead({"warmup_epochs": 1}),
    "resets after 4, 12 epochs": Lead({"reset_steps": None, "reset_epochs": 4}),
    "the paper's forces": Lead({"cubic": 1e-7, "repulsive": 1e-5}),
    "drift ρ = 0.3": drifting(0.3),
    "drift ρ = 0.1 from 10 steps": drifting(0.1, 0.9),
    "drift ρ = 0.3 from 10 steps": drifting(0.3, 0.9),
    "drift ρ = 1 from 10 steps": drifting(1.0, 0.9),
    "average of 5 steps": averaged(0.8),
    "average of 20 steps": averaged(0.95),
    "decay of norms too": Lead({"decay_norms": True}),
}


class LeadTrainer(Trainer):
    """Trains our arm with one change."""

    def _config(self, key: Key) -> TrainConfig:
        lead = LEADS[key.entrant]
        config = super()._config(dataclasses.replace(key, stage="search", entrant=OURS))
        arm = Arm.parse(config.opt).with_options(**lead.options)
        return dataclasses.replace(config, opt=str(arm))

    def _outcome(self, key: Key, training: Training, folder: Path) -> Summary:
        lead = LEADS[key.entrant]
        if lead.drift is not None:
            training.optimizer.register_step_pre_hook(repulsion_for(lead.drift))
        outcome = training.run(folder)
        if not lead.average:
            return outcome
        plain, recalibrated = at_the_average(training)
        return dataclasses.replace(outcome, accuracy=plain, accuracy_recalibrated=recalibrated)


def repulsion_for(drift: float) -> Any:
    """Each step anew β = ρ³‖w‖³(1 − γ)(1 − μ)/(γη): repulsion alone would settle at r = ρ‖w‖."""

    def before_a_step(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        tensors = [p for each in optimizer.param_groups for p in each["params"]]
        norm = float(torch.stack(torch._foreach_norm(tensors)).norm())
        lr, momentum, average = float(group["lr"]), group["momentum"], group["average"]
        beta = (drift * norm) ** 3 * (1 - average) * (1 - momentum) / (average * max(lr, 1e-12))
        for each in optimizer.param_groups:
            each["repulsive"] = beta / len(tensors)

    return before_a_step


def at_the_average(training: Training) -> tuple[float, float | None]:
    """The accuracy of v after a run, with the running statistics and with its own."""
    optimizer: Any = training.optimizer
    average = optimizer.average_params()
    optimizer.eval()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        for p, v in zip(parameters, average, strict=True):
            p.copy_(v)
    plain, recalibrated = training._evaluate()
    return plain.accuracy, None if recalibrated is None else recalibrated.accuracy


def setting_of(lead: Lead, chosen: Setting) -> Setting:
    if lead.momentum is None and lead.lr is None:
        return chosen
    momentum = chosen.momentum if lead.momentum is None else lead.momentum
    lr = lead.lr or chosen.lr * (1 - momentum) / (1 - chosen.momentum)
    return Setting(lr, chosen.decay * chosen.lr / lr, momentum)  # the same lr·decay


def table(ledger: Ledger, keys: dict[str, list[Key]]) -> str:
    """Means over seeds and the paired difference to the arm as it is."""
    heads = ["", "held out, %", "n", "training loss", "difference", "p"]
    lines = [heads, ["---", *["--:"] * 5]]
    scores = {
        name: {key.seed: ledger.score(key) for key in own if key in ledger.runs}
        for name, own in keys.items()
    }
    for name, own in scores.items():
        if not own:
            continue
        runs = [ledger.runs[key] for key in keys[name] if key in ledger.runs]
        loss = statistics.fmean(run.get("train_loss", math.nan) for run in runs)
        cells = [name, f"{statistics.fmean(own.values()):.2f}", str(len(own)), f"{loss:.3f}"]
        if name == AS_IT_IS:
            cells += ["", ""]
        else:
            d = paired_difference(*common_seeds(own, scores[AS_IT_IS]))
            cells += [difference(d.mean, d.low, d.high), cell(d.p, "{:.2g}")]
        lines.append(cells)
    return "\n".join(map(line, lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--leads", nargs="+", default=list(LEADS), choices=list(LEADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="for a trial of this script")
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--setting", type=float, nargs=3, help="lr, decay and momentum instead")
    parser.add_argument("--contest", type=Path, default=RESULTS)
    add_training_arguments(parser, Path("results/leads.jsonl"))
    parser.set_defaults(once=False)  # the contest's choice is that of both its searches
    arguments = parser.parse_args()
    ledger = Ledger(arguments.results, origin(arguments.commit))
    trainer = LeadTrainer(ledger, arguments)
    contest = Contest(Ledger(arguments.contest, {}), trainer, arguments)
    given = arguments.setting
    chosen = Setting(*given) if given else contest.chosen(OURS, arguments.batch)
    if chosen is None:
        raise SystemExit(f"the contest has not chosen a setting for batch {arguments.batch} yet")
    epochs = contest.search(OURS, arguments.batch).epochs
    keys = {
        name: [
            Key("lead", arguments.model, arguments.batch, epochs, name, setting, seed)
            for setting in [setting_of(LEADS[name], chosen)]
            for seed in range(arguments.seeds)
        ]
        for name in arguments.leads
    }
    for seed in range(0 if arguments.table else arguments.seeds):
        for name in arguments.leads:
            trainer.take(keys[name][seed])
    ledger.refresh()
    print(table(ledger, keys))


if __name__ == "__main__":
    main()
