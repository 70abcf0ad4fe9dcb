"""Train the paper's studies one after another, as far as the time goes; run it again to continue.

    python -m benchmarks.paper.run_studies --set data-dir=data --jobs 4 --seconds 1200
    python -m benchmarks.paper.run_studies scaling --lend runs/scaling-before

The archives in results/paper/runs are unpacked. Then for each study: runs that other studies have
trained are shared, learning rates are searched, runs on the test set are shared, the rest is
trained, and what has finished is packed again. So any machine continues from the archives. --lend
names folders of further studies to share from, such as that of a study before its range of learning
rates was widened, whose archive has to be moved away, too.
"""

import argparse
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.claim_tests import STUDIES
from benchmarks.paper.run_archives import ARCHIVES, pack, unpack
from benchmarks.paper.run_sharing import share_runs
from neumann.lab.errors import UsageError
from neumann.lab.storage.atomic_files import StorageError
from neumann.lab.studies.engine import Study
from neumann.lab.studies.study_files import COMPARISON
from neumann.lab.studies.study_toml import read_study_toml
from neumann.lab.studies.workers import get_output_folder
from neumann.lab.training.signals import Terminated, raise_on_sigterm

# A study that lends runs comes before those that take them; those that decide most claims first.
ORDER = (
    "main-cifar10",
    "scaling",
    "main-cifar100",
    "small-batch",
    "regularizers",
    "accumulation",
    "warm-up",
    "sensitivity",
    "reset-interval",
    "clipping",
    "idealized",
    "krylov",
    "shorter-runs",
    "scaling-epochs",
)
PLACES = {"data", "data-dir", "device", "workers"}  # settings that do not make it a trial
BY_THE_CLOCK = ("krylov",)  # its runs must not share the machine


@dataclass(frozen=True)
class Sitting:
    """Where and how studies are trained in one call."""

    studies: Path  # the folder of their files
    root: Path  # of their records
    archives: Path
    changes: Sequence[str] = ()  # as for --set
    jobs: int = 1
    deadline: float = float("inf")  # on the monotonic clock: no run starts after it
    lenders: Sequence[Path] = ()

    def unpack_all(self) -> None:
        """Write what the archives have and the folders lack."""
        for file in self._list_files():
            if (archive := self._get_archive(file.stem)).exists():
                unpack(archive, self.root / file.stem)

    def train(self, name: str) -> bool:
        """Train what a study lacks; returns whether all of it has ended."""
        file, folder = self.studies / f"{name}.toml", self.root / name
        study = read_study_toml(file, folder, self.changes)
        others = [self.root / other.stem for other in self._list_files() if other != file]
        try:
            for flags in (["--search-only"], []) if study.sweeps else ([],):
                share_runs(study, [*others, *self.lenders])
                in_time = time.monotonic() < self.deadline
                if in_time and count_ended(study) < len(study.list_runs()):
                    self._run_command(file, folder, flags)
            if not is_written(study) and count_ended(study) == len(study.list_runs()):
                self._run_command(file, folder, [])  # all was shared; it only writes what it is
        finally:
            if folder.exists():
                pack(folder, self._get_archive(name))
            ended, total = count_ended(study), len(study.list_runs())
            print(f"{name}: {ended} of {total} runs have ended", flush=True)
        return ended == total

    def _list_files(self) -> list[Path]:
        return sorted(self.studies.glob("*.toml"))

    def _get_archive(self, name: str) -> Path:
        return self.archives / f"{name}.tar.xz"

    def _run_command(self, file: Path, folder: Path, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "neumann", "study", str(file), "--output", str(folder)]
        jobs = 1 if file.stem in BY_THE_CLOCK else self.jobs
        command += ["--jobs", str(jobs), *flags]
        if self.deadline < float("inf"):
            command += ["--seconds", str(max(0, round(self.deadline - time.monotonic())))]
        if self.changes:
            command += ["--set", *self.changes]
        process = subprocess.Popen(command)
        try:
            process.wait()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated):  # unlike Ctrl-C, it has come to this process alone
                process.terminate()
            process.wait()  # until it has saved its runs
            raise
        if process.returncode:
            raise UsageError(f"{file.stem} ended with status {process.returncode}, see above")


def train_all(sitting: Sitting, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Train the studies one after another: which are not finished, and which failed, with why.

    A study that fails does not stop the next one.
    """
    unfinished: list[str] = []
    failed: dict[str, str] = {}
    for name in names:
        try:
            if not sitting.train(name):
                unfinished.append(name)
        except (UsageError, StorageError, OSError) as error:
            failed[name] = str(error)
    return unfinished, failed


def is_written(study: Study) -> bool:
    """Whether the study has recorded what it compares."""
    places = {get_output_folder(run.config).parents[1] for run in study.list_runs()}
    return all((place / COMPARISON).exists() for place in places)


def count_ended(study: Study) -> int:
    return sum(run.state in ("finished", "diverged") for run in study.list_runs())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(ORDER)}; by default all")
    parser.add_argument("--set", nargs="*", default=[], help="as for neumann study")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seconds", type=float, help="start no run after this")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of the records")
    parser.add_argument("--archives", type=Path, default=ARCHIVES)
    parser.add_argument("--lend", type=Path, nargs="*", default=[], metavar="FOLDER")
    arguments = parser.parse_args()
    changed = {text.partition("=")[0] for text in arguments.set} - PLACES
    if changed and arguments.archives == ARCHIVES:
        parser.error(f"--set {', '.join(sorted(changed))} is for a trial: name other --archives")
    if missing := [str(folder) for folder in arguments.lend if not folder.is_dir()]:
        parser.error(f"there is no folder {', '.join(missing)}")
    if unknown := set(arguments.studies) - set(ORDER):
        parser.error(f"{', '.join(sorted(unknown))}: the studies are {', '.join(ORDER)}")
    deadline = float("inf")
    if arguments.seconds is not None:
        deadline = time.monotonic() + arguments.seconds
    where = arguments.root, arguments.archives
    sitting = Sitting(
        STUDIES, *where, arguments.set, arguments.jobs, deadline, lenders=arguments.lend
    )
    names = [name for name in ORDER if name in (arguments.studies or ORDER)]
    try:
        with raise_on_sigterm():
            sitting.unpack_all()
            unfinished, failed = train_all(sitting, names)
    except (UsageError, StorageError, OSError, tarfile.TarError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit("stopped: run the same command again to continue") from None
    if unfinished:
        print(f"Not finished: {', '.join(unfinished)}. Run the same command again to continue.")
    if failed:
        raise SystemExit("\n".join(f"{name} failed: {error}" for name, error in failed.items()))


if __name__ == "__main__":
    main()
