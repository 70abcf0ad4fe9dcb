"""The large-batch contest: CIFAR-10, ResNet-9, 24 epochs, from batch 512 to 16384, ten optimizers.

    python benchmarks/large_batch.py search --batch 8192 --data-dir data --seconds 1200
    python benchmarks/large_batch.py final --batch 8192 --data-dir data --seeds 5
    python benchmarks/large_batch.py table

Every optimizer is tuned alike: learning rates in ratio 2, widened until the best is bracketed,
times two weight decays, times momentum 0.6 and 0.9 where it has one. They are chosen on the 5,000
training images that the lab holds out, in runs of 12 epochs; the winner of each is retrained on all
50,000 for 24 epochs and tested over paired seeds. Linear decay after a ramp over the first sixth
(schedule-free: constant after the ramp). No test-time augmentation, no choice of the best epoch:
the weights after the last step count. BatchNorm statistics are gathered at those weights, for every
optimizer: after 72 or 144 steps those of training still remember other weights. The accuracy with
the latter is kept beside it.

Every run is a line in results/large-batch.jsonl; a run that is there is not repeated, and
`--seconds` begins no run after so long, so that a contest can be held in many sittings. Processes
with other entrants or other seeds can share the file.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.opening import open_dataset
from neumann.lab.outcome import Diverged
from neumann.lab.processes import Process
from neumann.lab.statistics import common_seeds, mean_interval, paired_difference
from neumann.lab.training import Training

RESULTS = Path("results/large-batch.jsonl")
SEARCH_EPOCHS, EPOCHS = 12, 24
TARGET = 90.0  # %
MOMENTA = (0.6, 0.9)
# The series by itself, with weight decay as AdamW and Muon have it.
PLAIN = (
    "cubic=0,repulsive=0,warmup_epochs=0,reset_steps=0,decoupled_weight_decay=true,"
    "decay_norms=false,momentum={momentum}"
)


@dataclass(frozen=True)
class Entrant:
    """An optimizer in the contest. The grid begins at lr/2, lr, 2·lr."""

    opt: str  # an arm of the lab, with {momentum}
    lr: float
    decays: tuple[float, float]
    sched: str = "linear"
    ours: bool = False


ENTRANTS = {
    "SGD-Nesterov": Entrant("sgd:momentum={momentum}", 0.8, (5e-4, 5e-3)),
    "LARS": Entrant("lars:momentum={momentum}", 4.0, (5e-4, 5e-3)),
    "LAMB": Entrant("lamb:betas=({momentum},0.999)", 0.02, (0.01, 0.1)),
    "AdamW": Entrant("adamw:betas=({momentum},0.999)", 0.008, (0.05, 0.5)),
    "NAdamW": Entrant("nadamw:betas=({momentum},0.999)", 0.008, (0.05, 0.5)),
    "schedule-free AdamW": Entrant(
        "schedulefree:betas=({momentum},0.999)", 0.008, (0.05, 0.5), "constant"
    ),
    "Muon": Entrant("muon:momentum={momentum}", 0.04, (0.1, 1.0)),
    "Neumann (paper)": Entrant("neumann:momentum={momentum}", 0.8, (5e-4, 5e-3), ours=True),
    "Neumann diagonal": Entrant(
        f"neumann:precondition=diagonal,{PLAIN}", 0.004, (0.1, 1.0), ours=True
    ),
    "Neumann spectral": Entrant(
        f"neumann:precondition=spectral,{PLAIN}", 0.03, (0.5, 2.0), ours=True
    ),
}


@dataclass(frozen=True)
class Setting:
    """One choice of what is tuned."""

    lr: float
    decay: float
    momentum: float


@dataclass(frozen=True)
class Key:
    """What a run is."""

    stage: str  # search: held-out part; final: test set
    batch: int
    entrant: str
    setting: Setting
    seed: int


class Ledger:
    """The runs there are."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self._about = path, about
        self.runs: dict[Key, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                key = run["key"]
                self.runs[Key(**{**key, "setting": Setting(**key["setting"])})] = run

    def add(self, key: Key, result: dict[str, Any]) -> None:
        run = {"key": asdict(key), **result, **self._about}
        self.runs[key] = run
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")

    def score(self, key: Key) -> float:
        """The accuracy in %, 0 where it diverged; Missing if there is no such run."""
        if key not in self.runs:
            raise Missing
        run = self.runs[key]
        return float(run["recalibrated"] if run["recalibrated"] is not None else run["accuracy"])


class Missing(Exception):
    """A run that is not there, and for which there is no time."""


class Trainer:
    """Trains what the ledger does not have, in one process, until the time is over."""

    def __init__(self, ledger: Ledger, arguments: argparse.Namespace) -> None:
        self._ledger, self._arguments = ledger, arguments
        self._end = time.monotonic() + arguments.seconds
        self._data: dict[bool, Dataset] = {}

    def score(self, key: Key) -> float:
        """The same as the ledger's, after a training if there must be one."""
        if key not in self._ledger.runs and time.monotonic() < self._end:
            self._ledger.add(key, self._train(key))
        return self._ledger.score(key)

    def _train(self, key: Key) -> dict[str, Any]:
        final = key.stage == "final"
        entrant = ENTRANTS[key.entrant]
        epochs = self._arguments.epochs or (EPOCHS if final else SEARCH_EPOCHS)
        config = TrainConfig(
            data=self._arguments.data,
            data_dir=self._arguments.data_dir,
            model=self._arguments.model,
            opt=entrant.opt.format(momentum=key.setting.momentum),
            lr=key.setting.lr,
            weight_decay=key.setting.decay,
            batch_size=key.batch,
            epochs=epochs,
            sched=entrant.sched,  # type: ignore[arg-type]
            ramp_epochs=epochs / 6,
            seed=key.seed,
            held_out=not final,
            target=TARGET,
            eval_every=2 if final else epochs,
            checkpoint_every=0,
            log_every=10_000,
        ).resolve()
        data = self._data.setdefault(final, open_dataset(config))
        with tempfile.TemporaryDirectory() as folder:
            try:
                summary = Training(config, Process(), data).run(Path(folder) / "run")
            except Diverged as error:
                print(f"{describe(key)}  diverged in step {error.step}", flush=True)
                return {"accuracy": 0.0, "recalibrated": None, "diverged": error.step}
        result = {
            "accuracy": summary.accuracy,
            "recalibrated": summary.accuracy_recalibrated,
            "train_loss": summary.train_loss,
            "seconds": summary.seconds,
            "steps": summary.steps,
            "steps_to_target": summary.steps_to_target,
        }
        print(f"{describe(key)}  {result['recalibrated']:.2f} %", flush=True)
        return result


def describe(key: Key) -> str:
    setting = key.setting
    return (
        f"{key.stage:6} {key.batch:6} {key.entrant:20} lr {setting.lr:<9.4g} "
        f"decay {setting.decay:<7.3g} momentum {setting.momentum} seed {key.seed}"
    )


def search(score: Callable[[Key], float], name: str, batch: int) -> Setting:
    """The best setting on the held-out part; its lr is bracketed."""
    entrant = ENTRANTS[name]
    lrs = [entrant.lr / 2, entrant.lr, entrant.lr * 2]
    while True:
        scores = {
            setting: score(Key("search", batch, name, setting, 0)) for setting in grid(entrant, lrs)
        }
        best = max(scores, key=lambda setting: scores[setting])
        if best.lr == lrs[0]:
            lrs.insert(0, lrs[0] / 2)
        elif best.lr == lrs[-1]:
            lrs.append(lrs[-1] * 2)
        else:
            return best


def grid(entrant: Entrant, lrs: list[float]) -> Iterator[Setting]:
    for lr in lrs:
        for decay in entrant.decays:
            for momentum in MOMENTA:
                yield Setting(lr, decay, momentum)


def chosen(ledger: Ledger, name: str, batch: int) -> tuple[Setting, float] | None:
    """The best setting found so far and its score, if the search has brackets for it."""

    try:
        setting = search(ledger.score, name, batch)
    except Missing:
        return None
    return setting, ledger.score(Key("search", batch, name, setting, 0))


def table(ledger: Ledger) -> None:
    """For each batch: means, intervals, and differences to the best peer on held-out data."""
    for batch in sorted({key.batch for key in ledger.runs}):
        found = {name: c for name in ENTRANTS if (c := chosen(ledger, name, batch)) is not None}
        peers = {name: score for name, (_, score) in found.items() if not ENTRANTS[name].ours}
        best_peer = max(peers, key=lambda name: peers[name]) if peers else None
        print(f"\nbatch {batch}; best peer on held-out data: {best_peer}")
        tested = {
            name: {
                key.seed: ledger.score(key)
                for key in ledger.runs
                if (key.stage, key.batch, key.entrant, key.setting)
                == ("final", batch, name, setting)
            }
            for name, (setting, _) in found.items()
        }
        for name, (setting, score) in found.items():
            interval = mean_interval(list(tested[name].values()))
            text = f"{name:20} held out {score:6.2f}  {setting}"
            if interval.mean is not None:
                half = math.nan if interval.high is None else interval.high - interval.mean
                text += f"  tested {interval.mean:6.2f} ± {half:.2f} (n = {interval.n})"
            if best_peer is not None and name != best_peer and tested[name] and tested[best_peer]:
                d = paired_difference(*common_seeds(tested[name], tested[best_peer]))
                if d.mean is not None and d.low is not None:
                    text += f"  {d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}] p {d.p}"
            print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["search", "final", "table"])
    parser.add_argument("--batch", type=int, nargs="+", default=[8192, 16384, 2048, 512])
    parser.add_argument("--entrants", nargs="+", default=list(ENTRANTS), choices=list(ENTRANTS))
    parser.add_argument("--seeds", type=int, default=5, help="of each winner")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--epochs", type=int, help="for a trial of this script")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device, arguments.commit)
    kept = {key: about[key] for key in ("commit", "date", "hardware", "versions")}
    ledger = Ledger(arguments.results, kept)
    trainer = Trainer(ledger, arguments)
    try:
        for batch in arguments.batch if arguments.stage != "table" else ():
            if arguments.stage == "search":
                for name in arguments.entrants:
                    search(trainer.score, name, batch)
                continue
            # Seed by seed, so that a contest cut short has whole pairs.
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for name in arguments.entrants:
                    found = chosen(ledger, name, batch)
                    if found is not None:
                        trainer.score(Key("final", batch, name, found[0], seed))
    except Missing:
        print("the time is over; the same command goes on")
    table(ledger)


if __name__ == "__main__":
    main()
