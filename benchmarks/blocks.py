"""How many weights and warps a program of the CUDA kernel should take.

Times the fused step, in float32 and with bfloat16 state, over block sizes and warps, beside torch's
fused AdamW and a plain copy of as many numbers, in one process.

    python benchmarks/blocks.py --output results/blocks-h200.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from environment import environment
from shapes import CASES, TITLES, weights
from torch import nn

from neumann import Neumann
from neumann.optim.kernels import cuda

BLOCKS = ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
STATES = {"float32": (None, 28), "bfloat16": (torch.bfloat16, 20)}  # and bytes moved a weight
DEVICE = torch.device("cuda")


def gpu_ms(call: Callable[[], Any]) -> float:
    """Median time on the device, queued behind a sleeping kernel so that launches do not count."""
    for _ in range(4):
        call()
    times: list[float] = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def parameters(case: str) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in CASES[case]]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def measure(case: str) -> list[dict[str, Any]]:
    source, target = (torch.randn(weights(case), device=DEVICE) for _ in "ab")
    copy = gpu_ms(lambda: target.copy_(source))
    adamw = gpu_ms(torch.optim.AdamW(parameters(case), fused=True).step)
    rows = []
    for state, (dtype, moved) in STATES.items():
        for block, warps in BLOCKS:
            optimizer = Neumann(
                parameters(case), 1e-3, warmup_steps=1, reset_steps=0, state_dtype=dtype
            )
            stepper = cuda.Stepper(DEVICE, block=block, warps=warps, rounding="stochastic")
            optimizer._execution._stepper = stepper  # type: ignore[union-attr]
            spent = gpu_ms(optimizer.step)
            rows.append(
                {
                    "case": case,
                    "state": state,
                    "block": block,
                    "warps": warps,
                    "gpu_ms": spent,
                    "of_adamw": spent / adamw,
                    "of_copy": (moved / spent) / (8 / copy),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["a", "b", "c"])
    parser.add_argument("--commit", help="name of the commit, where git cannot tell")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = []
    print("| case | state | block | warps | gpu ms | × AdamW | of copy |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for case in arguments.cases:
        for line in measure(case):
            rows.append(line)
            numbers = (
                f"{line['gpu_ms']:.3f} | {line['of_adamw']:.3f} | {100 * line['of_copy']:.1f} %"
            )
            chosen = f"{line['state']} | {line['block']} | {line['warps']}"
            print(f"| {TITLES[case]} | {chosen} | {numbers} |", flush=True)
    if arguments.output:
        content = {**environment(DEVICE, arguments.commit), "rows": rows}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
