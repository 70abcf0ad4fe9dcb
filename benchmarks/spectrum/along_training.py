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

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.spectrum.short_training import PROBE_EPOCH, train_with_pauses
from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.spectrum import Hessian, extremes

BATCH = 128
PAPER_STEPS = 10
TOLERANCE = 0.02  # of the converged runs, relative to each end
MAX_PRODUCTS = 300


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
    """Draw λ_max and λ_min, each measured in both ways, into a PNG beside the JSON file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = json.loads(path.read_text())["points"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [point["epoch"] for point in points]
    ends = {"largest": "λ_max", "smallest": "λ_min"}
    for axes, (end, title) in zip(figure.subplots(1, 2), ends.items(), strict=True):
        for way, label, color in (
            ("few", f"{PAPER_STEPS} Lanczos steps, as in the paper", "#d55e00"),
            ("enough", "converged", "#0072b2"),
        ):
            medians = [median_value(point, way, end) for point in points]
            axes.plot(epochs, medians, color=color, label=label)
            dots = [(p["epoch"], b[way][end]["value"]) for p in points for b in p["batches"]]
            axes.plot(*zip(*dots, strict=True), ".", color=color, markersize=4)
        axes.set_xlabel("epoch")
        axes.set_title(f"{title} of three mini-batches of {BATCH}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=160)
    print(path.with_suffix(".png"))


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
