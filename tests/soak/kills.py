"""Kill -9 of a training run at its writes, again and again: the end has the bits of a whole run.

torch is imported once. Every attempt is a fork of this process, which therefore must have no
threads: one OpenMP thread, and numba's layer that survives a fork. Three kinds of attempts:

    call   the process kills itself before, after or halfway through its n-th call of os.write,
           os.fsync, os.replace, os.unlink, os.open or os.ftruncate
    save   it is killed a random moment after it began to save a checkpoint
    term   it is asked to stop by SIGTERM at that moment, and saves

After each, the records must be readable and the newest checkpoint intact. A case ends with a run
to the end, whose weights, state and records are compared with those of an undisturbed run.
"""

import contextlib
import os
import random
import select
import shutil
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from neumann.lab.config import TrainConfig
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.training import records
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.inputs import open_dataset
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.signals import Interrupted
from tests.soak.program import Program, check
from tests.soak.same_bits import same_bits

CALLS = ("write", "fsync", "replace", "unlink", "open", "ftruncate")
PHASES = "warmup_epochs=1,reset_epochs=1"
FORCES = "cubic=0.01,repulsive=0.001"
RUNS: dict[str, dict[str, Any]] = {
    "lists": {"opt": f"neumann:{PHASES},{FORCES},foreach=true"},
    "numba": {"opt": f"neumann:{PHASES},{FORCES}"},
    "spectral": {"opt": "neumann:precondition=spectral,lr=0.01", "log_every": 1},
    "diagonal": {"opt": "neumann:precondition=diagonal,lr=0.003", "checkpoint_every": 2},
    "adamw": {"opt": "adamw", "log_every": 1, "smoothing": 0.1},
    "curvature": {"opt": f"neumann:{PHASES}", "spectrum_every": 3, "spectrum_products": 5},
}
PATIENCE = 300.0  # seconds for one attempt: the machine may be busy


class Kills(Program):
    name = "kills"
    counted = ("kills", "kills in a save", "stops", "resumes", "runs")
    weight = 3.0

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        torch.set_num_threads(1)
        found = records.describe_environment()  # runs git, which takes longer than the training
        records.describe_environment = lambda: found
        self._dataset = open_dataset(self._config("lists", folder / "unused"))
        self._wholes: dict[str, Any] = {}

    def _config(self, name: str, folder: Path) -> TrainConfig:
        settings = {"epochs": 5, "batch_size": 512, "log_every": 2, **RUNS[name]}
        return TrainConfig(device="cpu", output=folder, resume="auto", **settings).resolve()

    def _train(self, config: TrainConfig) -> None:
        assert config.output is not None
        Training(config, Process(), self._dataset).run(config.output)

    def _whole(self, name: str) -> Any:
        """What an undisturbed run ends with. It runs here, so that forks find everything loaded."""
        if name not in self._wholes:
            config = self._config(name, self.folder / f"whole-{name}")
            self._train(config)
            self._wholes[name] = read_result(config.output)
            threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
            check(threads == 1, f"a process with {threads} threads cannot be forked safely")
        return self._wholes[name]

    def run(self, case: int, counts: Counter[str]) -> None:
        chance = self.chance(case)
        name = list(RUNS)[case % len(RUNS)]
        whole = self._whole(name)
        folder = self.folder / f"run-{case}"
        config = self._config(name, folder)
        for attempt in range(chance.randint(4, 16)):
            kind = chance.choices(("call", "save", "term"), (6, 3, 1))[0]
            ended = self._attempt(config, kind, chance, counts)
            counts["resumes"] += attempt > 0
            if ended:
                break
            check_folder(folder)
        else:
            counts["resumes"] += 1
            check(self._attempt(config, "none", chance, counts), "the last resume did not finish")
        difference = find_difference(read_result(folder), whole)
        check(difference is None, f"{name}: {difference} differ from those of an undisturbed run")
        counts["runs"] += 1
        shutil.rmtree(folder)

    def _attempt(
        self, config: TrainConfig, kind: str, chance: random.Random, counts: Counter[str]
    ) -> bool:
        """Train in a fork that is to be killed; returns whether it came to the end."""
        target, where = int(chance.expovariate(1 / 25)), chance.choice(("before", "after", "half"))
        saves = chance.randint(1, 3)
        # A kill meets the write. A stop takes effect at the end of a step, of which there are few.
        delay = chance.uniform(0, 0.006 if kind == "save" else 0.04)
        log = self.folder / "log"
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._become_victim(config, log, writing, target if kind == "call" else None, where)
        os.close(writing)
        try:
            if kind in ("save", "term"):
                seen = 0
                while seen < saves and select.select([reading], [], [], PATIENCE)[0]:
                    started = os.read(reading, 1)
                    if not started:
                        break
                    seen += 1
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL if kind == "save" else signal.SIGTERM)
            status = wait(child)
        finally:
            os.close(reading)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            # SIGTERM kills a run that has finished its steps, outside of the command `neumann`.
            check(number in (signal.SIGKILL, signal.SIGTERM), f"died of signal {number}")
            counts["kills"] += 1
            counts["kills in a save"] += bool(list(Path(config.output).glob("**/*.tmp")))
            return False
        code = os.waitstatus_to_exitcode(status)
        if code == 128 + signal.SIGTERM:
            counts["stops"] += 1
            return False
        check(code == 0, f"the training failed: {log.read_text().strip()[-2000:]}")
        return True

    def _become_victim(
        self, config: TrainConfig, log: Path, pipe: int, target: int | None, where: str
    ) -> None:
        """Train in the forked process, and never return."""
        code = 1
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            tell_of_saves(pipe)
            if target is not None:
                kill_at_call(target, where)
            self._train(config)
            code = 0
        except Interrupted as stop:
            code = stop.exit_code
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)


