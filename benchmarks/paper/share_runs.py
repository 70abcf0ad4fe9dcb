"""Give a study the finished runs of other studies that are the same run, instead of training twice.

    python -m benchmarks.paper.share_runs studies/paper/shorter-runs.toml runs/main-cifar10
    neumann study studies/paper/shorter-runs.toml --search-only   # chooses the learning rates
    python -m benchmarks.paper.share_runs studies/paper/shorter-runs.toml runs/main-cifar10

The baselines of some studies are those of others: shorter-runs repeats three arms of main-cifar10,
scaling at 512 two of them, scaling-epochs the search of scaling. "whole" in accumulation is
"neumann" in regularizers; "neumann" in sensitivity is "2.2%" in warm-up and "doubling K 4.4%" in
reset-interval. Runs are the same if all settings are that decide what they compute, seed included.
The second call shares the runs on the test set, whose learning rates are known by then. Call it
where the study trains, with the same --set, because settings such as the device are part of a run.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import CONFIG, FORMAT, METRICS, SUMMARY, is_finished
from neumann.lab.storage.run_files import read_run_files
from neumann.lab.studies.engine import Study
from neumann.lab.studies.study_files import write_object
from neumann.lab.studies.study_toml import read_study_toml
from neumann.lab.studies.workers import get_output_folder

WATCHING = ("eval_every", "log_every")  # how closely a run is watched does not change it


def share_runs(study: Study, folders: Sequence[Path]) -> list[Path]:
    """Copy what is the same from the folders of other studies; return the new runs."""
    finished = {
        make_key(read_run_files(path.parent).config): path.parent
        for folder in folders
        for path in sorted(folder.glob(f"**/seed-*/{SUMMARY}"))
    }
    shared = []
    for run in study.list_runs():
        target, record = get_output_folder(run.config), run.config.as_record()
        source = finished.get(make_key(record)) if run.lr_is_known else None
        if source is None or (target / CONFIG).exists() or is_finished(target):
            continue
        target.mkdir(parents=True)
        content = {"config": record, "environment": read_run_files(source).environment}
        write_object(target / CONFIG, {"format": FORMAT, **content})
        shutil.copyfile(source / METRICS, target / METRICS)
        shutil.copyfile(source / SUMMARY, target / SUMMARY)  # last: it says that all is there
        shared.append(target)
    return shared


def make_key(config: dict[str, Any]) -> str:
    """What a run computes, as text. A micro-batch of the whole batch is none."""
    size = config.get("micro_batch_size")
    whole = size is None or size >= config["batch_size"]
    settings = {**config, "micro_batch_size": None if whole else size}
    kept = {name: value for name, value in settings.items() if name not in WATCHING}
    return strict_json.dumps(dict(sorted(kept.items()))).decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="the TOML file of the study that gets the runs")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--set", nargs="*", default=[], help="as for neumann study")
    parser.add_argument("--output", type=Path, help="the folder of the study, as for neumann study")
    arguments = parser.parse_args()
    folder = arguments.output or Path("runs") / arguments.study.stem
    study = read_study_toml(arguments.study, folder, arguments.set)
    shared = share_runs(study, arguments.folders)
    print(f"{len(shared)} of {len(study.list_runs())} runs of {arguments.study.stem} were there")


if __name__ == "__main__":
    main()
