"""The finished runs of a study in one file, from which it continues elsewhere.

A study of many hours is trained in many sittings, perhaps on many machines. An archive has a few
kilobytes per run: settings, metrics and results, without checkpoints and without runs that have not
finished. It never loses runs: if it has some that the folder lacks, unpack it there first.
Unpacking leaves finished runs alone; one with another result is an error. A run that has finished
in the archive and not in the folder becomes that of the archive.
"""

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import CONFIG, METRICS, SUMMARY, is_finished
from neumann.lab.studies.study_files import COMPARISON, STUDY, SWEEP

ARCHIVES = Path(__file__).parents[2] / "results/paper/runs"
STUDY_FILES, RUN_FILES = (STUDY, SWEEP, COMPARISON), (CONFIG, METRICS, SUMMARY)


def pack(folder: Path, archive: Path) -> int:
    """Write the archive of a study and return the number of its runs. The same runs, same bytes."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(_list_files(folder))}
    lost = {name for name in _list_packed(archive) if Path(name).name == SUMMARY} - files.keys()
    if lost:
        raise UsageError(
            f"{archive} has {len(lost)} runs that {folder} lacks: unpack it there first"
        )
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:xz", preset=9) as packed:
        for name, path in files.items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)  # no owner, no time
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    part.replace(archive)
    return sum(path.name == SUMMARY for path in files.values())


def _list_packed(archive: Path) -> list[str]:
    """The files in an archive; none if there is no archive yet."""
    if not archive.exists():
        return []
    with tarfile.open(archive, "r:xz") as packed:
        return packed.getnames()


def unpack(archive: Path, folder: Path) -> int:
    """Write what an archive has and the folder lacks; return the number of new runs."""
    new: dict[Path, bytes] = {}
    unfinished: set[Path] = set()
    with tarfile.open(archive, "r:xz") as packed:
        for entry in packed:
            content, there = packed.extractfile(entry), folder / entry.name
            if content is None or not there.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{archive} has {entry.name}, which is no file of a study")
            data = content.read()
            in_run = there.name in RUN_FILES
            if in_run and there.parent.exists() and not is_finished(there.parent):
                unfinished.add(there.parent)
                new[there] = data
            elif not there.exists():
                new[there] = data
            elif there.name not in STUDY_FILES and there.read_bytes() != data:
                raise UsageError(f"{there} differs from the one in {archive}: remove one of them")
    for run in unfinished:  # also its checkpoints
        shutil.rmtree(run)
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
