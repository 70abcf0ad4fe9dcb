"""The largest deviation of each backend from Algorithm 2 in long double.

    python -m tests.measure_deviations --output results/deviations.json

Runs the configurations of tests/optim/test_oracle.py: 300 steps through warm-up and resets. The
interpreted Triton kernel is slow and runs one small configuration. The table shows, for float64 and
float32, the largest relative error in the norm of any tensor: weights, evaluation weights, average.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.step.same_bits import use_interpreter
from tests.optim.test_oracle import RUNS
from tests.support.oracle_runs import IMPLEMENTATIONS, Run, deviation, finished, finished_oracle

SMALL = {
    "small": Run([{"sizes": (1, 16, 35), "lr": 0.1}], options={"cubic": 0.05, "repulsive": 0.05})
}


def main() -> None:
    arguments = create_parser(__doc__).parse_args()
    exact = {name: finished_oracle(run) for name, run in {**RUNS, **SMALL}.items()}
    rows = []
    # Triton comes last: from then on, fused=True means its kernel.
    for name, options in sorted(IMPLEMENTATIONS.items(), key=lambda item: item[0] == "triton"):
        if name == "triton":
            use_interpreter()
        runs = SMALL if name == "triton" else RUNS
        worst = {
            str(dtype): max(
                deviation(finished(run, dtype, **options), exact[run_name])
                for run_name, run in runs.items()
            )
            for dtype in (torch.float64, torch.float32)
        }
        rows.append({"implementation": name, "runs": len(runs), **worst})
    cells = [
        [
            row["implementation"],
            str(row["runs"]),
            *(f"{row[str(dtype)]:.1e}" for dtype in (torch.float64, torch.float32)),
        ]
        for row in rows
    ]
    print(format_table(["implementation", "runs", "float64", "float32"], "lrrr", cells))
    write_measurements(arguments, "cpu", rows=rows)


if __name__ == "__main__":
    main()
