"""The large-batch contest: CIFAR-10, ResNet-9, 24 epochs, from batch 512 to 16384, ten optimizers.

    python benchmarks/large_batch.py search --batch 8192 --data-dir data --seconds 1200
    python benchmarks/large_batch.py retune --batch 8192 --data-dir data
    python benchmarks/large_batch.py final --batch 8192 --data-dir data --seeds 5
    python benchmarks/large_batch.py range --batch 8192 --entrants Muon "Neumann spectral"
    python benchmarks/large_batch.py transfer --batch 8192 --entrants Muon "Neumann spectral"
    python benchmarks/large_batch.py time
    python benchmarks/large_batch.py table
    python benchmarks/large_batch.py tested

search tunes every optimizer by the same rules (see `contest`) on the 5,000 training images that the
lab holds out, in runs of 12 epochs; at batch 16384 of 24, for 24 steps are another problem than 48.
retune tunes the contenders at batch 8192 and above, where steps are few, in as many as are tested,
when all searches are over. final retrains the winner of each on all 50,000 for 24 epochs and tests
it, over paired seeds. range finds the learning rates within a point of the best, in ratio √2, and
transfer takes the settings to ResNet-18, with nothing retuned but the learning rate. time trains
the winners for 4 epochs, for the seconds of a run; it wants the machine for itself. table compares
the winners (`contest_pages` takes that to README and docs); tested lists every setting that has met
the test set, chosen or not.

Linear decay after a ramp over the first sixth (schedule-free: constant after the ramp). No
test-time augmentation, no choice of the best epoch: the weights after the last step count.
BatchNorm statistics are gathered at those weights, for every optimizer: after 72 or 144 steps those
of training still remember other weights. The accuracy with the latter is kept beside it.

Every run is a line in results/large-batch.jsonl. A run that is there is not repeated, and
`--seconds` begins no run after so long, so that a contest can be held in many sittings. Several
processes with the same command share the work if they are given the same `--share` folder; on one
GPU, CUDA's multi-process service lets them run at the same time rather than in turns.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from contest import ENTRANTS, EPOCHS, LARGE, Search, Tuning
from contest_summary import summary
from contest_table import everything_tested, written
from environment import origin
from ledger import Key, Ledger, Missing, Setting, claim

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.opening import open_dataset
from neumann.lab.outcome import Diverged, Summary
from neumann.lab.processes import Process
from neumann.lab.training import Training

RESULTS = Path("results/large-batch.jsonl")
BATCHES = (8192, 16384, 2048, 512)
TIMED_EPOCHS = 4
TARGET = 90.0  # %


def search_epochs(batch: int) -> int:
    return 12 if batch <= 8192 else 24


def full_epochs(batch: int) -> int:
    """Of the 45,000 images that are not held out, for as many steps as of 50,000."""
    return round(EPOCHS * (50_000 // batch) / (45_000 // batch))


def add_training_arguments(parser: argparse.ArgumentParser, results: Path) -> None:
    """What a Trainer and its ledger are told on the command line."""
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after")
    parser.add_argument("--share", type=Path, help="a folder that processes divide the work in")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--commit", help="where git cannot tell")


class Trainer:
    """Trains what the ledger does not have, in one process, until the time is over."""

    def __init__(self, ledger: Ledger, arguments: argparse.Namespace) -> None:
        self._ledger, self._arguments = ledger, arguments
        self._end = time.monotonic() + arguments.seconds
        self._data: dict[bool, Dataset] = {}

    def score(self, key: Key) -> float:
        """The same as the ledger's, after a training if there must be one."""
        self.take(key)
        while key not in self._ledger.runs and time.monotonic() < self._end:
            time.sleep(0.2)  # another process is at it
            self.take(key)
        return self._ledger.score(key)

    def take(self, key: Key) -> None:
        """Train it, unless it is there, another process is at it or the time is over."""
        self._ledger.refresh()
        if key in self._ledger.runs or time.monotonic() >= self._end:
            return
        with claim(self._arguments.share, key) as ours:
            self._ledger.refresh()  # what another process has finished since
            if ours and key not in self._ledger.runs:
                self._ledger.add(key, self._train(key))

    def _train(self, key: Key) -> dict[str, Any]:
        config = self._config(key)
        data = self._data.get(config.held_out)
        if data is None:
            data = self._data[config.held_out] = open_dataset(config)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            try:
                outcome = self._outcome(key, Training(config, Process(), data), run)
            except Diverged as error:
                print(f"{describe(key)}  diverged in step {error.step}", flush=True)
                return {"accuracy": 0.0, "recalibrated": None, "diverged": error.step}
            reached = steps_to(TARGET, run / "metrics.jsonl")
        score = outcome.accuracy_recalibrated
        score = outcome.accuracy if score is None else score
        print(f"{describe(key)}  {score:.2f} %  {outcome.seconds:.1f} s", flush=True)
        return {
            "accuracy": outcome.accuracy,
            "recalibrated": outcome.accuracy_recalibrated,
            "train_loss": outcome.train_loss,
            "seconds": outcome.seconds,
            "steps": outcome.steps,
            "steps_to_target": reached,
        }

    def _outcome(self, key: Key, training: Training, folder: Path) -> Summary:
        return training.run(folder)

    def _config(self, key: Key) -> TrainConfig:
        entrant, arguments = ENTRANTS[key.entrant], self._arguments
        return TrainConfig(
            data=arguments.data,
            data_dir=arguments.data_dir,
            model=key.model,
            opt=entrant.opt.format(momentum=key.setting.momentum),
            lr=key.setting.lr,
            weight_decay=key.setting.decay,
            batch_size=key.batch,
            epochs=key.epochs,
            sched=entrant.sched,  # type: ignore[arg-type]
            ramp_epochs=key.epochs / 6,
            seed=key.seed,
            held_out=key.stage == "search",
            eval_every=2 if key.stage == "final" else key.epochs,
            checkpoint_every=0,
            log_every=10_000,
            # A large batch fills the card by itself; a graph would only keep its memory.
            cuda_graph="auto" if key.batch < 8192 else "off",
        ).resolve()


