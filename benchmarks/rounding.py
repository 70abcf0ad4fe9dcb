"""What bfloat16 state costs, and how to round it.

Drift: 2,000 steps of the iterate phase on 4,096 float32 weights, with the iterate m and the offset
δ kept in bfloat16, against float64. With noisy gradients (a quadratic and fresh noise) and with a
constant one, which is where rounding to nearest fails: δ shrinks by 1 % a step, about one unit in
the last place, and stops where that rounds away. `compensated` keeps each number's rounding error
in a second bfloat16, which needs the memory of float32 state; it is here to be compared with.

Training: scikit-learn's digits, the same network, seeds and data order with each state.

    python benchmarks/rounding.py --output results/rounding.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from environment import environment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.optim import update
from neumann.optim.phases import Phase, row
from neumann.optim.update import Tensors, update_single

SIZE, STEPS = 4096, 2000
LR, MOMENTUM, AVERAGE = 0.05, 0.9, 0.99
ROW = row(Phase.ITERATE, LR, MOMENTUM, AVERAGE, 0.0)
SEEDS = 5


def nearest(state: Tensor, value: Tensor, noise: torch.Generator) -> None:
    state.copy_(value)


ROUNDINGS: dict[str, Callable[..., None]] = {"nearest": nearest, "stochastic": update._store}


def noisy(step: int, w: Tensor) -> Tensor:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (0.1 * (w.double() - 3) + noise).to(w.dtype)


def constant(step: int, w: Tensor) -> Tensor:
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (0.01 * drawn).to(w.dtype)


def trajectory(gradient: Callable[[int, Tensor], Tensor], kind: str) -> dict[str, Tensor]:
    """w, m and δ after STEPS, with state kept as `kind` says."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    w = torch.full((SIZE,), 0.5, dtype=dtype)
    kept = dtype if kind in ("float64", "float32") else torch.bfloat16
    m, offset = (torch.zeros(SIZE, dtype=kept) for _ in range(2))
    errors = [torch.zeros(SIZE, dtype=torch.bfloat16) for _ in range(2)]
    for step in range(STEPS):
        g = gradient(step, w)
        if kind == "compensated":
            wide = [
                state.float() + error.float()
                for state, error in zip((m, offset), errors, strict=True)
            ]
            update_single(Tensors([w], [g], wide[:1], wide[1:]), ROW, None)
            for state, error, value in zip((m, offset), errors, wide, strict=True):
                state.copy_(value)
                error.copy_(value - state.float())
        else:
            with mock.patch.object(update, "_store", ROUNDINGS.get(kind, nearest)):
                tensors = Tensors([w], [g], [m], [offset])
                update.apply(tensors, ROW, None, update.update_foreach, seed=step)
    return {"weights": w, "iterate": m, "offset": offset}


def drift() -> list[dict[str, Any]]:
    rows = []
    for name, gradient in (("noisy", noisy), ("constant", constant)):
        exact = trajectory(gradient, "float64")
        for kind in ("float32", "nearest", "stochastic", "compensated"):
            found = trajectory(gradient, kind)
            errors = {
                key: float((found[key].double() - exact[key]).norm() / exact[key].norm())
                for key in exact
            }
            ratio = float(found["offset"].double().norm() / exact["offset"].norm())
            rows.append({"gradients": name, "state": kind, **errors, "distance": ratio - 1})
    return rows


def accuracy(seed: int, state: str) -> float:
    """Test accuracy on digits after 30 epochs, in %."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    batch, epochs = 64, 30
    steps = len(train) // batch
    dtype = None if state == "float32" else torch.bfloat16
    optimizer = Neumann(
        model.parameters(), 0.2, steps_per_epoch=steps, state_dtype=dtype, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * steps)
    with mock.patch.object(update, "_store", ROUNDINGS.get(state, nearest)):
        for _ in range(epochs):
            for chosen in train[torch.randperm(len(train))][: steps * batch].split(batch):
                optimizer.zero_grad()
                cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
                schedule.step()
    with optimizer.evaluating(), torch.no_grad():
        correct: Tensor = model(x[test]).argmax(1) == y[test]
    return 100 * correct.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    rows = drift()
    print(f"relative error against float64 after {STEPS:,} steps\n")
    print("| gradients | state | weights | m | δ | r |\n|---|---|--:|--:|--:|--:|")
    for line in rows:
        numbers = [f"{line[key]:.1e}" for key in ("weights", "iterate", "offset")]
        cells = [line["gradients"], line["state"], *numbers, f"{100 * line['distance']:+.2f} %"]
        print("| " + " | ".join(cells) + " |")
    print(f"\ndigits, test accuracy after 30 epochs, lr 0.2, {SEEDS} seeds (%)\n")
    print("| state | " + " | ".join(f"seed {s}" for s in range(SEEDS)) + " | mean ± std |")
    print("|---|" + "--:|" * (SEEDS + 1))
    training = {}
    for state in ("float32", "nearest", "stochastic"):
        scores = training[state] = [accuracy(seed, state) for seed in range(SEEDS)]
        cells = [f"{score:.2f}" for score in scores]
        cells.append(f"{mean(scores):.2f} ± {stdev(scores):.2f}")
        print(f"| {state} | " + " | ".join(cells) + " |", flush=True)
    if arguments.output:
        content = {**environment(torch.device("cpu")), "drift": rows, "training": training}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
