"""How fast the lab trains, beside bare loops over the same model, data and optimizer.

    python benchmarks/training.py --device cuda --output results/training-h200.json

Three loops take turns for an epoch each, in one process: `eager` is what one writes by hand,
`captured` is the same with torch.compile and the forward and backward pass as one CUDA graph (on a
CPU: nothing of both), `lab` is neumann.lab.training with its records, checks, learning-rate
schedule and logging every 50 steps. All draw batches from the lab's data set on the device, with
flips and shifts. Evaluation, checkpoints and compilation are outside the clock of all three.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from statistics import median
from threading import Thread
from typing import Any

import torch
from environment import environment
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.config import TrainConfig
from neumann.lab.data import Plan
from neumann.lab.gradients import CapturedGradients, Gradients
from neumann.lab.models import build
from neumann.lab.opening import open_dataset
from neumann.lab.processes import Process
from neumann.lab.training import Training


@dataclass(frozen=True)
class Row:
    """One loop."""

    loop: str
    images_per_second: float  # median over epochs
    epochs: tuple[float, ...]  # images per second of each


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=12, help="timed epochs of each loop")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
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
    loops: dict[str, Iterator[float]] = {
        "eager": bare(config, fast=False),
        "captured": bare(config, fast=True),
        "lab": lab(config),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for epoch in range(config.epochs):
        for name, epochs in loops.items():
            passed = next(epochs)
            if epoch:  # the first compiles
                seconds[name].append(passed)
    images = arguments.examples // config.batch_size * config.batch_size
    rows = [
        Row(name, images / median(times), tuple(images / s for s in times))
        for name, times in seconds.items()
    ]
    report(rows, config, arguments)


def bare(config: TrainConfig, *, fast: bool) -> Iterator[float]:
    """Seconds of each epoch of a loop without a lab."""
    device = torch.device(config.device)
    dataset = open_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset).to(device)
    if config.channels_last == "on":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sgd = torch.optim.SGD(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )
    step = passes(model, sgd, config, fast and device.type == "cuda")
    for epoch in range(config.epochs):
        wait(device)
        begun = time.perf_counter()
        for pieces in dataset.train.batches(Plan(config.batch_size, epoch=epoch)):
            step(pieces)
            sgd.step()
        wait(device)
        yield time.perf_counter() - begun


def passes(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, fast: bool
) -> Callable[[Any], Any]:
    """Forward and backward, written out, or as the lab has them."""

    def autocast() -> torch.autocast:
        enabled = config.amp == "bf16"
        return torch.autocast(
            config.device, torch.bfloat16, enabled=enabled, cache_enabled=not fast
        )

    if fast:
        return CapturedGradients(
            Gradients(model, optimizer, cross_entropy, autocast, compiled=True)
        )

    def eager(pieces: Any) -> None:
        ((inputs, labels),) = pieces
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    return eager


def lab(config: TrainConfig) -> Iterator[float]:
    """Seconds of each epoch of the lab's training clock; the run waits in a thread for its turn."""
    training = Training(config, Process())
    ticks: Queue[float] = Queue()
    turns: Queue[None] = Queue()

    def observe(line: dict[str, Any]) -> None:
        if line["kind"] == "epoch":
            ticks.put(line["seconds"])
            turns.get()  # the others' turn

    with tempfile.TemporaryDirectory() as folder:
        runner = Thread(target=training.run, args=(Path(folder) / "run", observe), daemon=True)
        runner.start()
        before = 0.0
        for _ in range(config.epochs):
            now = ticks.get(timeout=600)  # a thread that has died gives no more
            yield now - before
            before = now
            turns.put(None)
        runner.join()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def report(rows: list[Row], config: TrainConfig, arguments: argparse.Namespace) -> None:
    speed = {row.loop: row.images_per_second for row in rows}
    print(f"{'loop':10}{'images/s':>12}{'of captured':>13}")
    for row in rows:
        print(
            f"{row.loop:10}{row.images_per_second:12,.0f}"
            f"{row.images_per_second / speed['captured']:13.3f}"
        )
    overhead = speed["captured"] / speed["lab"] - 1
    print(f"the lab takes {overhead:+.1%} of the captured loop's time more")
    if arguments.output:
        content = {
            "environment": environment(torch.device(config.device), arguments.commit),
            "config": config.as_dict(),
            "overhead": overhead,
            "rows": [asdict(row) for row in rows],
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
