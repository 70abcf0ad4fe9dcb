"""How many weights and warps one program of the CUDA kernel should take.

    python -m benchmarks.step.tune_blocks --output results/blocks-h200.json

Times the fused step over block sizes and numbers of warps, with float32 and with bfloat16 state,
beside torch's fused AdamW and a plain copy of as many numbers, in one process.
"""

from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import time_on_gpu
from benchmarks.step.candidates import CLOCK, PlainCopy
from benchmarks.step.shapes import CASES, make_parameters
from neumann import Neumann
from neumann.optim import backends
from neumann.optim.backends.cuda import TritonBackend

BLOCKS = ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
STATES = {"float32": (None, 28), "bfloat16": (torch.bfloat16, 20)}  # dtype, bytes moved per weight
DEVICE = torch.device("cuda")


def time_steps(optimizer: Any) -> float:
    """The median time of a step on the GPU, in milliseconds."""
    for _ in range(4):
        optimizer.step()
    return median(time_on_gpu(optimizer.step) for _ in range(30))


def build_optimizer(
    parameters: list[nn.Parameter], dtype: torch.dtype | None, block: int, warps: int
) -> Neumann:
    class Tuned(TritonBackend):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, block=block, warps=warps)

    backends.FUSED[:] = [Tuned]
    return Neumann(parameters, 1e-3, state_dtype=dtype, fused=True, **CLOCK)


def measure(case: str) -> list[dict[str, Any]]:
    """A row per block size: time relative to AdamW, bandwidth relative to the plain copy."""
    shapes = CASES[case].shapes
    copy = time_steps(PlainCopy(make_parameters(shapes, DEVICE)))
    adamw = time_steps(torch.optim.AdamW(make_parameters(shapes, DEVICE), fused=True))
    rows = []
    for state, (dtype, moved) in STATES.items():
        for block, warps in BLOCKS:
            parameters = make_parameters(shapes, DEVICE)
            spent = time_steps(build_optimizer(parameters, dtype, block, warps))
            row = {"case": case, "state": state, "block": block, "warps": warps, "gpu_ms": spent}
            bandwidth = (moved / spent) / (8 / copy)
            rows.append({**row, "of_adamw": spent / adamw, "of_copy": bandwidth})
    return rows


def main() -> None:
    parser = create_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["a", "b", "c"])
    arguments = parser.parse_args()
    rows = [row for case in arguments.cases for row in measure(case)]
    form = "{title}|{state}|{block}|{warps}|{gpu_ms:.3f}|{of_adamw:.3f}|{percent:.1f} %"
    cells = [
        form.format(title=CASES[row["case"]].title, percent=100 * row["of_copy"], **row).split("|")
        for row in rows
    ]
    heads = ["case", "state", "block", "warps", "gpu ms", "× AdamW", "of copy"]
    print(format_table(heads, "llrrrrr", cells))
    write_measurements(arguments, DEVICE, rows=rows)


if __name__ == "__main__":
    main()
