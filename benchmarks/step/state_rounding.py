"""What bfloat16 state costs, and how to round it.

    python -m benchmarks.step.state_rounding --output rounding.json

Drift: 2,000 steps on 4,096 float32 weights with m and δ kept in bfloat16, compared with float64,
with noisy and with constant gradients. Under constant gradients rounding to nearest fails: δ
shrinks by 1 % per step, about one unit in the last place, and the change rounds away.
Training: scikit-learn's digits with the same network, seeds and data order for each kind of state.

`stochastic` is state_dtype=torch.bfloat16. The other kinds keep float32 state and round it after
every step. `compensated` keeps each rounding error in a second bfloat16.
"""

from collections.abc import Callable, Iterator
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from neumann import Neumann

SIZE, STEPS = 4096, 2000
LR = 0.05
KINDS = ("float32", "nearest", "stochastic", "compensated")
SEEDS = 5


def build_optimizer(parameters: Any, lr: float, kind: str, **options: Any) -> Neumann:
    """An optimizer whose state is kept as `kind` says."""
    dtype = torch.bfloat16 if kind == "stochastic" else None
    optimizer = Neumann(parameters, lr, state_dtype=dtype, foreach=True, **options)

    def round_state(*_: Any) -> None:
        for value in rounded_tensors(optimizer):
            high = value.bfloat16()
            low = (value - high.float()).bfloat16()
            value.copy_(high.float() + low.float() if kind == "compensated" else high)

    if kind in ("nearest", "compensated"):
        optimizer.register_step_post_hook(round_state)
    return optimizer


def rounded_tensors(optimizer: Neumann) -> Iterator[Tensor]:
    """m and δ of every parameter."""
    for state in optimizer.state.values():
        yield from (state[name] for name in ("iterate", "offset") if name in state)


def draw(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GRADIENTS: dict[str, Callable[[int, Tensor], Tensor]] = {  # of a step and its weights
    "noisy": lambda step, weights: 0.1 * (weights.double() - 3) + draw(step),
    "constant": lambda step, weights: 0.01 * draw(0),
}


def follow(gradients: str, kind: str) -> dict[str, Tensor]:
    """The weights, m and δ after all steps."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    weights = nn.Parameter(torch.full((SIZE,), 0.5, dtype=dtype))
    # A force too weak to matter, so that δ is kept.
    clock = {"warmup_steps": 0, "reset_steps": 0, "cubic": 1e-30, "repulsive": 0.0}
    optimizer = build_optimizer([weights], LR, kind, **clock)
    for step in range(STEPS):
        weights.grad = GRADIENTS[gradients](step, weights.detach()).to(dtype)
        optimizer.step()
    iterate, offset = rounded_tensors(optimizer)
    if kind == "compensated":  # the first of the two numbers is the state
        iterate, offset = iterate.bfloat16(), offset.bfloat16()
    return {"weights": weights.detach(), "iterate": iterate, "offset": offset}


def measure_drift() -> list[dict[str, Any]]:
    """Relative errors of each kind of state; `distance` is that of r = ‖δ‖."""
    rows = []
    for gradients in GRADIENTS:
        exact = follow(gradients, "float64")
        for kind in KINDS:
            found = follow(gradients, kind)
            errors = {
                key: float((found[key].double() - exact[key]).norm() / exact[key].norm())
                for key in exact
            }
            ratio = float(found["offset"].double().norm() / exact["offset"].norm())
            rows.append({"gradients": gradients, "state": kind, **errors, "distance": ratio - 1})
    return rows


def train_digits(seed: int, kind: str, epochs: int = 30, batch: int = 64) -> float:
    """Test accuracy after training, in %."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    steps = len(train) // batch
    optimizer = build_optimizer(model.parameters(), 0.2, kind, steps_per_epoch=steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * steps)
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
    arguments = create_parser(__doc__).parse_args()
    drift = measure_drift()
    print(f"relative error against float64 after {STEPS:,} steps\n")
    form = "{gradients}|{state}|{weights:.1e}|{iterate:.1e}|{offset:.1e}|{percent:+.2f} %"
    cells = [form.format(percent=100 * row["distance"], **row).split("|") for row in drift]
    print(format_table(["gradients", "state", "weights", "m", "δ", "r"], "llrrrr", cells))
    training = {
        kind: [train_digits(seed, kind) for seed in range(SEEDS)]
        for kind in ("float32", "nearest", "stochastic")
    }
    print(f"\ndigits, test accuracy after 30 epochs, lr 0.2, {SEEDS} seeds (%)\n")
    cells = [
        [kind, *(f"{score:.2f}" for score in scores), f"{mean(scores):.2f} ± {stdev(scores):.2f}"]
        for kind, scores in training.items()
    ]
    heads = ["state", *(f"seed {seed}" for seed in range(SEEDS)), "mean ± std"]
    print(format_table(heads, "l" + "r" * (SEEDS + 1), cells))
    write_measurements(arguments, "cpu", drift=drift, training=training)


if __name__ == "__main__":
    main()
