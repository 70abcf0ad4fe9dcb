"""How fast the lab trains, beside bare loops over the same model, data and optimizer.

    python -m benchmarks.step.lab_throughput --device cuda --output training-h200.json

Three loops take turns in one process, an epoch each. `eager` is what one writes by hand. `captured`
adds torch.compile and one CUDA graph for forward and backward (on a CPU it is `eager`). `lab` is
neumann.lab.training.loop with its records, checks, schedule and a log line every 50 steps.
Evaluation, checkpoints and compilation do not count in any of them.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from statistics import median
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import read_clock, take_turns
from neumann.lab.config import TrainConfig
from neumann.lab.data import Plan
from neumann.lab.models import build
from neumann.lab.training.gradients import CapturedGradientComputer, GradientComputer
from neumann.lab.training.inputs import open_dataset
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process

EPOCH_TIMEOUT = 600  # seconds; a training thread that died never reports


def time_bare_loop(config: TrainConfig, *, captured: bool) -> Iterator[float]:
    """Yield the seconds of each epoch of a loop without the lab."""
    device = torch.device(config.device)
    dataset = open_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset).to(device)
    if config.channels_last == "on":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "fused": device.type == "cuda"}
    sgd = torch.optim.SGD(model.parameters(), 0.1, weight_decay=config.weight_decay, **options)
    compute_gradients = make_pass(model, sgd, config, captured and device.type == "cuda")
    for epoch in range(config.epochs):
        start = read_clock(device)
        for pieces in dataset.train.batches(Plan(config.batch_size, epoch=epoch)):
            compute_gradients(pieces)
            sgd.step()
        yield read_clock(device) - start


def make_pass(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, captured: bool
) -> Callable[[Any], Any]:
    """Forward and backward: captured as in the lab, or written out."""

    def autocast() -> torch.autocast:
        enabled, cached = config.amp == "bf16", not captured
        return torch.autocast(config.device, torch.bfloat16, enabled, cached)

    if captured:
        lab = GradientComputer(model, optimizer, cross_entropy, autocast, compiled=True)
        return CapturedGradientComputer(lab).compute

    def run_eagerly(pieces: Any) -> None:
        ((inputs, labels),) = pieces
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = cross_entropy(model(inputs), labels)
        loss.backward()

    return run_eagerly


def time_lab(config: TrainConfig) -> Iterator[float]:
    """Yield the seconds of each epoch on the lab's training clock.

    The run lives in a thread, which waits after each epoch until the next one is asked for.
    """
    training = Training(config, Process())
    finished, resume = Queue[float](), Queue[None]()

    def observe(line: dict[str, Any]) -> None:
        if line["kind"] == "epoch":
            finished.put(line["seconds"])
            resume.get()

    with tempfile.TemporaryDirectory() as folder:
        runner = Thread(target=training.run, args=(Path(folder) / "run", observe), daemon=True)
        runner.start()
        before = 0.0
        for _ in range(config.epochs):
            now = finished.get(timeout=EPOCH_TIMEOUT)
            yield now - before
            before = now
            resume.put(None)
        runner.join()


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=12, help="timed epochs of each loop")
    arguments = parser.parse_args()
    config = TrainConfig(
        data=f"synthetic:3x32x32,10,{arguments.examples}",
        flip=True,
        shift=4,
        model=arguments.model,
        opt=arguments.opt,
        weight_decay=5e-4,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs + 1,
        device=arguments.device,
        eval_every=1000,
        checkpoint_every=0,
    ).resolve()
    loops = {
        "eager": time_bare_loop(config, captured=False),
        "captured": time_bare_loop(config, captured=True),
        "lab": time_lab(config),
    }
    timers = {name: partial(next, epochs) for name, epochs in loops.items()}
    seconds = take_turns(timers, arguments.epochs)
    images = arguments.examples // config.batch_size * config.batch_size
    speed = {name: images / median(times) for name, times in seconds.items()}
    rows = [
        {"loop": name, "images_per_second": speed[name], "epochs": [images / s for s in times]}
        for name, times in seconds.items()
    ]
    cells = [[n, f"{s:,.0f}", f"{s / speed['captured']:.3f}"] for n, s in speed.items()]
    print(format_table(["loop", "images/s", "of captured"], "lrr", cells))
    overhead = speed["captured"] / speed["lab"] - 1
    print(f"\nthe lab takes {overhead:+.1%} more time than the captured loop")
    written = {"config": config.as_dict(), "overhead": overhead, "rows": rows}
    write_measurements(arguments, config.device, **written)


if __name__ == "__main__":
    main()
