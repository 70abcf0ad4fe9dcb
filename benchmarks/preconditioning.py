"""What P adds to a training step: forward, backward and update, with and without.

    python benchmarks/preconditioning.py --device cuda --output results/preconditioning-h200.json

ResNet-9 at batch 8192 and ResNet-50 (224 × 224) at batch 256, bfloat16 autocast, channels last,
compiled; random images. The optimizers take turns on one model, in rounds of a few steps, and every
step's time is that of its round; the table has the median of the rounds and the ratio to P = I.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.lab.models.small import resnet9

PLAIN: dict[str, Any] = {"warmup_steps": 0, "reset_steps": 0, "cubic": 0.0, "repulsive": 0.0}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Neumann, P = I": lambda p: Neumann(p, lr=1e-4, **PLAIN),
    "Neumann, diagonal": lambda p: Neumann(p, lr=1e-4, precondition="diagonal"),
    "Neumann, spectral": lambda p: Neumann(p, lr=1e-4, precondition="spectral"),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as build

    model: nn.Module = build(num_classes=1000)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "ResNet-9": (functools.partial(resnet9, 3, 10), 8192, 32, 10),
    "ResNet-50": (resnet50, 256, 224, 1000),
}


def measure(case: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step, round by round, of each optimizer."""
    build, batch, side, classes = CASES[case]
    batch = arguments.batch or batch
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    model: nn.Module = build().to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, side, side, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device=device)
    compiled = torch.compile(model) if arguments.compile else model
    optimizers = {name: make(model.parameters()) for name, make in OPTIMIZERS.items()}

    def round_of(optimizer: torch.optim.Optimizer) -> float:
        begin = _now(device)
        for _ in range(arguments.steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(compiled(images), labels)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return (_now(device) - begin) / float(arguments.steps)

    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(arguments.rounds + 1):
        for name, optimizer in optimizers.items():
            seconds = round_of(optimizer)
            if number:  # the first compiles
                times[name].append(seconds)
    return times


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, help="in the place of each case's own")
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "environment": environment(torch.device(arguments.device), arguments.commit),
        "cases": {},
    }
    print(f"{'':10} {'':20} {'ms a step':>10} {'ratio':>7}")
    for case in arguments.cases:
        times = measure(case, arguments)
        medians = {name: statistics.median(rounds) for name, rounds in times.items()}
        plain = medians["Neumann, P = I"]
        result["cases"][case] = {
            "seconds": times,
            "ratios": {name: median / plain for name, median in medians.items()},
        }
        for name, median in medians.items():
            print(f"{case:10} {name:20} {median * 1e3:10.2f} {median / plain:7.3f}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
