"""One run of the contest, trained with the lab.

The learning rate decays linearly (schedule-free: stays constant) after a ramp over the first sixth.
The weights after the last step count. BatchNorm statistics are gathered at those weights, because
after 72 or 144 steps the running ones still remember older weights; both accuracies are recorded.
"""

import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from benchmarks.common.jobs import add_ledger_flags
from benchmarks.common.ledger import Run, Runner, refuse_other_data
from benchmarks.common.script import create_parser, describe_origin
from benchmarks.contest.entrants import ENTRANTS, ContestLedger, RunKey, read_accuracy
from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.storage.run_files import Summary
from neumann.lab.training.inputs import open_dataset
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import Diverged


def create_training_parser(
    doc: str | None, results: Path, setting_help: str | None = None
) -> ArgumentParser:
    """The flags of a script that trains runs into a ledger."""
    parser = create_parser(doc, output=False)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    add_ledger_flags(parser, results)
    if setting_help:
        setting = parser.add_argument("--setting", type=float, nargs=3, help=setting_help)
        setting.metavar = ("LR", "DECAY", "MOMENTUM")
        parser.add_argument("--epochs", type=int, help="length of all runs, for a trial")
    return parser


def open_runner(
    arguments: Namespace, trainer: type["Trainer"]
) -> tuple[ContestLedger, Runner[RunKey]]:
    """The ledger that the flags name, and what trains further runs into it."""
    origin = {"data": arguments.data} | describe_origin(arguments.commit)
    ledger = ContestLedger(arguments.results, origin)
    refuse_other_data(ledger, data=arguments.data)
    train = trainer(arguments.data, arguments.data_dir).train
    return ledger, Runner(ledger, train, seconds=arguments.seconds, share=arguments.share)


class Trainer:
    """Trains runs; keeps the data set in memory between them."""

    def __init__(self, data: str, data_dir: Path | None) -> None:
        self._data, self._data_dir = data, data_dir
        self._datasets: dict[bool, Dataset] = {}

    def train(self, key: RunKey) -> Run:
        """Train a run and return what to record."""
        config = self.configure(key)
        if config.held_out not in self._datasets:
            self._datasets[config.held_out] = open_dataset(config)
        training = Training(config, Process(), self._datasets[config.held_out])
        with tempfile.TemporaryDirectory() as folder:
            try:
                summary = self.fit(key, training, Path(folder) / "run")
            except Diverged as error:
                print(f"{describe(key)}  diverged in step {error.step}", flush=True)
                return {"accuracy": 0.0, "recalibrated": None, "diverged": error.step}
        result = {
            "accuracy": summary.accuracy,
            "recalibrated": summary.accuracy_recalibrated,
            "train_loss": summary.train_loss,
            "seconds": summary.seconds,
            "steps": summary.steps,
        }
        outcome = f"{read_accuracy(result):.2f} %  {summary.seconds:.1f} s"
        print(f"{describe(key)}  {outcome}", flush=True)
        return result

    def fit(self, key: RunKey, training: Training, folder: Path) -> Summary:
        """Run the training loop. Studies that change more than the configuration override this."""
        return training.run(folder)

    def configure(self, key: RunKey) -> TrainConfig:
        entrant = ENTRANTS[key.entrant]
        return TrainConfig(
            data=self._data,
            data_dir=self._data_dir,
            model=key.model,
            opt=entrant.opt.format(momentum=key.setting.momentum),
            lr=key.setting.lr,
            weight_decay=key.setting.decay,
            batch_size=key.batch,
            epochs=key.epochs,
            sched=entrant.sched,
            ramp_epochs=key.epochs / 6,
            seed=key.seed,
            held_out=key.stage == "search",
            eval_every=2 if key.stage == "final" else key.epochs,
            checkpoint_every=0,
            log_every=10_000,
            # A large batch keeps the GPU busy anyway; a graph would only hold on to its memory.
            cuda_graph="auto" if key.batch < 8192 else "off",
        ).resolve()


def describe(key: RunKey) -> str:
    setting = key.setting
    return (
        f"{key.stage:6} {key.model} {key.batch:6} {key.entrant:20} lr {setting.lr:<9.4g} "
        f"decay {setting.decay:<7.3g} momentum {setting.momentum} seed {key.seed}"
    )
