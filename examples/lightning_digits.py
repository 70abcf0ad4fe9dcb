"""Train scikit-learn's digits with Lightning; a few seconds on a CPU.

    python examples/lightning_digits.py

With the callback `EvaluationWeights`, Lightning validates, tests and saves w − μm. Nothing else is
needed.
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from neumann import Neumann
from neumann.integrations.lightning import EvaluationWeights

TEST = VALIDATION = 360


class Digits(LightningModule):
    def __init__(self, steps_per_epoch: int, lr: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.steps_per_epoch, self.lr = steps_per_epoch, lr
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("validation", self.accuracy(batch))

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("test", self.accuracy(batch))

    def accuracy(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        correct: Tensor = self.network(x).argmax(1) == y
        return 100 * correct.float().mean()

    def configure_optimizers(self) -> Neumann:
        return Neumann(self.named_parameters(), lr=self.lr, steps_per_epoch=self.steps_per_epoch)


def main(epochs: int = 20) -> float:
    """Train, test the best epoch by validation, print its accuracy in % and return it."""
    seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    sizes = [len(data) - VALIDATION - TEST, VALIDATION, TEST]
    train, validation, test = random_split(data, sizes)
    train_loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)

    model = Digits(steps_per_epoch=len(train_loader))
    with tempfile.TemporaryDirectory() as directory:
        best = ModelCheckpoint(directory, monitor="validation", mode="max")
        trainer = Trainer(
            max_epochs=epochs,
            callbacks=[EvaluationWeights(), best],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, train_loader, DataLoader(validation, batch_size=VALIDATION))
        test_loader = DataLoader(test, batch_size=TEST)
        (result,) = trainer.test(model, test_loader, ckpt_path="best", verbose=False)
    print(f"test accuracy {result['test']:.2f} %")
    return result["test"]


if __name__ == "__main__":
    main()