def steps_to(target: float, metrics: Path) -> int | None:
    """The steps after which the accuracy was there for the first time, of those evaluated."""
    for line in map(json.loads, metrics.read_text().splitlines()):
        score = line.get("accuracy_recalibrated")
        score = line.get("accuracy") if score is None else score
        if line["kind"] == "epoch" and score is not None and score >= target:
            return int(line["step"])
    return None


def describe(key: Key) -> str:
    setting = key.setting
    return (
        f"{key.stage:6} {key.model} {key.batch:6} {key.entrant:20} lr {setting.lr:<9.4g} "
        f"decay {setting.decay:<7.3g} momentum {setting.momentum} seed {key.seed}"
    )


class Contest:
    """The stages; processes can share the work of one."""

    def __init__(self, ledger: Ledger, trainer: Trainer, arguments: argparse.Namespace) -> None:
        self._ledger, self._trainer, self._arguments = ledger, trainer, arguments

    def run(self, stage: str) -> None:
        """First the runs that are known beforehand, then those that others decide on."""
        known: dict[str, Callable[[], Iterator[Key]]] = {
            "search": self._search_runs,
            "retune": self._retune_runs,
            "final": self._final_runs,
            "transfer": self._transfer_runs,
            "time": self._time_runs,
        }
        decided: dict[str, Callable[[str, int], None]] = {
            "search": self._search,
            "retune": self._retune,
            "range": self._range,
            "transfer": self._transfer,
        }
        if stage in known:
            for key in list(known[stage]()):
                self._trainer.take(key)
        if stage in decided:
            for pair in self._pairs():
                with claim(self._arguments.share, (stage, *pair)) as ours:
                    if ours:
                        decided[stage](*pair)

    def search(self, entrant: str, batch: int, model: str = "resnet9") -> Search:
        """Where an entrant's search stands in the ledger."""
        return Search(entrant, batch, self._arguments.epochs or search_epochs(batch), model)

    def chosen(self, entrant: str, batch: int) -> Setting | None:
        """The entrant's setting, if its search is over."""
        self._ledger.refresh()
        try:
            return self.tuning(batch).chosen(entrant).setting
        except Missing:
            print(f"the search of {entrant} at batch {batch} is not over", flush=True)
            return None

    def tuning(self, batch: int) -> Tuning:
        """What the searches at a batch size have come to."""
        short = self._arguments.epochs or search_epochs(batch)
        once = self._arguments.once or self._arguments.epochs or batch < LARGE
        return Tuning(self._ledger.score, batch, short, short if once else full_epochs(batch))

    def found(self, first_seed: int = 0) -> dict[str, list[dict[str, Any]]]:
        """What the runs have come to, for each model and batch size; of the seeds from there on."""
        wanted = {"resnet9": sorted(BATCHES), "resnet18": [8192]}
        return {
            model: [
                summary(self._ledger, self.tuning(batch), model, first_seed) for batch in batches
            ]
            for model, batches in wanted.items()
        }

    def _pairs(self) -> Iterator[tuple[str, int]]:
        for batch in self._arguments.batch:
            for entrant in self._arguments.entrants:
                yield entrant, batch

    def _search_runs(self) -> Iterator[Key]:
        for entrant, batch in self._pairs():
            yield from self.search(entrant, batch).beginning()

    def _search(self, entrant: str, batch: int) -> None:
        self.search(entrant, batch).best(self._trainer.score)

    def _retune(self, entrant: str, batch: int) -> None:
        tuning = self.tuning(batch)
        if self._contends(tuning, entrant):
            tuning.again(entrant, self._trainer.score)

    def _retune_runs(self) -> Iterator[Key]:
        for entrant, batch in self._pairs():
            tuning = self.tuning(batch)
            if self._contends(tuning, entrant):
                momentum = tuning.first(entrant).setting.momentum
                yield from Search(entrant, batch, tuning.full).beginning(momenta=(momentum,))

    def _contends(self, tuning: Tuning, entrant: str) -> bool:
        try:
            return tuning.contends(entrant)
        except Missing:
            print(f"the search of {entrant} at batch {tuning.batch} is not over", flush=True)
            return False

    def _final_runs(self) -> Iterator[Key]:
        """Seed by seed, so that a contest cut short has whole pairs."""
        first = self._arguments.first_seed
        for batch in self._arguments.batch:
            given = self._arguments.setting
            chosen = {
                entrant: Setting(*given) if given else self.chosen(entrant, batch)
                for entrant in self._arguments.entrants
            }
            for seed in range(first, first + self._arguments.seeds):
                for entrant, setting in chosen.items():
                    if setting is not None:
                        yield self._final_key("resnet9", entrant, batch, setting, seed)

    def _range(self, entrant: str, batch: int) -> None:
        setting = self.chosen(entrant, batch)
        if setting is not None:
            self.search(entrant, batch).width(self._trainer.score, setting)

    def _time_runs(self) -> Iterator[Key]:
        for entrant, batch in self._pairs():
            setting = self.chosen(entrant, batch)
            if setting is not None:
                yield Key("time", "resnet9", batch, TIMED_EPOCHS, entrant, setting)

    def _transfer_runs(self) -> Iterator[Key]:
        for entrant, batch in self._pairs():
            setting = self.chosen(entrant, batch)
            if setting is not None:
                search = self.search(entrant, batch, "resnet18")
                yield from search.beginning((setting.decay,), (setting.momentum,))

    def _transfer(self, entrant: str, batch: int) -> None:
        setting = self.chosen(entrant, batch)
        if setting is not None:
            search = self.search(entrant, batch, "resnet18")
            setting = search.transferred(self._trainer.score, setting)
            for seed in range(self._arguments.seeds):
                key = self._final_key("resnet18", entrant, batch, setting, seed)
                self._trainer.take(key)

    def _final_key(self, model: str, entrant: str, batch: int, setting: Setting, seed: int) -> Key:
        epochs = self._arguments.epochs or EPOCHS
        return Key("final", model, batch, epochs, entrant, setting, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ["search", "retune", "final", "range", "transfer", "time", "table", "tested"]
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--entrants", nargs="+", default=list(ENTRANTS), choices=list(ENTRANTS))
    parser.add_argument("--seeds", type=int, default=5, help="of each winner")
    parser.add_argument("--first-seed", type=int, default=0, help="to test, or to compare from")
    parser.add_argument(
        "--setting",
        type=float,
        nargs=3,
        metavar=("LR", "DECAY", "MOMENTUM"),
        help="test this one instead of the chosen; `tested` lists it, the table does not",
    )
    parser.add_argument("--epochs", type=int, help="for a trial of this script")
    parser.add_argument("--once", action="store_true", help="choose by the first search alone")
    parser.add_argument("--autotune", action="store_true", help="let cuDNN time its algorithms")
    add_training_arguments(parser, RESULTS)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = arguments.autotune
    about = {**origin(arguments.commit), "autotune": arguments.autotune}
    ledger = Ledger(arguments.results, about)
    contest = Contest(ledger, Trainer(ledger, arguments), arguments)
    if arguments.stage == "tested":
        print(everything_tested(ledger))
        return
    if arguments.stage != "table":
        try:
            contest.run(arguments.stage)
        except Missing:
            print("the time is over; the same command goes on")
        return
    found = contest.found(arguments.first_seed)
    print(written(found))
    if not arguments.first_seed:  # all of them
        arguments.results.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
