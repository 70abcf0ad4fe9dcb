"""The largest deviation of each implementation from Algorithm 2 in long double.

Runs the tests' own configurations (300 steps through warm-up and resets; the interpreted Triton
kernel on one of them) and prints, for float64 and float32, the largest relative error in the norm
of any tensor: weights, evaluation weights, average.

    python benchmarks/deviations.py --output results/deviations.json
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "optim")]

from environment import environment  # noqa: E402
from test_oracle import RUNS  # noqa: E402

from neumann.optim import execution  # noqa: E402
from oracle_runs import IMPLEMENTATIONS, Run, deviation, finished, finished_oracle  # noqa: E402

SMALL = {
    "small": Run([{"sizes": (1, 16, 35), "lr": 0.1}], options={"cubic": 0.05, "repulsive": 0.05})
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    exact = {name: finished_oracle(run) for name, run in {**RUNS, **SMALL}.items()}
    choose = execution._fused
    rows = []
    print("| implementation | runs | float64 | float32 |\n|---|--:|--:|--:|")
    for implementation, options in IMPLEMENTATIONS.items():
        triton = implementation == "triton"
        execution._fused = (  # the CUDA path, on CPU tensors
            (lambda devices: (execution.Implementation.CUDA, None)) if triton else choose
        )
        runs = SMALL if triton else RUNS
        worst = {
            str(dtype): max(
                deviation(finished(run, dtype, **options), exact[name])
                for name, run in runs.items()
            )
            for dtype in (torch.float64, torch.float32)
        }
        rows.append({"implementation": implementation, "runs": len(runs), **worst})
        numbers = " | ".join(f"{value:.1e}" for value in worst.values())
        print(f"| {implementation} | {len(runs)} | {numbers} |", flush=True)
    if arguments.output:
        content = {**environment(torch.device("cpu")), "rows": rows}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
