"""What BatchNorm over ghost batches adds to a training step: forward, backward and update.

    python -m benchmarks.step.ghost_batchnorm --device cuda --output ghost-batchnorm-h200.json

ResNet-9 on random images of 32 × 32 pixels, with SGD. Plain BatchNorm and ghost batches of 32 take
turns in one process, in rounds of a few steps. On a GPU a step is the lab's: bfloat16,
channels_last, compiled, and captured as a CUDA graph. The table shows the median over rounds and
its ratio to plain BatchNorm.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import read_clock, take_turns
from neumann.lab.models.image_models import resnet9
from neumann.lab.training.batchnorm_layers import use_ghost_batches
from neumann.lab.training.gradients import (
    ORDINARY_STEPS,
    CapturedGradientComputer,
    GradientComputer,
    Pieces,
)

PLAIN, GHOST = "plain", "ghost"
CLASSES, PIXELS = 10, 32


def build_step(
    form: str, batch: int, device: torch.device, arguments: argparse.Namespace
) -> Callable[[], None]:
    """Return a training step of a new network, compiled and captured where that is asked for."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = resnet9(3, CLASSES, arguments.width).to(device)
    images = torch.randn(batch, 3, PIXELS, PIXELS, device=device)
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(memory_format=torch.channels_last)
    if form == GHOST:
        use_ghost_batches(model, arguments.group)
    pieces: Pieces = [(images, torch.randint(CLASSES, (batch,), device=device))]
    sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, fused=on_gpu)
    autocast = functools.partial(
        torch.autocast, device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=not on_gpu
    )
    computer: Any = GradientComputer(model, sgd, cross_entropy, autocast, arguments.compile)
    if on_gpu:
        computer = CapturedGradientComputer(computer)

    def step() -> None:
        computer.compute(pieces)
        sgd.step()

    for _ in range(ORDINARY_STEPS + 1 if on_gpu else 1):  # compiles and captures
        step()
    return step


def measure(
    batch: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds per step of each form, one value per round."""

    def time_round(step: Callable[[], None]) -> float:
        start = read_clock(device)
        for _ in range(arguments.steps):
            step()
        return (read_clock(device) - start) / int(arguments.steps)

    steps = {form: build_step(form, batch, device, arguments) for form in (PLAIN, GHOST)}
    timers = {form: functools.partial(time_round, step) for form, step in steps.items()}
    return take_turns(timers, arguments.rounds)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--group", type=int, default=32, help="examples of a ghost batch")
    parser.add_argument("--width", type=int, default=64, help="of ResNet-9")
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = []
    rows = []
    for batch in arguments.batch_sizes:
        seconds = measure(batch, device, arguments)
        medians = {form: statistics.median(times) for form, times in seconds.items()}
        ratio = medians[GHOST] / medians[PLAIN]
        cases.append({"batch": batch, "seconds": seconds, "ratio": ratio})
        rows.append([f"{batch:,}", *(f"{1e3 * medians[f]:.2f}" for f in seconds), f"{ratio:.3f}"])
    print(format_table(["batch", "plain, ms", "ghost, ms", "ratio"], "rrrr", rows))
    settings = {"group": arguments.group, "width": arguments.width, "compiled": arguments.compile}
    write_measurements(arguments, device, **settings, cases=cases)


if __name__ == "__main__":
    main()
