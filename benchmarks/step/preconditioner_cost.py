"""What a preconditioner P adds to the time of a training step: forward, backward and update.

    python -m benchmarks.step.preconditioner_cost --device cuda --output preconditioning.json

ResNet-9 at batch 8192 and ResNet-50 (224 × 224) at batch 256 on random images, with bfloat16
autocast, channels last, compiled. The optimizers take turns on one model, in rounds of a few steps.
The table shows the median over rounds and its ratio to P = I. On a GPU, "capturable" replays P from
a graph that the optimizer has captured by itself, and "in a graph" replays the whole step as one,
so its launches cost the host nothing; its gradients stay in place, so the backward pass adds to
them, which the others do not need. If it cannot be captured, it is left out and named with the
reason.

The numbers are written after every case.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import read_clock, take_turns
from benchmarks.step.networks import build_resnet50
from benchmarks.step.timed_optimizer import describe_error, free_memory
from neumann import Neumann
from neumann.lab.models.image_models import resnet9

PLAIN = "Neumann, P = I"
CAPTURABLE = "Neumann, spectral, capturable"
CAPTURED = "Neumann, spectral, in a graph"
WARM_UP = 3  # steps before the capture
PLAIN_FORM: dict[str, Any] = {"warmup_steps": 0, "reset_steps": 0, "cubic": 0.0, "repulsive": 0.0}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    PLAIN: lambda p: Neumann(p, lr=1e-4, **PLAIN_FORM),
    "Neumann, diagonal": lambda p: Neumann(p, lr=1e-4, precondition="diagonal"),
    "Neumann, spectral": lambda p: Neumann(p, lr=1e-4, precondition="spectral"),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


class Stepping(Protocol):
    """What a round needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


class CapturedStep:
    """The spectral form with its step captured once; gradients stay where the graph reads them."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self._gradients = [(p, torch.zeros_like(p)) for p in parameters]
        optimizer = Neumann(parameters, lr=1e-4, precondition="spectral", capturable=True)
        self._optimizer = optimizer  # a replay uses its state
        self.zero_grad()
        for _ in range(WARM_UP):
            optimizer.step()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            optimizer.step()

    def step(self) -> None:
        self._graph.replay()

    def zero_grad(self) -> None:
        for p, gradient in self._gradients:
            p.grad = gradient
            gradient.zero_()


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {  # batch, pixels, classes
    "ResNet-9": (functools.partial(resnet9, 3, 10), 8192, 32, 10),
    "ResNet-50": (build_resnet50, 256, 224, 1000),
}


def measure(
    name: str, device: torch.device, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per step of each optimizer, one value per round, and why one is left out."""
    build_model, batch, side, classes = CASES[name]
    batch = arguments.batch or batch
    steps: int = arguments.steps
    torch.manual_seed(0)
    model = build_model().to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, side, side, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device=device)
    forward = torch.compile(model) if arguments.compile else model

    def time_round(optimizer: Stepping) -> float:
        optimizer.zero_grad()
        start = read_clock(device)
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(forward(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (read_clock(device) - start) / steps

    optimizers: dict[str, Stepping] = {
        name: build(model.parameters()) for name, build in OPTIMIZERS.items()
    }
    left_out: dict[str, str] = {}
    if device.type == "cuda":
        optimizers[CAPTURABLE] = Neumann(
            model.parameters(), lr=1e-4, precondition="spectral", capturable=True
        )
        try:
            optimizers[CAPTURED] = CapturedStep(model)
        except Exception as error:  # the others can be measured without it
            left_out[CAPTURED] = describe_error(error)
    free_memory(device)
    timers = {
        name: functools.partial(time_round, optimizer) for name, optimizer in optimizers.items()
    }
    return take_turns(timers, arguments.rounds), left_out


def format_cases(cases: dict[str, Any]) -> str:
    rows = []
    for name, case in cases.items():
        for optimizer, ratio in case["ratios"].items():
            median = statistics.median(case["seconds"][optimizer])
            rows.append([name, optimizer, f"{1e3 * median:.2f}", f"{ratio:.3f}"])
        rows += [[name, optimizer, why, ""] for optimizer, why in case["left_out"].items()]
    return format_table(["model", "optimizer", "ms per step", "ratio"], "llrr", rows)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, help="replaces the batch size of every case")
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases: dict[str, Any] = {}
    for name in arguments.cases:
        seconds, left_out = measure(name, device, arguments)
        medians = {optimizer: statistics.median(times) for optimizer, times in seconds.items()}
        ratios = {optimizer: median / medians[PLAIN] for optimizer, median in medians.items()}
        cases[name] = {"seconds": seconds, "ratios": ratios, "left_out": left_out}
        write_measurements(arguments, device, cases=cases)
    print(format_cases(cases))


if __name__ == "__main__":
    main()
