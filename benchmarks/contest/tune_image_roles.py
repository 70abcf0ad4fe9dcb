"""Which rates and decay suit each role of an image network? A coordinate search on held-out images.

    python -m benchmarks.contest.tune_image_roles train --data-dir data --batch 8192 --seconds 600
    python -m benchmarks.contest.tune_image_roles train --start lr=0.02 --sweep forgetting …
    python -m benchmarks.contest.tune_image_roles table

The arm is `neumann-spectral`. benchmarks/common/recipe_space.py has the coordinates. --sweep trains
all values of a coordinate around the best point. Runs are lines of results/image-roles.jsonl and
are not repeated.
"""

import argparse
import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.coordinates import Point
from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import Ledger, MissingRunError, Run, Runner, refuse_other_data
from benchmarks.common.markdown import format_table
from benchmarks.common.recipe_space import SCALES, START, add_search_flags, search_recipe
from benchmarks.common.script import describe_origin
from benchmarks.contest.trainer import create_training_parser
from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.training.inputs import open_dataset
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import Diverged
from neumann.optim.groups import DEFAULTS
from neumann.optim.preconditioners import Diagonal

RESULTS = Path("results/image-roles.jsonl")
COORDINATES = ("lr", "forgetting", *SCALES, "momentum", "before", "ramp", "eps")


@dataclass(frozen=True)
class RunKey:
    """What identifies a run."""

    model: str
    batch: int
    epochs: int
    lr: float
    forgetting: float
    embedding: float
    output: float
    vector: float
    momentum: float
    before: float
    ramp: float
    seed: int = 0
    output_p: str = "diagonal"  # P of the output layer
    taps: float = 1.0  # power to which the taps of a kernel count as inputs; today's is 0.5
    eps: float = 1e-8  # ε of the diagonal P


class ImageTrainer:
    """Trains runs; keeps the data set in memory between them."""

    def __init__(self, data: str, data_dir: Path | None) -> None:
        self._data, self._data_dir = data, data_dir
        self._dataset: Dataset | None = None

    def train(self, key: RunKey) -> Run:
        """Train a run and return what to record."""
        self._dataset = self._dataset or open_dataset(self._configure(key, 1))
        config = self._configure(key, len(self._dataset.train) // key.batch)
        training = Training(config, Process(), self._dataset)
        change_eps(training.learner.optimizer, key.eps)
        with tempfile.TemporaryDirectory() as folder:
            try:
                summary = training.run(Path(folder) / "run")
            except Diverged as error:
                print(f"{key}  diverged", flush=True)
                return {"accuracy": 0.0, "diverged": error.step}
        recalibrated = summary.accuracy_recalibrated
        accuracy = summary.accuracy if recalibrated is None else recalibrated
        print(f"{key}  {accuracy:.2f} %  {summary.seconds:.1f} s", flush=True)
        return {"accuracy": accuracy, "train_loss": summary.train_loss, "seconds": summary.seconds}

    def _configure(self, key: RunKey, steps_per_epoch: int) -> TrainConfig:
        if key.taps != 0.5:
            raise ValueError(f"this version scales kernels by taps**0.5, not by taps**{key.taps}")
        scales = {role: DEFAULTS[role].scale for role in SCALES}
        if key.model.startswith("resnet"):  # its vectors belong to batch norms
            scales["vector"] *= DEFAULTS["vector"].normalized
        vocabulary = DEFAULTS["output"].vocabulary
        if key.output_p == "diagonal" and vocabulary is not None:
            scales["output"] = vocabulary.scale
        named: dict[str, Any] = {role: getattr(key, role) / scales[role] for role in SCALES}
        named |= {"output_p": key.output_p, "momentum": key.momentum, "before": key.before}
        options = ",".join(f"{name}={value}" for name, value in named.items())
        return TrainConfig(
            data=self._data,
            data_dir=self._data_dir,
            model=key.model,
            opt=f"neumann-spectral:{options}",
            lr=key.lr,
            weight_decay=key.forgetting / (key.lr * key.epochs * steps_per_epoch),
            batch_size=key.batch,
            epochs=key.epochs,
            sched="linear",
            ramp_epochs=key.epochs * key.ramp,
            seed=key.seed,
            held_out=True,
            eval_every=key.epochs,
            checkpoint_every=0,
            log_every=10_000,
            cuda_graph="auto" if key.batch < 8192 else "off",
        ).resolve()


def change_eps(optimizer: Any, eps: float) -> None:
    """Give the diagonal P of an optimizer another ε."""
    for group in optimizer.param_groups:
        if isinstance(group["precondition"], Diagonal):
            group["precondition"] = dataclasses.replace(group["precondition"], eps=eps)


def tune(arguments: argparse.Namespace, runner: Runner[RunKey]) -> Point:
    def make_key(point: Point) -> RunKey:
        values: dict[str, Any] = {**point, "seed": arguments.seed, "output_p": arguments.output_p}
        values["taps"] = 0.5
        return RunKey(arguments.model, arguments.batch, arguments.epochs, **values)

    def loss(point: Point) -> float:
        return -float(runner.finish(make_key(point))["accuracy"])

    def announce(point: Point) -> None:
        runner.run(make_key(point))

    return search_recipe(arguments, {**START, "output": 12.0, "ramp": 0.03}, loss, announce)


def print_table(arguments: argparse.Namespace, ledger: Ledger[RunKey]) -> None:
    """The best settings, each with the mean over its seeds."""
    accuracies: dict[RunKey, list[float]] = {}
    for key, run in ledger.runs.items():
        if (key.model, key.batch, key.epochs) == tuple(
            getattr(arguments, name) for name in ("model", "batch", "epochs")
        ):
            setting = dataclasses.replace(key, seed=0)
            accuracies.setdefault(setting, []).append(float(run["accuracy"]))
    means = {key: statistics.fmean(values) for key, values in accuracies.items()}
    rows = [
        (
            f"{means[key]:.2f}",
            str(len(accuracies[key])),
            *(f"{getattr(key, name):g}" for name in COORDINATES),
        )
        for key in sorted(means, key=lambda key: -means[key])
    ]
    print(f"{sum(map(len, accuracies.values()))} runs")
    heads = ("accuracy", "n", *COORDINATES)
    print(format_table(heads, "r" * len(heads), rows[: arguments.rows]))


def main() -> None:
    parser = create_training_parser(__doc__, RESULTS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--output-p", choices=("diagonal", "spectral"), default="spectral")
    add_search_flags(parser, COORDINATES)
    parser.add_argument("--rows", type=int, default=10, help="best settings in the table")
    arguments = parse_shared(parser)
    origin = {"data": arguments.data} | describe_origin(arguments.commit)
    ledger = Ledger(arguments.results, RunKey, origin)
    refuse_other_data(ledger, data=arguments.data)
    if arguments.stage == "train":
        train = ImageTrainer(arguments.data, arguments.data_dir).train
        runner = Runner(ledger, train, seconds=arguments.seconds, share=arguments.share)
        try:
            tune(arguments, runner)
        except MissingRunError:
            print("the time is up; run it again to continue")
    print_table(arguments, ledger)


if __name__ == "__main__":
    main()
