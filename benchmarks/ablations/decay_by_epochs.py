"""Does the recipe's weight decay depend on how often the data are repeated?

    python -m benchmarks.ablations.decay_by_epochs --output results/decay-by-epochs.json

One network and one number of steps: an MLP of two hidden layers, with and without batch norms, 100
steps of 512 rows of synthetic data in 50 classes. The rows are seen once or many times. The
recipe's learning rate is its default; lr · decay · steps goes from 0 to 20. Test loss, three seeds,
on a CPU in two minutes.
"""

import itertools
import statistics

import torch
from sklearn.datasets import make_classification
from torch import Tensor, nn

import neumann
from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from neumann.optim.recipe import LR

STEPS, BATCH = 100, 512
ROWS = {"once": STEPS * BATCH, "17 times": 3_000}
PRODUCTS = (0.0, 1.25, 2.5, 5.0, 10.0, 20.0)
SEEDS = range(3)
FEATURES, CLASSES, WIDTH, TESTED = 40, 50, 128, 6_000

Data = tuple[Tensor, Tensor]


def make_data(rows: int) -> tuple[Data, Data]:
    """Rows to train on, and others to test on."""
    x, y = make_classification(
        rows + TESTED, FEATURES, n_informative=20, n_classes=CLASSES, random_state=0
    )
    features, classes = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return (features[:rows], classes[:rows]), (features[rows:], classes[rows:])


def make_network(normalized: bool) -> nn.Sequential:
    sizes = ((FEATURES, WIDTH), (WIDTH, WIDTH))
    blocks = [
        (nn.Linear(*size), *([nn.BatchNorm1d(WIDTH)] if normalized else []), nn.ReLU())
        for size in sizes
    ]
    return nn.Sequential(*itertools.chain(*blocks), nn.Linear(WIDTH, CLASSES))


def train(data: tuple[Data, Data], normalized: bool, product: float, seed: int) -> float:
    """The test loss after a run."""
    (x, y), (test_x, test_y) = data
    torch.manual_seed(seed)
    model = make_network(normalized)
    optimizer, schedule = neumann.large_batch(
        model, steps=STEPS, weight_decay=product / (LR * STEPS)
    )
    loss = nn.CrossEntropyLoss()
    order = torch.cat([torch.randperm(len(x)) for _ in range(-(-STEPS * BATCH // len(x)))])
    for chosen in order[: STEPS * BATCH].split(BATCH):
        optimizer.zero_grad()
        loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    with optimizer.evaluating():
        if normalized:
            neumann.recalibrate_batchnorm(model, x.split(BATCH))
        model.eval()
        with torch.no_grad():
            return float(loss(model(test_x), test_y))


def main() -> None:
    parser = create_parser(__doc__)
    arguments = parser.parse_args()
    rows, runs = [], []
    for (seen, count), normalized in itertools.product(ROWS.items(), (False, True)):
        data = make_data(count)
        cells = []
        for product in PRODUCTS:
            losses = [train(data, normalized, product, seed) for seed in SEEDS]
            cells.append(f"{statistics.fmean(losses):.3f}")
            setting = {"rows": count, "normalized": normalized, "product": product}
            runs.append({**setting, "losses": losses})
        rows.append((seen, "batch norms" if normalized else "none", *cells))
        print(*rows[-1], flush=True)
    heads = ("rows are seen", "normalization", *(f"{product:g}" for product in PRODUCTS))
    print(format_table(heads, "ll" + "r" * len(PRODUCTS), rows))
    write_measurements(arguments, "cpu", runs=runs)


if __name__ == "__main__":
    main()
