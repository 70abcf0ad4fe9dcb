"""Whether the spectral P should treat an embedding and the output layer as matrices.

    python -m benchmarks.ablations.embeddings tinyshakespeare.txt --output results/embeddings.json

A row of an embedding has a gradient only if its word occurs in the batch, so UVᵀ puts all of its
length into few rows. Here a causal transformer learns words, with the two layers as matrices or in
the diagonal form. One seed searches the learning rate in factors of 2, with both sides bracketed.
Other seeds are then compared at that rate, in nats per word on the last tenth of the text.
"""

import collections
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.search import find_bracketed_best
from neumann import Neumann
from neumann.lab.studies.statistics import mean_interval, paired_difference

WORDS = 4000  # the most frequent; one more token stands for all others
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64
BATCH, STEPS, RAMP = 32, 200, 30
FIRST_LR = 0.015
CHOICES: dict[str, tuple[str, ...]] = {  # which layers are in the diagonal form
    "all matrices": (),
    "embedding diagonal": ("embedding",),
    "scores diagonal": ("scores",),
    "both diagonal": ("embedding", "scores"),
}


class WordModel(nn.Module):
    """Predicts the next word from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS + 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.position
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


def tokenize(text: str) -> Tensor:
    """Words and punctuation marks as numbers."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    common = collections.Counter(words).most_common(WORDS)
    numbers = {word: index for index, (word, _) in enumerate(common)}
    return torch.tensor([numbers.get(word, WORDS) for word in words])


def train(text: Tensor, diagonal: tuple[str, ...], lr: float, seed: int) -> float:
    """Train on nine tenths of the text; the loss on the rest, infinite if training diverged."""
    torch.manual_seed(seed)
    model = WordModel()
    named = dict(model.named_parameters())
    apart = [named.pop(f"{name}.weight") for name in diagonal]
    groups: list[dict[str, Any]] = [{"params": list(named.values())}]
    if apart:
        groups.append({"params": apart, "precondition": "diagonal"})
    optimizer = Neumann(groups, lr=lr, precondition="spectral")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RAMP, (STEPS - step) / (STEPS - RAMP))
    )
    split = len(text) // 10 * 9
    for _ in range(STEPS):
        starts = torch.randint(split - CONTEXT - 1, (BATCH,))
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = compute_loss(model, pieces)
        loss.backward()
        optimizer.step()
        schedule.step()
        if not math.isfinite(loss.item()):
            return math.inf
    rest = text[split:]
    pieces = rest[: len(rest) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad(), optimizer.evaluating():
        total = sum(compute_loss(model, part).item() * len(part) for part in pieces.split(BATCH))
    return total / len(pieces)


def compute_loss(model: nn.Module, pieces: Tensor) -> Tensor:
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def find_lr(text: Tensor, diagonal: tuple[str, ...]) -> tuple[float, dict[float, float]]:
    """The best learning rate, with a worse one on either side, and the losses of all tried."""
    losses: dict[float, float] = {}

    def score(octave: int, choice: None) -> float:
        lr = FIRST_LR * 2.0**octave
        if lr not in losses:
            losses[lr] = train(text, diagonal, lr, seed=0)
            print(f"  lr {lr:<9.4g} {losses[lr]:.3f}", flush=True)
        return -losses[lr]

    octave, _ = find_bracketed_best(score, [(0, None)], stride=1)
    return FIRST_LR * 2.0**octave, losses


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Means over seeds, and the paired difference to the first choice."""
    cells = []
    for row in rows:
        losses = row["losses"]
        mean = format_cell(mean_interval(losses).mean, "{:.3f}")
        cells.append([row["choice"], f"{row['lr']:.3g}", mean, str(len(losses)), "", ""])
        if row is not rows[0]:
            found = paired_difference(losses, rows[0]["losses"])
            cells[-1][-2] = format_difference(found.mean, found.low, found.high, digits=3)
            cells[-1][-1] = format_cell(found.p, "{:.2g}")
    return format_table(["", "lr", "nats per word", "n", "difference", "p"], "lrrrrr", cells)


def main() -> None:
    parser = create_parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="besides the one that tunes")
    arguments = parser.parse_args()
    text = tokenize(arguments.text.read_text())
    rows: list[dict[str, Any]] = []
    for name, diagonal in CHOICES.items():
        print(name, flush=True)
        lr, tried = find_lr(text, diagonal)
        losses = [train(text, diagonal, lr, seed) for seed in range(1, 1 + arguments.seeds)]
        rows.append({"choice": name, "lr": lr, "tried": tried, "losses": losses})
    print(f"\n{format_rows(rows)}")
    write_measurements(arguments, "cpu", rows=rows)


if __name__ == "__main__":
    main()
