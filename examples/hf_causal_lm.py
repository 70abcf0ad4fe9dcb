"""Train a tiny GPT-2 with Hugging Face's Trainer; a few seconds on a CPU, nothing is downloaded.

    python examples/hf_causal_lm.py

`large_batch` gives the Trainer an optimizer with a group for each role, the schedule, and the
callback that evaluates and saves the right weights.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from neumann.integrations.transformers import large_batch

TEXT = "the quick brown fox jumps over the lazy dog. " * 400
CONTEXT = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, as bytes; the model shifts the labels itself."""

    def __init__(self, text: str) -> None:
        tokens = torch.tensor(list(text.encode()))
        self.windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main(steps: int = 40) -> float:
    """Train, print the loss on the same text in other windows and return it, in nats per byte."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Windows(TEXT),
            eval_dataset=Windows(TEXT[7:]),
            **large_batch(model, steps),
        )
        trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
    print(f"loss {loss:.3f} nats per byte")
    return loss


if __name__ == "__main__":
    main()
