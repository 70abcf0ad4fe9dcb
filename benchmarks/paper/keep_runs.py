"""Pack the finished runs of a study into one file, and continue the study from it elsewhere.

    python -m benchmarks.paper.keep_runs pack runs/main-cifar10 runs/scaling
    python -m benchmarks.paper.keep_runs unpack runs/main-cifar10 runs/scaling

A study of many hours is trained in many sittings, perhaps on many machines. `pack` writes
results/paper/runs/NAME.tar.xz, a few kilobytes per run: settings, metrics and results, without
checkpoints and without runs that have not finished. `unpack` writes them into the folder again,
where `neumann study` continues. It leaves files alone that are there already; one with other
content is an error.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import CONFIG, METRICS, SUMMARY, is_finished
from neumann.lab.studies.study_files import COMPARISON, STUDY, SWEEP

ROOT = Path(__file__).parents[2]
STUDY_FILES, RUN_FILES = (STUDY, SWEEP, COMPARISON), (CONFIG, METRICS, SUMMARY)


def pack(folder: Path, archive: Path) -> int:
    """Write the archive of a study and return the number of its runs. The same runs, same bytes."""
    files = sorted(_list_files(folder))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in files:
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner, no time
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return sum(path.name == SUMMARY for path in files)


def unpack(archive: Path, folder: Path) -> int:
    """Write what an archive has and the folder lacks; return the number of new runs."""
    new: dict[Path, bytes] = {}
    with tarfile.open(archive, "r:xz") as packed:
        for entry in packed:
            content, there = packed.extractfile(entry), folder / entry.name
            if content is None or not there.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{archive} has {entry.name}, which is no file of a study")
            data = content.read()
            if not there.exists():
                new[there] = data
            elif there.name not in STUDY_FILES and there.read_bytes() != data:
                raise UsageError(f"{there} differs from the one in {archive}: remove one of them")
    # What says that a run is finished comes last.
    for there, data in sorted(new.items(), key=lambda item: item[0].name == SUMMARY):
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data)
    return sum(there.name == SUMMARY for there in new)


def _list_files(folder: Path) -> Iterator[Path]:
    for name in STUDY_FILES:
        yield from folder.glob(f"**/{name}")
    for summary in folder.glob(f"**/{SUMMARY}"):
        if is_finished(summary.parent):
            yield from (summary.parent / name for name in RUN_FILES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--archives", type=Path, default=ROOT / "results/paper/runs")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        archive = arguments.archives / f"{folder.name}.tar.xz"
        try:
            if arguments.action == "pack":
                print(f"{archive}: {pack(folder, archive)} runs, {archive.stat().st_size:,} bytes")
            else:
                print(f"{folder}: {unpack(archive, folder)} new runs")
        except (UsageError, OSError, tarfile.TarError) as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
