"""How long an optimizer step takes, beside torch's own optimizers and a plain copy.

Everything is measured in one process and one run, in rounds that take every optimizer in a new
order, so that ratios mean something on a noisy machine. Two replicas of parameters, gradients and
state take turns, so that no step finds its inputs in the cache. No tensor holds zeros.

    python benchmarks/step.py --device cpu --cases a d --output results/step-cpu.json

`wall` is the median time of step() with its Python, synchronised at the end. `gpu` is the time the
device was busy with it: the step is queued behind a sleeping kernel, so that launches do not count.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from environment import environment
from shapes import CASES, TITLES, weights
from torch import Tensor, nn

from neumann import Neumann

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CLOCK: dict[str, Any] = {"warmup_steps": 1, "reset_steps": 0}  # all timed steps iterate
REPLICAS = 2


@dataclass(frozen=True)
class Candidate:
    """An optimizer to time, and the bytes a weight that one pass over its numbers moves."""

    name: str
    build: Build
    bytes_per_weight: int | None = None
    cases: str = "abcd"


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in milliseconds, sizes in bytes."""

    case: str
    name: str
    wall_ms: float
    wall_quartiles_ms: tuple[float, float]
    gpu_ms: float | None
    bytes_moved: int | None
    state_bytes: int
    peak_bytes: int | None  # beyond parameters, gradients and state
    rounds: int


def neumann_candidates(device: torch.device) -> list[Candidate]:
    def build(**options: Any) -> Build:
        return lambda params: Neumann(params, lr=1e-3, **CLOCK, **options)

    found = [
        Candidate("Neumann fused", build(fused=True), 28),
        Candidate("Neumann fused, bf16 state", build(fused=True, state_dtype=torch.bfloat16), 20),
        Candidate("Neumann fused, no forces", build(fused=True, cubic=0.0, repulsive=0.0), 20),
        Candidate("Neumann foreach", build(foreach=True)),
        Candidate("Neumann single", build(foreach=False), cases="abc"),
    ]
    if device.type == "cuda":
        capturable = build(fused=True, capturable=True)
        found.insert(3, Candidate("Neumann fused, capturable", capturable, 28))
    return found


def torch_candidates() -> list[Candidate]:
    found = []
    for name, cls, options, moved in (
        ("SGD nesterov", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 20),
        ("Adam", torch.optim.Adam, {}, 28),
        ("AdamW", torch.optim.AdamW, {}, 28),
    ):
        for form in ("single", "foreach", "fused"):
            flags = {"foreach": form == "foreach", "fused": form == "fused"}

            def build(
                params: list[nn.Parameter],
                cls: Any = cls,
                options: Any = options,
                flags: Any = flags,
            ) -> torch.optim.Optimizer:
                optimizer: torch.optim.Optimizer = cls(params, lr=1e-3, **options, **flags)
                return optimizer

            found.append(
                Candidate(
                    f"{name} {form}",
                    build,
                    moved if form == "fused" else None,
                    "abc" if form == "single" else "abcd",
                )
            )
    return found


def schedule_free() -> list[Candidate]:
    try:
        import schedulefree
    except ImportError:
        print("schedulefree is not installed; its row is left out", file=sys.stderr)
        return []

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = schedulefree.AdamWScheduleFree(params, lr=1e-3, foreach=True)
        optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return [Candidate("schedule-free AdamW foreach", build)]


