"""What it takes to find both ends of a Hessian's spectrum, beside the tools that people use.

    python -m benchmarks.spectrum.compare_tools --side 8 --batch 32 --output spectrum-cpu.json
    python -m benchmarks.spectrum.compare_tools --device cuda --model resnet18 --data cifar10.npz

Every tool gets the same model, weights and batch, and is asked for λ_min and λ_max to 1e-3 in the
way its documentation suggests. All use the BatchNorm statistics of the batch, except PyHessian,
which switches to evaluation mode. The reference is converged to 1e-8 in float64. `right` means that
both ends are within 1e-3 of the largest |λ|, `right, itself` that each is within 1e-3 of its own
size. Peak memory is what a tool needs beyond model and batch; on a CPU it is sampled.
"""

import argparse
import copy
import gc
import importlib
import math
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_cell, format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import read_clock
from benchmarks.spectrum.hessian_tools import TOLERANCE, TOOLS
from benchmarks.spectrum.short_training import Batch, train_on_batch
from neumann.lab.models.image_models import cnn, resnet18
from neumann.spectrum import Hessian, extremes

NUMBERS = ["seconds", "peak_bytes", "products", "smallest", "largest"]
NUMBERS += ["errors", "errors_itself", "right", "right_itself"]


def load_batch(arguments: argparse.Namespace, device: torch.device) -> Batch:
    torch.manual_seed(arguments.seed)
    shape = (arguments.batch, 3, arguments.side, arguments.side)
    if arguments.data is None:
        images, labels = torch.randn(shape), torch.randint(10, (arguments.batch,))
    else:
        stored = importlib.import_module("numpy").load(arguments.data)
        images = torch.from_numpy(stored["x_train"][: arguments.batch]).permute(0, 3, 1, 2).float()
        labels = torch.from_numpy(stored["y_train"][: arguments.batch]).long()
        images = (images - images.mean((0, 2, 3), True)) / images.std((0, 2, 3), keepdim=True)
    return images.to(device), labels.to(device)


def train_model(arguments: argparse.Namespace, batch: Batch) -> nn.Module:
    """The model after some steps of SGD on the batch."""
    torch.manual_seed(arguments.seed)
    model = (cnn if arguments.model == "cnn" else resnet18)(3, 10).to(batch[0].device)
    train_on_batch(model, batch, arguments.steps, lr=0.05, momentum=0.9, nesterov=True)
    return model


def copy_for_tool(model: nn.Module) -> nn.Module:
    """A copy whose BatchNorm uses the batch and updates no buffer, so every tool can handle it."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.track_running_stats = False
    return model


@contextmanager
def record_peak_memory(device: torch.device, peaks: list[int]) -> Iterator[None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        return
    before, highest, stop = read_resident_bytes(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            highest[0] = max(highest[0], read_resident_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    peaks.append(highest[0] - before)


def read_resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_tool(
    name: str, model: nn.Module, batch: Batch, truth: tuple[float, float], repeats: int, seed: int
) -> dict[str, Any]:
    """Measure with one tool. If it fails, its row has no numbers."""
    row: dict[str, Any] = {"tool": name, "says": "", **dict.fromkeys(NUMBERS)}
    package, tool = TOOLS[name]
    device = batch[0].device
    model = copy_for_tool(model)
    times: list[float] = []
    peaks: list[int] = []
    try:
        importlib.import_module(package)
        for _ in range(repeats + 1):
            with record_peak_memory(device, peaks):
                start = read_clock(device)
                found = tool(model, batch, seed)
                times.append(read_clock(device) - start)
    except Exception as error:
        return {**row, "says": f"{type(error).__name__}: {error}"[:200]}
    row |= asdict(found)
    row |= {"seconds": statistics.median(times[1:]), "peak_bytes": max(peaks)}  # after a warm-up
    low = math.inf if found.smallest is None else abs(found.smallest - truth[0])
    high = abs(found.largest - truth[1])
    scale = max(map(abs, truth))
    for suffix, scales in (("", (scale, scale)), ("_itself", map(abs, truth))):
        errors = [error / size for error, size in zip((low, high), scales, strict=True)]
        row[f"right{suffix}"] = max(errors) <= TOLERANCE
        row[f"errors{suffix}"] = [None if math.isinf(error) else error for error in errors]
    return row


def find_reference(model: nn.Module, batch: Batch, tolerance: float, seed: int) -> dict[str, Any]:
    """Both ends in float64, converged far beyond what the tools are asked for."""
    double = copy.deepcopy(model).double()
    operator = Hessian(double, cross_entropy, batch=(batch[0].double(), batch[1]))
    found = extremes(operator, tolerance=tolerance, max_products=1000, seed=seed + 1000, risk=1e-6)
    return {
        "smallest": found.smallest.value,
        "largest": found.largest.value,
        "errors": [found.smallest.error, found.largest.error],
        "converged": found.converged,
        "products": found.products,
        "parameters": found.about.parameters,
    }


def format_rows(rows: list[dict[str, Any]]) -> str:
    verdicts = {None: "", True: "right", False: "wrong"}
    cells = []
    for row in rows:
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        cells.append([row["tool"], format_cell(row["seconds"], "{:.2f}")])
        cells[-1] += [format_cell(peak, "{:.0f}"), format_cell(row["products"], "{}")]
        cells[-1] += [format_cell(row[end], "{:.6g}") for end in ("smallest", "largest")]
        for suffix in ("", "_itself"):
            errors = row[f"errors{suffix}"] or ()
            cells[-1].append(", ".join("inf" if e is None else f"{e:.1e}" for e in errors))
            cells[-1].append(verdicts[row[f"right{suffix}"]])
        cells[-1].append(row["says"])
    heads = ["tool", "s", "peak, MiB", "products", "λ_min", "λ_max", "errors/max\\|λ\\|", "right"]
    heads += ["errors/itself", "right, itself", "says"]
    return format_table(heads, "lrrrrrrlrll", cells)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--model", choices=["cnn", "resnet18"], default="cnn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=16, help="of random images, in pixels")
    parser.add_argument("--data", help=".npz with x_train (N, H, W, 3) and y_train (N,)")
    parser.add_argument("--steps", type=int, default=30, help="of SGD before measuring")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--reference-tolerance", type=float, default=1e-8)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    batch = load_batch(arguments, torch.device(arguments.device))
    model = train_model(arguments, batch)
    truth = find_reference(model, batch, arguments.reference_tolerance, arguments.seed)
    ends = truth["smallest"], truth["largest"]
    print(f"reference: {truth}", flush=True)
    rows = []
    for name in arguments.tools:
        rows.append(run_tool(name, model, batch, ends, arguments.repeats, arguments.seed))
        print(rows[-1], flush=True)
        # After each tool, in case the next one never ends.
        settings = {key: str(value) for key, value in vars(arguments).items()}
        written = {"settings": settings, "reference": truth, "rows": rows}
        write_measurements(arguments, arguments.device, **written)
    print(format_rows(rows))


if __name__ == "__main__":
    main()
