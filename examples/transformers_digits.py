"""Train scikit-learn's digits with Hugging Face's Trainer; a few seconds on a CPU.

    python examples/transformers_digits.py

The Trainer calls `train()` and `eval()` itself. The callback `EvaluationWeights` makes sure that it
also saves w − μm, and leaves it in the model at the end.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, random_split
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from neumann import Neumann
from neumann.integrations.transformers import EvaluationWeights

TEST = 360
BATCH = 64


class Digits(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32)
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits = torch.as_tensor(prediction.predictions)
    correct = logits.argmax(1) == torch.as_tensor(prediction.label_ids)
    return {"accuracy": 100 * correct.float().mean().item()}


def main(epochs: int = 20) -> float:
    """Train, print the test accuracy in % and return it."""
    set_seed(0)
    data = Digits()
    train, test = random_split(data, [len(data) - TEST, TEST])
    model = Classifier()
    optimizer = Neumann(model.named_parameters(), lr=0.2, steps_per_epoch=len(train) // BATCH)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model,
            TrainingArguments(
                directory,
                num_train_epochs=epochs,
                per_device_train_batch_size=BATCH,
                dataloader_drop_last=True,
                dataloader_pin_memory=False,
                lr_scheduler_type="constant",
                max_grad_norm=0,  # the Trainer would clip gradients to norm 1
                save_strategy="epoch",
                save_total_limit=1,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=accuracy,
            optimizers=(optimizer, None),
            callbacks=[EvaluationWeights()],
        )
        trainer.train()
        found: float = trainer.evaluate()["eval_accuracy"]
    print(f"test accuracy {found:.2f} %")
    return found


if __name__ == "__main__":
    main()
