"""Train scikit-learn's digits with Accelerate; a few seconds on a CPU.

    python examples/accelerate_digits.py

The optimizer that `prepare` returns passes `train()` and `eval()` on to Neumann. The training loop
calls them.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from neumann import Neumann

TEST = 360


def main(epochs: int = 20) -> float:
    """Train, print the test accuracy in % after each epoch, and return the last one."""
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(data, [len(data) - TEST, TEST])
    train_loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=TEST)

    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = Neumann(model.named_parameters(), lr=0.2, steps_per_epoch=len(train_loader))
    accelerator = Accelerator()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        optimizer.train()  # the parameters hold w
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()

        model.eval()
        optimizer.eval()  # the parameters hold w − μm, to evaluate and to save
        with torch.no_grad():
            results = [
                accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in test_loader
            ]
        accuracy = 100 * torch.cat([p == y for p, y in results]).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2f} %")
    return accuracy


if __name__ == "__main__":
    main()
