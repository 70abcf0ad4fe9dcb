"""The paper's figure of extreme eigenvalues during training: 10 Lanczos steps, and enough.

    python -m benchmarks.spectrum.along_training --device cuda --data-dir data --output figure.json
    python -m benchmarks.spectrum.along_training --plot figure.json

ResNet-9 on CIFAR-10 with SGD at batch 128, in bfloat16. At evenly spaced steps the script measures
λ_min and λ_max of the loss on the same three mini-batches in float32, with BatchNorm over the
batch: after 10 Lanczos steps, as the paper does, and converged.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.labels import spread_labels
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.spectrum.short_training import PROBE_EPOCH, train_with_pauses
from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.lab.report.palette import ARMS, GRID, INK, MUTED
from neumann.spectrum import Hessian, extremes

BATCH = 128
PAPER_STEPS = 10
TOLERANCE = 0.02  # of the converged runs, relative to each end
MAX_PRODUCTS = 300
ENDS = {"largest": "λmax", "smallest": "λmin"}
# How both were measured, and the color of each in a figure.
WAYS = {"few": (f"{PAPER_STEPS} Lanczos steps", ARMS[1][0]), "enough": ("converged", ARMS[0][0])}
NAME_HEIGHT = 0.07  # of the axes: the least distance between two names


def train_and_measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    data = load(arguments.data, data_dir=arguments.data_dir, device=torch.device(arguments.device))
    torch.manual_seed(arguments.seed)
    model = build(arguments.model, data).to(arguments.device)
    sgd = torch.optim.SGD(model.parameters(), lr=arguments.lr, weight_decay=5e-4)
    steps_per_epoch = Plan(BATCH).count_batches(len(data.train))
    total = arguments.epochs * steps_per_epoch
    due = {round(k * total / (arguments.points - 1)) for k in range(arguments.points)}
    batches = data.train.batches(Plan(BATCH, epoch=PROBE_EPOCH))
    probes = [pieces[0] for pieces in islice(batches, arguments.batches)]

    def choose_lr(step: int) -> float:
        return float(arguments.lr * (1 if arguments.constant_lr else 1 - step / total))

    steps = train_with_pauses(model, sgd, data, BATCH, arguments.epochs, choose_lr)
    return [measure(model, probes, step, step / steps_per_epoch) for step in steps if step in due]


def measure(
    model: nn.Module, probes: list[tuple[Tensor, Tensor]], step: int, epoch: float
) -> dict[str, Any]:
    """Both ends of the spectrum on every probe, after few products ("few") and after enough."""
    found = []
    start = time.perf_counter()
    for batch in probes:
        operator = Hessian(model, cross_entropy, batch=batch)
        few = extremes(operator, tolerance=0.0, max_products=PAPER_STEPS)
        enough = extremes(
            operator, tolerance=TOLERANCE, relative_to="itself", max_products=MAX_PRODUCTS
        )
        found.append({"few": few.as_dict(), "enough": enough.as_dict()})
    seconds = time.perf_counter() - start
    few_ends, ends = found[0]["few"], found[0]["enough"]
    print(
        f"epoch {epoch:5.2f}  λ {ends['smallest']['value']:.4g} to {ends['largest']['value']:.4g}, "
        f"after {PAPER_STEPS} steps {few_ends['smallest']['value']:.4g} to "
        f"{few_ends['largest']['value']:.4g}; {ends['products']} products, {seconds:.1f} s",
        flush=True,
    )
    return {"step": step, "epoch": epoch, "batches": found}


def summarize(points: list[dict[str, Any]]) -> list[str]:
    """What the figure shows, in sentences."""
    batches = [batch for point in points for batch in point["batches"]]
    errors, curves = {}, {}
    for end in ("smallest", "largest"):
        errors[end] = [abs(b["few"][end]["value"] / b["enough"][end]["value"] - 1) for b in batches]
        curves[end] = [median_value(point, "enough", end) for point in points]
    low, high = errors["smallest"], errors["largest"]
    smallest, largest = curves["smallest"], curves["largest"]
    peak = largest.index(max(largest))
    converged = sum(all(b["enough"][end]["converged"] for end in errors) for b in batches)
    return [
        f"After {PAPER_STEPS} steps λ_max is off by {median_high(high):.1%} (median; worst "
        f"{max(high):.1%}), and λ_min by {median_high(low):.0%} (median; worst {max(low):.0%}).",
        f"λ_max (median of {len(points[0]['batches'])} batches) starts at {largest[0]:.3g}, peaks "
        f"at {largest[peak]:.3g} in epoch {points[peak]['epoch']:.1f} and ends at "
        f"{largest[-1]:.3g}.",
        f"λ_min starts at {smallest[0]:.3g}, falls to {min(smallest):.3g} and ends at "
        f"{smallest[-1]:.3g}; relative to λ_max it is {-smallest[0] / largest[0]:.0%} at first and "
        f"{-smallest[-1] / largest[-1]:.0%} at the end.",
        f"{len(batches) - converged} of {len(batches)} measurements did not reach {TOLERANCE:.0%} "
        f"of both ends within {MAX_PRODUCTS} products.",
    ]


def median_value(point: dict[str, Any], way: str, end: str) -> float:
    return float(median_high([batch[way][end]["value"] for batch in point["batches"]]))


def plot(path: Path) -> None:
    """Draw λ_max and λ_min, each measured in both ways, into a PNG each beside the JSON file."""
    points = json.loads(path.read_text())["points"]
    for end, name in ENDS.items():
        picture = path.with_name(f"{path.stem}-{end}.png")
        draw_end(points, end, f"{name} of three mini-batches of {BATCH}", picture)
        print(picture)


def draw_end(points: list[dict[str, Any]], end: str, title: str, path: Path) -> None:
    """Draw one end of the spectrum: dots are mini-batches, lines their medians, named beside."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.9), layout="constrained")
    axes = figure.subplots()
    epochs = [point["epoch"] for point in points]
    last = {way: median_value(points[-1], way, end) for way in WAYS}
    for way, (_, color) in WAYS.items():
        axes.plot(epochs, [median_value(p, way, end) for p in points], color=color, linewidth=1.8)
        dots = [(p["epoch"], b[way][end]["value"]) for p in points for b in p["batches"]]
        axes.plot(*zip(*dots, strict=True), ".", color=color, markersize=5)
    bottom, top = axes.get_ylim()
    heights = spread_labels(list(last.values()), NAME_HEIGHT * (top - bottom))
    for (way, value), height in zip(last.items(), heights, strict=True):
        label, color = WAYS[way]
        axes.annotate(
            label,
            (epochs[-1], value),
            xytext=(epochs[-1] * 1.05, height),
            color=color,
            va="center",
            annotation_clip=False,
        )
    axes.set_xlabel("epoch", color=INK)
    axes.set_title(title, color=INK, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED)
    axes.grid(axis="y", color=GRID)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--constant-lr", action="store_true", help="by default it falls to zero")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--points", type=int, default=16, help="how often to measure")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="draw this JSON file, measure nothing")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    points = train_and_measure(arguments)
    sentences = summarize(points)
    print("\n".join(sentences))
    paths = ("data_dir", "output", "plot", "commit")
    write_measurements(
        arguments,
        arguments.device,
        settings={k: str(v) for k, v in vars(arguments).items() if k not in paths},
        few=PAPER_STEPS,
        share=TOLERANCE,
        points=points,
        verdict=sentences,
    )


if __name__ == "__main__":
    main()
