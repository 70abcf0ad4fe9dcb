"""The paper's figure of extreme eigenvalues along a training: 10 Lanczos steps, and enough.

    python benchmarks/spectrum_figure.py --device cuda --data-dir data \
        --output results/spectrum-figure-h200.json
    python benchmarks/spectrum_figure.py --plot results/spectrum-figure-h200.json

ResNet-9 on CIFAR-10 with SGD at batch 128. At points in time spread evenly over the training, λ_min
and λ_max of the Hessian of the loss on three mini-batches of 128, with BatchNorm over the batch: as
the paper has them, after 10 steps of Lanczos, and converged. The mini-batches are the same at every
point. Training runs in bfloat16, the measurement in float32 without TF32.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.spectrum import Hessian, extremes

BATCH = 128
FEW = 10  # steps of the paper
SHARE = 0.02  # of an end, to which the converged runs go
BUDGET = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw what was measured, beside it")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    points = follow(arguments)
    for sentence in verdict(points):
        print(sentence)
    if arguments.output:
        content = {
            "environment": environment(torch.device(arguments.device), arguments.commit),
            "settings": {
                key: str(value)
                for key, value in vars(arguments).items()
                if key not in ("data_dir", "output", "plot", "commit")
            },
            "few": FEW,
            "share": SHARE,
            "points": points,
            "verdict": verdict(points),
        }
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


def follow(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and measure on the way."""
    device = torch.device(arguments.device)
    data = load(arguments.data, data_dir=arguments.data_dir, device=device)
    torch.manual_seed(0)
    model = build(arguments.model, data).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=arguments.lr, weight_decay=5e-4)
    per_epoch = Plan(BATCH).batches_of(len(data.train))
    total = arguments.epochs * per_epoch
    due = {round(k * total / (arguments.points - 1)) for k in range(arguments.points)}
    # An epoch that is not trained on: other augmentation, another order.
    probes = [
        pieces[0]
        for pieces, _ in zip(
            data.train.batches(Plan(BATCH, epoch=10**6)), range(arguments.batches), strict=False
        )
    ]
    points = []
    step = 0
    for epoch in range(arguments.epochs):
        for ((inputs, labels),) in data.train.batches(Plan(BATCH, epoch=epoch)):
            if step in due:
                points.append(measured(model, probes, step, step / per_epoch))
            for group in sgd.param_groups:
                group["lr"] = arguments.lr * (1 - step / total)
            sgd.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            step += 1
    points.append(measured(model, probes, step, step / per_epoch))
    return points


def measured(
    model: nn.Module, probes: list[tuple[Tensor, Tensor]], step: int, epoch: float
) -> dict[str, Any]:
    """Both ends on every batch, in both ways."""
    found = []
    begun = time.perf_counter()
    for batch in probes:
        operator = Hessian(model, cross_entropy, batch=batch)
        few = extremes(operator, tolerance=0.0, max_products=FEW)
        enough = extremes(operator, tolerance=SHARE, relative_to="itself", max_products=BUDGET)
        found.append({"few": few.as_dict(), "enough": enough.as_dict()})
    seconds = time.perf_counter() - begun
    ends = found[0]["enough"]
    print(
        f"epoch {epoch:5.2f}  λ {ends['smallest']['value']:.4g} to {ends['largest']['value']:.4g}, "
        f"after {FEW} steps {found[0]['few']['smallest']['value']:.4g} to "
        f"{found[0]['few']['largest']['value']:.4g}; {ends['products']} products, {seconds:.1f} s",
        flush=True,
    )
    return {"step": step, "epoch": epoch, "batches": found}


def verdict(points: list[dict[str, Any]]) -> list[str]:
    """What the figure shows, in sentences."""

    def share(end: str, point: dict[str, Any]) -> list[float]:
        return [
            abs(b["few"][end]["value"] / b["enough"][end]["value"] - 1) for b in point["batches"]
        ]

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    low = [s for point in points for s in share("smallest", point)]
    high = [s for point in points for s in share("largest", point)]
    most = [middle([b["enough"]["largest"]["value"] for b in p["batches"]]) for p in points]
    least = [middle([b["enough"]["smallest"]["value"] for b in p["batches"]]) for p in points]
    peak = max(range(len(most)), key=most.__getitem__)
    unsettled = sum(
        not (b["enough"]["smallest"]["converged"] and b["enough"]["largest"]["converged"])
        for point in points
        for b in point["batches"]
    )
    return [
        f"After {FEW} steps λ_max is off by {middle(high):.1%} (median; worst {max(high):.1%}), "
        f"and λ_min by {middle(low):.0%} (median; worst {max(low):.0%}).",
        f"λ_max (middle of {len(points[0]['batches'])} batches) goes from {most[0]:.3g} over "
        f"{most[peak]:.3g} at epoch {points[peak]['epoch']:.1f} to {most[-1]:.3g} at the end.",
        f"λ_min goes from {least[0]:.3g} over {min(least):.3g} to {least[-1]:.3g}; beside λ_max "
        f"it is {-least[0] / most[0]:.0%} at first and {-least[-1] / most[-1]:.0%} at the end.",
        f"{unsettled} of {len(low)} measurements did not reach {SHARE:.0%} of both ends within "
        f"{BUDGET} products.",
    ]


def plot(path: Path) -> None:
    """Two panels, λ_max and λ_min, each with both ways."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = json.loads(path.read_text())["points"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [point["epoch"] for point in points]
    for axes, end, title in zip(
        figure.subplots(1, 2), ("largest", "smallest"), ("λ_max", "λ_min"), strict=True
    ):
        for way, label, color in (
            ("few", f"{FEW} Lanczos steps, as in the paper", "#d55e00"),
            ("enough", "converged", "#0072b2"),
        ):
            values = [[b[way][end]["value"] for b in point["batches"]] for point in points]
            middles = [sorted(v)[len(v) // 2] for v in values]
            axes.plot(epochs, middles, color=color, label=label)
            for epoch, several in zip(epochs, values, strict=True):
                axes.plot([epoch] * len(several), several, ".", color=color, markersize=4)
        axes.set_xlabel("epoch")
        axes.set_title(f"{title} of three mini-batches of {BATCH}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=160)
    print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
