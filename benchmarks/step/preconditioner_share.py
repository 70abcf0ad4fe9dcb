"""Which share of a GPT's training step goes to P, at half a million tokens per step.

    python -m benchmarks.step.preconditioner_share --output results/preconditioner-share-h200.json

The lab's gpt:124m on random tokens. In one process, in rounds and in a random order, these are
timed: the forward and backward passes of all micro-batches of a step (on a GPU compiled and in
bfloat16), the step of the recipe's optimizer, the same step in a CUDA graph, and the step with
P = I. What P takes is the difference of the steps. Its share is that of the passes alone, in the
same round, so its share of the whole training step is a little smaller.

`wall` is the time until the device has finished, `gpu` the time that it is busy. With --measured a
few micro-batches are timed, and their time is multiplied: the file then says so.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import find_quartiles
from benchmarks.step.peers import Peer, build_neumann, build_plain, capture
from benchmarks.step.step_tables import format_shares
from benchmarks.step.timed_optimizer import TimedSteps, time_in_rounds
from benchmarks.step.timed_peer import TimedPeer
from neumann.lab.models.gpt import build_gpt

PASSES, PLAIN = "forward and backward", "step, P = I"
SPECTRAL, CAPTURED = "step, spectral P", "step, spectral P, captured"
STEPS = [
    Peer(PLAIN, build_plain, "no P and no forces"),
    Peer(SPECTRAL, build_neumann, "the recipe's P for each role"),
    Peer(CAPTURED, partial(capture, build=build_neumann), "in a CUDA graph", on_cuda_only=True),
]
VOCABULARY = 50_304  # GPT-2's 50,257, rounded up to a multiple of 64


class TimedPasses(TimedSteps):
    """The forward and backward passes of a training step, over its micro-batches."""

    def __init__(self, model: nn.Module, windows: Tensor, count: int, compiled: bool) -> None:
        super().__init__(windows.device)
        self._model, self._windows, self._count = model, windows, count
        on_gpu = self.device.type == "cuda"

        def compute_loss(tokens: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
                logits = model(tokens)
            return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        self._compute_loss: Any = compute_loss
        if compiled and on_gpu:
            self._compute_loss = torch.compile(compute_loss, dynamic=False)

    def build(self) -> None:
        for _ in range(2):  # compiles
            self.step()

    def step(self) -> None:
        self._model.zero_grad(set_to_none=True)
        for _ in range(self._count):
            loss = self._compute_loss(self._windows[:, :-1], self._windows[:, 1:])
            (loss / self._count).backward()


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Times and shares, with quartiles; what failed has an error instead."""
    context, rows = arguments.context, arguments.rows
    micro_batches, rest = divmod(arguments.tokens, rows * context)
    if micro_batches < 1 or rest:
        raise SystemExit(f"--tokens must be a multiple of {rows * context}, a micro-batch")
    measured = arguments.measured or micro_batches
    torch.manual_seed(0)
    with torch.device(device):
        model = build_gpt(arguments.model, (context,), arguments.vocabulary)
        windows = torch.randint(arguments.vocabulary, (rows, context + 1))
    passes = TimedPasses(model, windows, measured, arguments.compile)
    chosen = [peer for peer in STEPS if device.type == "cuda" or not peer.on_cuda_only]
    steps = {peer.name: TimedPeer(peer, model, device) for peer in chosen}
    timed: dict[str, TimedSteps] = {PASSES: passes, **steps}
    for entry in timed.values():
        entry.attempt(entry.build)
    for _ in time_in_rounds(list(timed.values()), arguments.seconds):
        pass
    factor = micro_batches / measured
    times = {name: {"wall": e.wall_ms, "gpu": e.gpu_ms} for name, e in timed.items()}
    for clock, found in times[PASSES].items():
        times[PASSES][clock] = [factor * ms for ms in found]
    return {
        "model": arguments.model,
        "weights": sum(p.numel() for p in model.parameters()),
        "tokens": arguments.tokens,
        "micro_batches": micro_batches,
        "micro_batches_measured": measured,
        "rows": [
            make_row(name, times[name], times[PASSES], times[PLAIN], entry.error)
            for name, entry in timed.items()
        ],
    }


Times = dict[str, list[float]]  # of each clock, one value per round


def make_row(
    name: str, times: Times, passes: Times, plain: Times, error: str | None
) -> dict[str, Any]:
    """A part of the training step: its times, and the share of P that follows, with quartiles."""
    row: dict[str, Any] = {"part": name}
    if error:
        return {**row, "error": error}
    for clock in ("wall", "gpu"):
        row[f"{clock}_quartiles_ms"] = find_quartiles(times[clock])
        rounds = zip(times[clock], plain[clock], passes[clock], strict=False)
        shares = [(step - rest) / whole for step, rest, whole in rounds]
        is_share = name in (SPECTRAL, CAPTURED)
        row[f"{clock}_share_quartiles"] = find_quartiles(shares) if is_share else None
    return {**row, "rounds": len(times["wall"])}


def main() -> None:
    parser = create_parser(__doc__, "cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="gpt:124m")
    parser.add_argument("--tokens", type=int, default=2**19, help="of a training step")
    parser.add_argument("--rows", type=int, default=32, help="windows of a micro-batch")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--measured", type=int, help="micro-batches to time; default: all")
    parser.add_argument("--seconds", type=float, default=40.0, help="time for the rounds")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found = measure(arguments, device)
    write_measurements(arguments, device, **found)
    print(format_shares(found["rows"]))


if __name__ == "__main__":
    main()
