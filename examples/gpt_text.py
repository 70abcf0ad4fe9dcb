"""Train a small GPT on any text file, in a plain loop.

    python examples/gpt_text.py some_text.txt --steps 200

Tokens are bytes, so nothing has to be learned before training; unpack a packed file first. On a GPU
the model is compiled and runs in bfloat16. The last tenth of the file is for validation.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

import neumann

VOCABULARY = 256
CONTEXT = 256


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(normalize(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        branch: Tensor = self.down(self.up(normalize(x)).relu().square())
        return x + branch


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(normalize(x))
        return logits


def normalize(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:])


def draw(text: Tensor, windows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random windows of the text, and their targets: the same windows one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (windows, 1), generator=generator)
    found = text[starts + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, 1:]


def train(
    path: Path, *, steps: int, batch: int, width: int, depth: int, lr: float, device: str
) -> float:
    """Train, print the loss now and then, and return the validation loss in nats per byte."""
    if not path.is_file():
        raise SystemExit(f"there is no file {path}")
    content = bytearray(path.read_bytes())
    if len(content) < 20 * CONTEXT:
        raise SystemExit(f"{path} has {len(content)} bytes: {20 * CONTEXT} or more are needed")
    data = torch.frombuffer(content, dtype=torch.uint8)
    text, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    torch.manual_seed(0)
    model = GPT(width, depth, heads=max(1, width // 64)).to(device)

    optimizer, schedule = neumann.large_batch(model, steps=steps, lr=lr)
    print(neumann.param_groups(model))  # a table of what each parameter gets

    forward = torch.compile(model) if device == "cuda" else model
    generator = torch.Generator().manual_seed(0)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = forward(x.to(device))
        return cross_entropy(logits.flatten(0, 1).float(), y.to(device).flatten())

    for step in range(1, steps + 1):
        loss = compute_loss(*draw(text, batch, generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 20) == 0:
            print(f"step {step:5}  training loss {loss.item():.3f}", flush=True)

    with optimizer.evaluating(), torch.no_grad():  # the weights w − μm, to evaluate and to save
        losses = [compute_loss(*draw(held_out, batch, generator)).item() for _ in range(10)]
        torch.save(model.state_dict(), "gpt.pt")
    validation = sum(losses) / len(losses)
    print(f"validation loss {validation:.3f} nats per byte; weights in gpt.pt")
    return validation


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument(
        "--batch", type=count, default=64, help=f"windows of {CONTEXT} bytes a step"
    )
    parser.add_argument("--width", type=count, default=256)
    parser.add_argument("--depth", type=count, default=4)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