def wait(child: int) -> int:
    """The status of a child; one that hangs is killed and is an error."""
    deadline = time.monotonic() + PATIENCE
    pause = 0.0005
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"a training run hung for {PATIENCE:g} s")


def tell_of_saves(pipe: int) -> None:
    """Write a byte into the pipe whenever a checkpoint is about to be saved."""
    write, save = os.write, Checkpoints.save

    def telling(self: Checkpoints, *arguments: Any) -> Path:
        write(pipe, b"s")
        return save(self, *arguments)

    Checkpoints.save = telling  # type: ignore[method-assign]


def kill_at_call(target: int, where: str) -> None:
    """Let this process kill itself at a call of the operating system that changes files."""
    left = target

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return real(*arguments, **named)
            if where == "half" and name == "write":
                descriptor, data = arguments
                real(descriptor, memoryview(data)[: len(data) // 2])
            if where == "after":
                real(*arguments, **named)
            die()
            raise AssertionError("still alive")

        setattr(os, name, counting)

    for name in CALLS:
        wrap(name)


def check_folder(folder: Path) -> None:
    """After a kill: the records can be read, and no checkpoint is damaged."""
    if not folder.exists():
        return
    read_metrics(folder)
    read_summary(folder)
    found = Checkpoints(folder / "checkpoints").load_latest()
    damaged = () if found is None else found.damaged
    check(not damaged, f"a kill damaged {', '.join(path.name for path in damaged)}")


def read_result(folder: Path) -> Any:
    """What two runs must share: weights, state and records, without the times."""
    found = Checkpoints(folder / "checkpoints").load_latest()
    check(found is not None, "a finished run has no checkpoint")
    payload = found.payload
    lines = [without_times(line) for line in read_metrics(folder)]
    summary = without_times(read_summary(folder))
    return {
        "weights": payload["model"],
        "state": payload["optimizer"],
        "metrics": lines,
        "summary": summary,
    }


def without_times(fields: Any) -> Any:
    if isinstance(fields, dict):
        return {k: without_times(v) for k, v in fields.items() if not k.endswith("seconds")}
    return fields


def find_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first part in which two results differ in a bit."""
    return next((name for name in theirs if not same_bits(ours[name], theirs[name])), None)
