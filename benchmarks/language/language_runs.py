"""One run of a language benchmark: a GPT, a number of steps, a learning rate that ends at zero.

It ramps up over the first 3 % of the steps. The order of the data depends on the seed
alone, so all optimizers see the same batches. Losses are in nats per token.
"""

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.jobs import add_ledger_flags, parse_shared
from benchmarks.common.ledger import Ledger, Run, Runner, refuse_other_data
from benchmarks.common.script import create_parser, describe_origin
from benchmarks.language.language_arms import CONSTANT, Setting, find_lr_factor
from benchmarks.language.language_variants import build_variant
from neumann.lab.data import load
from neumann.lab.data.dataset import Dataset
from neumann.lab.data.windows import to_indices
from neumann.lab.errors import UsageError
from neumann.lab.models import build

TESTED = ("test", "saving")  # stages that are scored on the test set, all others on validation
MICRO_TOKENS = 32_768  # tokens whose logits are in memory at once
LAST = 0.05  # of a run: what its training loss is the mean of, at every batch size as many tokens
IGNORED = -100  # a target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class RunKey:
    """What identifies a run."""

    stage: str  # what it is for
    model: str
    context: int
    tokens_per_step: int
    steps: int
    setting: Setting
    seed: int


def create_data_parser(doc: str | None, *, output: bool) -> ArgumentParser:
    """The flags of a script that trains language models: data, tokens and device."""
    parser = create_parser(doc, output=output)
    parser.add_argument("--data", default="text:mdn.txt.xz")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tokens", default="bpe:16384")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def create_language_parser(doc: str | None, results: Path) -> ArgumentParser:
    """The flags of a script that trains language models into a ledger."""
    parser = create_data_parser(doc, output=False)
    add_ledger_flags(parser, results)
    return parser


def parse_language(parser: ArgumentParser) -> Namespace:
    """The arguments; with `--jobs`, the text is tokenized once, before the processes start."""

    def tokenize(arguments: Namespace) -> None:
        folder, tokens = arguments.data_dir, arguments.tokens
        if vars(arguments).get("stage") != "table":
            _load_or_exit(arguments.data, data_dir=folder, tokens=tokens)

    return parse_shared(parser, prepare=tokenize)


def _load_or_exit(data: str, **options: Any) -> Dataset:
    try:
        return load(data, **options)
    except UsageError as error:
        raise SystemExit(str(error)) from error


def open_language_runner(arguments: Namespace) -> tuple[Ledger[RunKey], Runner[RunKey]]:
    """The ledger that the flags name, and what trains further runs into it."""
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    origin = {"data": arguments.data, "tokens": arguments.tokens}
    ledger = Ledger(arguments.results, RunKey, origin | describe_origin(arguments.commit))
    refuse_other_data(ledger, **origin)
    trainer = open_trainer(arguments)

    def train(key: RunKey) -> Run:
        # Files of the same names may have another text.
        found = {"data_hash": str(trainer.load(key.context).data_hash)}
        refuse_other_data(ledger, **found)
        return trainer.train(key) | found

    return ledger, Runner(ledger, train, seconds=arguments.seconds, share=arguments.share)


def open_trainer(arguments: Namespace) -> "LanguageTrainer":
    """What trains on the data that the flags name."""
    data, folder = arguments.data, arguments.data_dir
    return LanguageTrainer(data, folder, arguments.tokens, arguments.device)


