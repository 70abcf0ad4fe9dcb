"""Bring the finished runs of `neumann study` into results/paper, where verdicts are made from.

    python -m benchmarks.paper.collect_runs runs/main-cifar10 runs/scaling

The folder of a study has the name of its file. Collecting again adds what is new. A run that is
there already with another result is an error: results are never replaced silently.
"""

import argparse
from pathlib import Path

from benchmarks.common.ledger import Ledger, Run
from benchmarks.paper.run_lines import Results, RunKey, collect_study
from neumann.lab.errors import UsageError

ROOT = Path(__file__).parents[2]
COMPARED = ("score", "diverged", "lr", "epochs", "batch_size", "steps")


def add_runs(ledger: Ledger[RunKey], runs: dict[RunKey, Run]) -> int:
    """Add the runs that the ledger lacks; return how many."""
    for key, run in runs.items():
        before = ledger.runs.get(key, run)
        changed = [name for name in COMPARED if before.get(name) != run.get(name)]
        if changed:
            name = changed[0]
            raise UsageError(
                f"{ledger.path} has {name} {before.get(name)} for {key.arm}, seed {key.seed} "
                f"({key.stage} {key.point}), but the folder has {run.get(name)}"
            )
    new = {key: run for key, run in runs.items() if key not in ledger.runs}
    if new:
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
    for key, run in new.items():
        ledger.add(key, run)
    return len(new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--commit", help="of runs that were trained where git was not available")
    parser.add_argument("--results", type=Path, default=ROOT / "results/paper")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    for folder in arguments.folders:
        found = {
            key: {"commit": arguments.commit, **run} if arguments.commit else run
            for key, run in collect_study(folder).items()
        }
        added = add_runs(results.open(folder.name), found)
        print(f"{folder.name}: {len(found)} finished runs, {added} new")


if __name__ == "__main__":
    main()
