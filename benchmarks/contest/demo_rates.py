"""Choose the learning rates of `neumann demo` on held-out images.

    python -m benchmarks.contest.demo_rates --output results/demo-rates.json

It runs the search of studies/demo.toml and nothing of its test, so no test image is seen. Arms of
one optimizer differ in weight decay, and the best one, by the mean accuracy over the seeds, stands
for the optimizer; if two are equal, the one that comes first, without decay.
"""

from pathlib import Path
from typing import Any

from benchmarks.common.script import create_parser, write_measurements
from neumann.lab.commands.progress import show_study
from neumann.lab.contenders import Contender
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.lr_sweep import ArmSearch
from neumann.lab.studies.study_toml import read_study_toml

STUDY = Path("studies/demo.toml")
VARIANT = ", decay"  # at the end of an arm's name: the same optimizer with weight decay


def run_search(folder: Path, jobs: int) -> list[ArmSearch]:
    """Try all learning rates of all arms; called again, it continues."""
    study = read_study_toml(STUDY, folder, jobs=jobs)
    with show_study("search") as observer:
        (found,) = study.search(Session(observer)).values()
    return found


def describe_search(found: list[ArmSearch]) -> dict[str, Any]:
    """What each arm scored at each learning rate, in % of the held-out images."""
    return {
        arm.name: {
            "arm": str(Contender.parse(arm.arm).with_lr(arm.best or 0.0)),
            "lr": arm.best,
            "bracketed": arm.bracketed,
            "lrs": arm.lrs,
            "accuracy": [None if s.mean is None else round(s.mean, 3) for s in arm.scores],
            "diverged": [s.diverged for s in arm.scores],
        }
        for arm in found
    }


def choose_variants(searched: dict[str, Any]) -> dict[str, str]:
    """The arm that stands for each optimizer, by the name of the optimizer."""
    chosen: dict[str, str] = {}
    for name in searched:
        optimizer = name.removesuffix(VARIANT)
        held = chosen.get(optimizer)
        if held is None or get_best_accuracy(searched[name]) > get_best_accuracy(searched[held]):
            chosen[optimizer] = name
    return chosen


def get_best_accuracy(arm: dict[str, Any]) -> float:
    return float(arm["accuracy"][arm["lrs"].index(arm["lr"])])


def main() -> None:
    parser = create_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-rates"))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    searched = describe_search(run_search(arguments.folder, arguments.jobs))
    chosen = choose_variants(searched)
    for name, arm in searched.items():
        mark = "*" if name in chosen.values() else " "
        print(f"{mark} {name:24} lr {arm['lr']:<8g} {get_best_accuracy(arm):.2f} %")
    write_measurements(arguments, "cpu", study=STUDY.as_posix(), chosen=chosen, arms=searched)


if __name__ == "__main__":
    main()
