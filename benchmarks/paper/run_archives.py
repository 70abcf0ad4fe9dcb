"""The finished runs of a study in one file, from which it continues elsewhere.

A study of many hours is trained in many sittings, perhaps on many machines. An archive has a few
kilobytes per run: settings, metrics and results, without checkpoints and without runs that have not
finished. It never loses or changes runs: if it has some that the folder lacks, unpack it there
first.
Unpacking leaves finished runs alone; one with another result is an error. A run that has finished
in the archive and not in the folder becomes that of the archive.
"""

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from neumann.lab.errors import UsageError
from neumann.lab.storage.atomic_files import write_atomically
from neumann.lab.storage.folders import FolderLock
from neumann.lab.storage.reading import CONFIG, METRICS, SUMMARY, is_finished
from neumann.lab.studies.study_files import COMPARISON, STUDY, SWEEP

ARCHIVES = Path(__file__).parents[2] / "results/paper/runs"
STUDY_FILES, RUN_FILES = (STUDY, SWEEP, COMPARISON), (CONFIG, METRICS, SUMMARY)


def pack(folder: Path, archive: Path) -> int:
    """Write the archive of a study and return the number of its runs. The same runs, same bytes."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(_list_files(folder))}
    contents = {name: path.read_bytes() for name, path in files.items()}
    lost = 0
    for name, before in _read(archive).items():
        if Path(name).name in STUDY_FILES:
            continue
        lost += name not in contents and Path(name).name == SUMMARY
        if contents.get(name, before) != before:
            raise UsageError(f"{files[name]} differs from the one in {archive}: remove one of them")
    if lost:
        raise UsageError(f"{archive} has {lost} runs that {folder} lacks: unpack it there first")
    archive.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as opened:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)  # no owner, no time
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    write_atomically(archive, [packed.getvalue()])
    return sum(Path(name).name == SUMMARY for name in contents)


def unpack(archive: Path, folder: Path) -> int:
    """Write what an archive has and the folder lacks; return the number of new runs."""
    new: dict[Path, bytes] = {}
    unfinished: set[Path] = set()
    for name, content in _read(archive).items():
        there = folder / name
        if not there.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{archive} has {name}, which is no file of a study")
        in_run = there.name in RUN_FILES
        if in_run and there.parent.exists() and not is_finished(there.parent):
            unfinished.add(there.parent)
            new[there] = content
        elif not there.exists():
            new[there] = content
        elif there.name not in STUDY_FILES and there.read_bytes() != content:
            raise UsageError(f"{there} differs from the one in {archive}: remove one of them")
    for run in unfinished:
        with FolderLock(run):  # nobody is training it
            shutil.rmtree(run)
    # What says that a run is finished comes last.
    for there, content in sorted(new.items(), key=lambda item: item[0].name == SUMMARY):
        there.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(there, [content])
    return sum(there.name == SUMMARY for there in new)


def _read(archive: Path) -> dict[str, bytes]:
    """The files in an archive by name; none if there is no archive yet."""
    if not archive.exists():
        return {}
    found: dict[str, bytes] = {}
    with tarfile.open(archive, "r:xz") as packed:
        for entry in packed:
            content = packed.extractfile(entry)
            if content is None:
                raise UsageError(f"{archive} has {entry.name}, which is no file of a study")
            found[entry.name] = content.read()
    return found


def _list_files(folder: Path) -> Iterator[Path]:
    for name in STUDY_FILES:
        yield from folder.glob(f"**/{name}")
    for summary in folder.glob(f"**/{SUMMARY}"):
        if is_finished(summary.parent):
            # A run that diverged before its first line has no metrics.
            places = (summary.parent / name for name in RUN_FILES)
            yield from (place for place in places if place.exists())