class LanguageTrainer:
    """Trains runs; keeps the tokens in memory between them."""

    def __init__(self, data: str, data_dir: Path | None, tokens: str, device: str) -> None:
        self._read = lambda context: _load_or_exit(
            data, data_dir=data_dir, tokens=tokens, context=context, device=device
        )
        self._device = torch.device(device)
        self._datasets: dict[int, Dataset] = {}
        self._networks: dict[tuple[str, int], tuple[nn.Module, Any]] = {}

    def train(self, key: RunKey) -> Run:
        """Train a run and return what to record."""
        model, compute_loss, dataset = self.prepare(key)
        optimizer = build_variant(model, key.setting, key.steps)
        peaks = [group["lr"] for group in optimizer.param_groups]
        rows, micro = count_rows(key)
        batches = draw_batches(dataset.train, rows, key.seed)
        losses: list[Tensor] = []
        started = 0.0
        for step in range(key.steps):
            if step == min(3, key.steps - 1):  # everything is compiled
                self._synchronize()
                started = time.perf_counter()
            constant = key.setting.arm in CONSTANT
            factor = 1.0 if constant else find_lr_factor(step, key.steps, key.setting.power)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
                if key.setting.cooling:
                    group["momentum"] = key.setting.momentum * factor**key.setting.cooling
            optimizer.zero_grad()
            losses.append(add_gradients(compute_loss, next(batches), micro))
            optimizer.step()
        self._synchronize()
        seconds = time.perf_counter() - started
        found = torch.stack(losses).tolist()
        held_out = dataset.test if key.stage in TESTED else dataset.validation
        final = self._evaluate(compute_loss, optimizer, held_out, micro)
        print(f"{describe(key)}  {final:.4f}  {seconds:.1f} s", flush=True)
        return {
            "loss": _to_json(final),
            "train_loss": _to_json(fmean(found[-max(1, round(LAST * key.steps)) :])),
            "losses": [_to_json(round(loss, 4)) for loss in found[:: max(1, key.steps // 50)]],
            "seconds": seconds,  # of training, after the first three steps
        }

    def load(self, context: int) -> Dataset:
        """The data in windows of so many tokens, read once."""
        if context not in self._datasets:
            self._datasets[context] = self._read(context)
        return self._datasets[context]

    def prepare(self, key: RunKey) -> tuple[nn.Module, Any, Dataset]:
        """The network with the weights of its seed, its loss and its data.

        A network is compiled once, then filled again.
        """
        dataset = self.load(key.context)
        torch.manual_seed(key.seed)
        fresh = build(key.model, dataset)
        size = key.model, key.context
        if size not in self._networks:
            model = build(key.model, dataset).to(self._device)
            self._networks[size] = model, self._compile(model)
        model, compute_loss = self._networks[size]
        model.load_state_dict(fresh.state_dict())
        model.zero_grad()
        return model, compute_loss, dataset

    def _compile(self, model: nn.Module) -> Any:
        on_gpu = self._device.type == "cuda"

        def compute_loss(tokens: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu):
                logits = model(tokens)
            return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        return torch.compile(compute_loss, dynamic=False) if on_gpu else compute_loss

    @torch.no_grad()
    def _evaluate(self, compute_loss: Any, optimizer: Any, held_out: Any, micro: int) -> float:
        """The mean loss over a whole set, at the weights that would be shipped."""
        windows = cut_windows(held_out)
        if hasattr(optimizer, "eval"):  # Neumann, and what is schedule-free
            optimizer.eval()
        total = torch.zeros((), device=windows.device)
        for part in windows.split(micro):
            # The loss is compiled for one batch size: a smaller last part is filled up.
            filled = torch.cat([part, part[:1].expand(micro - len(part), -1)])
            targets = filled[:, 1:].clone()
            targets[len(part) :] = IGNORED
            total += compute_loss(filled[:, :-1], targets) * len(part)
        return float(total / len(windows))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _to_json(value: float) -> float | None:
    """None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def read_loss(run: Run) -> float:
    """The loss of a run, infinite if it diverged."""
    return math.inf if run["loss"] is None else float(run["loss"])


def count_rows(key: RunKey) -> tuple[int, int]:
    """Windows of a step, and those of them that are in memory at once."""
    rows = key.tokens_per_step // key.context
    return rows, max(1, min(rows, MICRO_TOKENS // key.context))


def add_gradients(compute_loss: Any, batch: Tensor, micro: int) -> Tensor:
    """Forward and backward over a batch, `micro` windows at a time; the mean loss."""
    windows = batch.split(micro)
    total = torch.zeros((), device=batch.device)
    for window in windows:
        loss = compute_loss(window[:, :-1], window[:, 1:]) / len(windows)
        loss.backward()
        total += loss.detach()
    return total


def cut_windows(source: Any) -> Tensor:
    """The windows of a text with the token that follows each: (count, context + 1)."""
    starts = torch.arange(len(source), device=source.tokens.device) * source.context
    within = torch.arange(source.context + 1, device=source.tokens.device)
    return to_indices(source.tokens[starts[:, None] + within])


def draw_batches(source: Any, rows: int, seed: int) -> Iterator[Tensor]:
    """Endless batches (rows, context + 1); each pass has its own offset and order."""
    device = source.tokens.device
    within = torch.arange(source.context + 1, device=device)
    left = torch.zeros(0, dtype=torch.long)
    epoch = 0
    while True:
        while len(left) < rows:
            generator = torch.Generator().manual_seed(1_000 * seed + epoch)
            offset = int(torch.randint(source.context, (), generator=generator))
            starts = torch.randperm(len(source), generator=generator) * source.context + offset
            starts.clamp_(max=len(source.tokens) - 1 - source.context)
            left, epoch = torch.cat([left, starts]), epoch + 1
        chosen, left = left[:rows].to(device), left[rows:]
        yield to_indices(source.tokens[chosen[:, None] + within])


def describe(key: RunKey) -> str:
    s = key.setting
    lead = f" {s.lead} {s.strength:g}" if s.lead else f" slow {s.slow:g}" if s.slow else ""
    return (
        f"{key.stage:10} {key.model} {key.tokens_per_step}×{key.steps} {s.arm:18} lr {s.lr:<8.4g} "
        f"decay {s.decay:<5.3g} before {s.before} μ {s.momentum} "
        f"scales {s.embedding:g} {s.output:g} {s.vector:g} "
        f"power {s.power:g} cooling {s.cooling:g}{lead} seed {key.seed}"
    )
