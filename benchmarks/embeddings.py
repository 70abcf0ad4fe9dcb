"""Whether the spectral P should see an embedding, and the layer of the words' scores, as a matrix.

    python benchmarks/embeddings.py tinyshakespeare.txt --json results/embeddings.json

A row of an embedding has a gradient only where its word occurs, so that the gradient's matrix has
few singular values that are not zero, and UVᵀ puts all of its length into the rows that do. Here
a causal transformer learns words, of which a batch holds a fraction: the two tables are taken as
matrices or in the diagonal form. For each choice the learning rate of the lowest loss, in ratio 2
and bracketed, is found with one seed, and others are compared at it: nats a word, on the last tenth
of the text.
"""

import argparse
import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from environment import environment
from markdown_cells import cell, difference, line
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.lab.statistics import mean_interval, paired_difference

WORDS = 4000  # the most frequent; one more stands for the others
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64
BATCH, STEPS, RAMP = 32, 200, 30
FIRST_LR = 0.015
CHOICES: dict[str, tuple[str, ...]] = {  # which tables are in the diagonal form
    "all matrices": (),
    "embedding diagonal": ("embedding",),
    "scores diagonal": ("scores",),
    "both diagonal": ("embedding", "scores"),
}


class Words(nn.Module):
    """The next word from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS + 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.place
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        found: Tensor = self.scores(self.norm(hidden))
        return found


def numbered(text: str) -> Tensor:
    """The text's words and signs as numbers."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    common = collections.Counter(words).most_common(WORDS)
    number = {word: index for index, (word, _) in enumerate(common)}
    return torch.tensor([number.get(word, WORDS) for word in words])


def trained_loss(text: Tensor, diagonal: tuple[str, ...], lr: float, seed: int) -> float:
    """On the last tenth of the text, after a training on the rest; infinite where it diverged."""
    torch.manual_seed(seed)
    model = Words()
    tables = {f"{name}.weight" for name in diagonal}
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name not in tables]},
        {"params": [named[name] for name in sorted(tables)], "precondition": "diagonal"},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = Neumann(groups, lr=lr, precondition="spectral")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RAMP, (STEPS - step) / (STEPS - RAMP))
    )
    whole = len(text) // 10 * 9
    for _ in range(STEPS):
        starts = torch.randint(whole - CONTEXT - 1, (BATCH,))
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = loss_of(model, pieces)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if not math.isfinite(loss.item()):
            return math.inf
    rest = text[whole:]
    pieces = rest[: len(rest) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad(), optimizer.evaluating():
        losses = [loss_of(model, part).item() * len(part) for part in torch.split(pieces, BATCH)]
    return sum(losses) / len(pieces)


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def best_lr(text: Tensor, diagonal: tuple[str, ...]) -> tuple[float, dict[float, float]]:
    """The learning rate that has a worse one on either side, and the losses of all tried."""
    losses: dict[float, float] = {}
    wanted = {FIRST_LR}
    while wanted:
        for lr in sorted(wanted):
            losses[lr] = trained_loss(text, diagonal, lr, seed=0)
            print(f"  lr {lr:<9.4g} {losses[lr]:.3f}", flush=True)
        best = min(losses, key=lambda lr: losses[lr])
        wanted = {best / 2, best * 2} - set(losses)
    return best, losses


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds and the paired difference to the first choice."""
    lines = [["", "lr", "nats a word", "n", "difference", "p"], ["---", *["--:"] * 5]]
    for row in rows:
        losses = row["losses"]
        cells = [row["choice"], f"{row['lr']:.3g}", cell(mean_interval(losses).mean, "{:.3f}")]
        d = paired_difference(losses, rows[0]["losses"])
        compared = [difference(d.mean, d.low, d.high, digits=3), cell(d.p, "{:.2g}")]
        lines.append([*cells, str(len(losses)), *(["", ""] if row is rows[0] else compared)])
    return "\n".join(map(line, lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="after the one that tunes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = numbered(arguments.text.read_text())
    rows: list[dict[str, Any]] = []
    for name, diagonal in CHOICES.items():
        print(name, flush=True)
        lr, tried = best_lr(text, diagonal)
        seeds = range(1, 1 + arguments.seeds)
        losses = [trained_loss(text, diagonal, lr, seed) for seed in seeds]
        rows.append({"choice": name, "lr": lr, "tried": tried, "losses": losses})
    print()
    print(table(rows))
    if arguments.json:
        found = {**environment(torch.device("cpu")), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
