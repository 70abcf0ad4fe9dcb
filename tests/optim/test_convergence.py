"""Does it train: digits to an accuracy, over seeds and by a margin."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann

# Seeds 0 to 2 reach 97.4 to 98.5 %; logistic regression on the same split reaches about 96.
LEAST = 0.97
BATCH = 64


def accuracies(seed: int) -> tuple[float, float]:
    """Final accuracy at the evaluation weights, and of the same network before training."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def accuracy() -> float:
        with torch.no_grad():
            return (model(x[test]).argmax(1) == y[test]).float().mean().item()

    before = accuracy()
    steps = len(train) // BATCH
    optimizer = Neumann(model.parameters(), lr=0.2, steps_per_epoch=steps, warmup_epochs=2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=30 * steps)
    for _ in range(30):
        for batch in train[torch.randperm(len(train))][: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    assert optimizer.diagnostics().phase == "iterate"
    with optimizer.evaluating():
        return accuracy(), before


@pytest.mark.slow
def test_digits():
    reached = [accuracies(seed) for seed in range(3)]
    assert min(after for after, _ in reached) > LEAST
    assert max(before for _, before in reached) < 0.3
