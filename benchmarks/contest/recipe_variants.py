"""Which variants of the recipe are better on held-out images? Several seeds, data sets, networks.

    python -m benchmarks.contest.recipe_variants train --data-dir data --seeds 5
    python -m benchmarks.contest.recipe_variants train --data cifar100 --data-dir data --only …
    python -m benchmarks.contest.recipe_variants table

24 epochs at batch 8192. "one for all" is one spectral P for all layers with the setting that the
contest chose, and Muon has its setting of recipe_images; both show what the recipe has to reach.
A run without a training loss was restored from the log: its ledger was lost.
Runs are lines of results/recipe-variants.jsonl and are not repeated.
"""

import argparse
import dataclasses
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import Ledger, Run, Runner
from benchmarks.common.markdown import format_difference, format_table
from benchmarks.common.script import describe_origin
from benchmarks.contest import entrants
from benchmarks.contest.entrants import Setting, read_accuracy
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from benchmarks.contest.trainer import create_training_parser
from neumann.lab.config import TrainConfig
from neumann.lab.studies.statistics import paired_difference, select_common_seeds
from neumann.optim.groups import MOMENTUM_NORMALIZED
from neumann.optim.recipe import RAMP

RESULTS = Path("results/recipe-variants.jsonl")
BATCH, EPOCHS = 8192, 24
CLASSES = {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True)
class Variant:
    """What differs from the recipe."""

    options: str = ""  # of the arm neumann-spectral
    ramp: float = RAMP  # of the epochs
    sched: str = "linear"
    by_class: bool = False  # the output layer's rate falls with the root of the number of classes


# Each names its momentum before P. Of those that name nothing else, one is today's recipe.
VARIANTS = {
    "momentum 0.8": Variant("before=0.8"),
    "momentum 0.8, output by class": Variant("before=0.8", by_class=True),
    "momentum 0.8, output by class × 2": Variant("before=0.8,output=2", by_class=True),
    "momentum 0.8, vectors / 3": Variant("before=0.8,vector=0.3333"),
    "momentum 0.8, decayed vectors": Variant("before=0.8,decay_norms=true"),
    "momentum 0.8, long ramp": Variant("before=0.8", ramp=1 / 6),
    "momentum 0.6": Variant("before=0.6"),
    "momentum 0.6, output × 2": Variant("before=0.6,output=2"),
    "momentum 0.6, output by class": Variant("before=0.6", by_class=True),
    "momentum 0.6, output by class × 2": Variant("before=0.6,output=2", by_class=True),
    "momentum 0.6, vectors / 3": Variant("before=0.6,vector=0.3333"),
    "momentum 0.6, power 0.7": Variant("before=0.6", sched="power:0.7"),
    "momentum 0.6, power 0.5": Variant("before=0.6", sched="power:0.5"),
    "momentum 0.4": Variant("before=0.4"),
    "momentum 0.4, output by class": Variant("before=0.4", by_class=True),
}
TODAY = f"momentum {MOMENTUM_NORMALIZED}"
REFERENCES = {
    "one for all": ("Neumann spectral", Setting(0.015, decay=5.0, momentum=0.6)),
    "Muon": ("Muon", Setting(0.04 / 2**0.5, decay=2.0, momentum=0.6)),
}
ARMS = (*VARIANTS, *REFERENCES)


@dataclass(frozen=True)
class RunKey:
    """What identifies a run."""

    data: str
    model: str
    arm: str
    seed: int = 0


class VariantTrainer(RecipeTrainer):
    """Trains variants and references on one data set, scored on held-out images."""

    def train_arm(self, key: RunKey) -> Run:
        self._arm = key.arm
        entrant, setting = REFERENCES.get(key.arm, (OURS, make_recipe()))
        print(key.data, key.arm, end="  ", flush=True)
        return self.train(
            entrants.RunKey("search", key.model, BATCH, EPOCHS, entrant, setting, key.seed)
        )

    def configure(self, key: entrants.RunKey) -> TrainConfig:
        config = super().configure(key)
        if key.entrant != OURS:
            return config
        variant = VARIANTS[self._arm]
        named = dict(option.split("=") for option in variant.options.split(",") if option)
        if variant.by_class:
            factor = float(named.get("output", 1)) * (10 / CLASSES[self._data]) ** 0.5
            named["output"] = f"{factor:.4g}"
        options = "".join(f",{name}={value}" for name, value in named.items())
        return dataclasses.replace(
            config,
            opt=config.opt + options,
            ramp_epochs=EPOCHS * variant.ramp,
            sched=variant.sched,
        ).resolve()


def print_table(ledger: Ledger[RunKey]) -> None:
    rows = []
    for data, model in sorted({(key.data, key.model) for key in ledger.runs}):
        runs = {arm: ledger.find_seeds(RunKey(data, model, arm)) for arm in ARMS}
        scores = {
            arm: {seed: read_accuracy(run) for seed, run in found.items()}
            for arm, found in runs.items()
            if found
        }
        for arm, own in sorted(
            scores.items(), key=lambda item: -statistics.fmean(item[1].values())
        ):
            row = [data, model, arm, str(len(own)), f"{statistics.fmean(own.values()):.2f}"]
            losses = [run["train_loss"] for run in runs[arm].values() if "train_loss" in run]
            row.append(f"{statistics.fmean(losses):.3f}" if losses else "")
            lead = paired_difference(*select_common_seeds(own, scores.get(TODAY, {})))
            row.append("" if arm == TODAY else format_difference(lead.mean, lead.low, lead.high))
            rows.append(row)
    heads = ("data", "network", "arm", "n", "held out, %", "training loss", f"against {TODAY}")
    print(format_table(heads, "lllrrrr", rows))


def main() -> None:
    parser = create_training_parser(__doc__, RESULTS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, metavar="ARM")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parse_shared(parser)
    ledger = Ledger(arguments.results, RunKey, describe_origin(arguments.commit))
    if arguments.stage == "train":
        train_all(arguments, ledger)
    print_table(ledger)


def train_all(arguments: argparse.Namespace, ledger: Ledger[RunKey]) -> None:
    trainer = VariantTrainer(arguments.data, arguments.data_dir)
    runner = Runner(ledger, trainer.train_arm, seconds=arguments.seconds, share=arguments.share)
    for seed, arm in itertools.product(range(arguments.seeds), arguments.only):
        runner.run(RunKey(arguments.data, arguments.model, arm, seed))


if __name__ == "__main__":
    main()