class PlainCopy(torch.optim.Optimizer):
    """Copies as many numbers as there are weights from one flat tensor to another: the memory."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        total = sum(p.numel() for p in params)
        self.source, self.target = (torch.randn(total, device=params[0].device) for _ in "ab")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.target.copy_(self.source)


class Timed:
    """A candidate on its replicas."""

    def __init__(self, candidate: Candidate, case: str, device: torch.device) -> None:
        self.candidate, self.case, self.device = candidate, case, device
        torch.manual_seed(0)
        self.replicas = []
        self.peak: int | None = None
        for _ in range(REPLICAS):
            params = [nn.Parameter(torch.randn(shape, device=device)) for shape in CASES[case]]
            for p in params:
                p.grad = torch.randn_like(p) * 1e-3
            self.replicas.append(candidate.build(params))
        self.turn = 0
        self.walls: list[float] = []
        self.gpus: list[float] = []
        for _ in range(3 * REPLICAS):
            self.step()
        self._measure_peak()

    def step(self) -> None:
        self.replicas[self.turn % REPLICAS].step()
        self.turn += 1

    def time_wall(self) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        self.step()
        synchronize(self.device)
        self.walls.append(1e3 * (time.perf_counter() - start))

    def time_gpu(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e6 * max(1.0, 2 * median(self.walls))))
        begin.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        self.gpus.append(begin.elapsed_time(end))

    def _measure_peak(self) -> None:
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - before

    def row(self) -> Row:
        state = {
            id(value): value.numel() * value.element_size()
            for value in tensors_in(self.replicas[0].state)
        }
        walls = sorted(self.walls)
        moved = self.candidate.bytes_per_weight
        return Row(
            case=self.case,
            name=self.candidate.name,
            wall_ms=median(walls),
            wall_quartiles_ms=(walls[len(walls) // 4], walls[3 * len(walls) // 4]),
            gpu_ms=median(self.gpus) if self.gpus else None,
            bytes_moved=None if moved is None else moved * weights(self.case),
            state_bytes=sum(state.values()),
            peak_bytes=self.peak,
            rounds=len(walls),
        )


def tensors_in(state: Any) -> list[Tensor]:
    return [v for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: str, device: torch.device, seconds: float, only: str | None) -> list[Row]:
    """Rounds over all candidates until the time is spent; at least five."""
    candidates = [
        Candidate("plain copy", PlainCopy, 8),
        *neumann_candidates(device),
        *torch_candidates(),
        *schedule_free(),
    ]
    chosen = [c for c in candidates if case in c.cases and (only is None or only in c.name)]
    # Whatever fits side by side shares rounds; a large case goes in parts that all hold AdamW.
    timed = []
    for number, candidate in enumerate(chosen, start=1):
        progress(f"{TITLES[case]}: building {number}/{len(chosen)} {candidate.name}")
        timed.append(Timed(candidate, case, device))
    start, rounds = time.perf_counter(), 0
    order = random.Random(0)  # so that nobody always runs on a cache that a sister left warm
    shuffled = list(timed)
    while rounds < 5 or time.perf_counter() - start < seconds:
        order.shuffle(shuffled)
        for entry in shuffled:
            entry.time_wall()
        if device.type == "cuda":
            for entry in shuffled:
                entry.time_gpu()
        rounds += 1
        progress(f"{TITLES[case]}: round {rounds}, {time.perf_counter() - start:.0f} s")
    rows = [entry.row() for entry in timed]
    del timed
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """The rows of one case as Markdown, ratios to fused AdamW."""
    by_name = {row.name: row for row in rows}
    reference = by_name.get("AdamW fused")
    copy = by_name.get("plain copy")

    def bandwidth(row: Row) -> float | None:
        spent = row.gpu_ms if row.gpu_ms is not None else row.wall_ms
        return None if row.bytes_moved is None else row.bytes_moved / spent

    def cell(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    lines = [
        f"**({rows[0].case}) {TITLES[rows[0].case]}**, {weights(rows[0].case):,} weights",
        "",
        "| optimizer | wall ms | × | gpu ms | × | GB moved | of copy | state GB | peak GB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        wall = row.wall_ms / reference.wall_ms if reference else None
        gpu = (
            row.gpu_ms / reference.gpu_ms if reference and row.gpu_ms and reference.gpu_ms else None
        )
        speed = bandwidth(row)
        reached = bandwidth(copy) if copy else None
        share = 100 * speed / reached if speed and reached else None
        moved = None if row.bytes_moved is None else row.bytes_moved / 1e9
        peak = None if row.peak_bytes is None else row.peak_bytes / 1e9
        cells = [
            row.name,
            cell(row.wall_ms, ".3f"),
            cell(wall),
            cell(row.gpu_ms, ".3f"),
            cell(gpu),
            cell(moved),
            cell(share, ".0f") + ("" if share is None else " %"),
            cell(row.state_bytes / 1e9),
            cell(peak),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds of a case")
    parser.add_argument("--only", help="only optimizers whose name contains this")
    parser.add_argument("--commit", help="name of the commit, where git cannot tell")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found = environment(device, arguments.commit)
    rows: list[Row] = []
    for case in arguments.cases:
        of_case = measure(case, device, arguments.seconds, arguments.only)
        rows += of_case
        print("\n" + table(of_case) + "\n", flush=True)
        if arguments.output:  # after every case, so that an interrupted run leaves what it has
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            content = {**found, "rows": [asdict(row) for row in rows]}
            arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
