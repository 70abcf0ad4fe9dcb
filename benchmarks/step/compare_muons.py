"""One optimizer step of Neumann's spectral form beside other optimizers of its kind.

    python -m benchmarks.step.compare_muons --device cuda --output results/muons-h200.json
    python -m benchmarks.step.compare_muons --device cpu --cases tiny --seconds 1

torch.optim.Muon, heavyball's Muon and SOAP and pytorch_optimizer's Muon, on the parameters of whole
networks with random gradients; there is no forward pass. Who takes which parameters is in
`benchmarks/step/peers.py` and in the JSON. All optimizers step on the same weights in one process,
in rounds that visit them in a random order. `wall` is the time of a step with its Python, until the
device has finished; `gpu` is the time that the device is busy with it, without launch latency. Both
are medians with quartiles. SOAP renews its bases in every second step, so its mean is shown too.
`state` is what the allocator holds more after the first steps than before (on a CPU: the sum over
the tensors of the state), `peak` what a step needs beyond that.

The numbers are written after every case. heavyball compiles its steps when it first takes them,
which may take minutes on a GPU; --heavyball-compile off leaves that out. A peer that fails, for
lack of memory for example, is listed with its error.
"""

import gc
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.markdown import format_cell, format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import synchronize
from benchmarks.step.networks import NETWORKS, PUBLISHED, build_network
from benchmarks.step.peers import PEERS, REFERENCE, Peer, Stepping, find_peers, list_versions
from benchmarks.step.timed_optimizer import TimedSteps, time_in_rounds

WARM_UP = 4  # steps: the first ones create state and compile


class TimedPeer(TimedSteps):
    """A peer on a network, with the times of its steps."""

    def __init__(self, peer: Peer, model: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        self.peer = peer
        synchronize(device)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = time.perf_counter()
        self._stepping: Stepping = peer.build(model)
        for _ in range(WARM_UP):
            self.prepare()
            self.step()
        synchronize(device)
        self.build_seconds = time.perf_counter() - start
        gc.collect()
        if device.type == "cuda":
            self.state_bytes = torch.cuda.memory_allocated() - before
        else:
            self.state_bytes = sum(count_bytes(o.state) for o in self._stepping.optimizers)

    def prepare(self) -> None:
        self._stepping.give_gradients()

    def step(self) -> None:
        self._stepping.step()


def count_bytes(state: Any) -> int:
    """The memory of all tensors inside nested dicts and lists; shared ones count once."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "values"):
            for item in value.values():
                visit(item)

    visit(state)
    return sum(found.values())


def measure(
    case: str, device: torch.device, seconds: float, peers: list[Peer]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a case, and the errors of the peers that failed."""
    model = build_network(case, device)
    for p in model.parameters():  # before any peer, so that the allocator tells them from state
        p.grad = 1e-3 * torch.randn_like(p)
    timed: list[TimedPeer] = []
    failed: dict[str, str] = {}
    for peer in peers:
        show_progress(f"{NETWORKS[case].title}: building {peer.name}")
        try:
            timed.append(TimedPeer(peer, model, device))
        except Exception as error:  # a peer must not end the comparison of the others
            lines = str(error).strip().splitlines() or [""]
            failed[peer.name] = f"{type(error).__name__}: {lines[0]}"
            show_progress(f"{peer.name} failed: {failed[peer.name]}")
            gc.collect()
    *_, (rounds, passed) = time_in_rounds(timed, seconds)
    show_progress(f"{NETWORKS[case].title}: {rounds} rounds, {passed:.0f} s")
    weights = sum(p.numel() for p in model.parameters())
    rows = [make_row(case, weights, entry) for entry in timed]
    del timed, model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows, failed


def make_row(case: str, weights: int, timed: TimedPeer) -> dict[str, Any]:
    """One optimizer on one network. Quartiles are lower, median and upper."""
    return {
        "case": case,
        "weights": weights,
        "name": timed.peer.name,
        "note": timed.peer.note,
        "wall_quartiles_ms": statistics.quantiles(timed.wall_ms, n=4, method="inclusive"),
        "wall_mean_ms": statistics.fmean(timed.wall_ms),
        "gpu_quartiles_ms": (
            statistics.quantiles(timed.gpu_ms, n=4, method="inclusive") if timed.gpu_ms else None
        ),
        "gpu_mean_ms": statistics.fmean(timed.gpu_ms) if timed.gpu_ms else None,
        "state_bytes": timed.state_bytes,
        "peak_bytes": timed.measure_peak_bytes(),
        "build_seconds": timed.build_seconds,
        "rounds": len(timed.wall_ms),
    }


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def format_rows(rows: list[dict[str, Any]]) -> str:
    """All cases as one table, with ratios of medians to torch's Muon."""
    reference = {row["case"]: row for row in rows if row["name"] == REFERENCE}
    cells = []
    for row in rows:
        cells.append([NETWORKS[row["case"]].title, row["name"]])
        for clock in ("wall", "gpu"):
            found = row[f"{clock}_quartiles_ms"]
            other = reference.get(row["case"], {}).get(f"{clock}_quartiles_ms")
            shown = "{1:.2f} [{0:.2f}, {2:.2f}]".format(*found) if found else ""
            ratio = found[1] / other[1] if found and other else None
            cells[-1] += [shown, format_cell(ratio, "{:.2f}")]
            cells[-1].append(format_cell(row[f"{clock}_mean_ms"], "{:.2f}"))
        cells[-1].append(f"{row['state_bytes'] / row['weights']:.2f}")
        peak = row["peak_bytes"]
        cells[-1].append(format_cell(None if peak is None else peak / 1e9, "{:.2f}"))
    heads = ["network", "optimizer", "wall ms [quartiles]", "×", "mean"]
    heads += ["gpu ms [quartiles]", "×", "mean", "state B/weight", "peak GB"]
    return format_table(heads, "llrrrrrrrr", cells)


def main() -> None:
    parser = create_parser(__doc__, "cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=list(NETWORKS), default=PUBLISHED)
    parser.add_argument("--seconds", type=float, default=15.0, help="time for the rounds of a case")
    parser.add_argument("--only", nargs="+", default=[], help="words in the optimizers' names")
    parser.add_argument("--heavyball-compile", choices=["default", "off"], default="default")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peers, failed = find_peers(arguments.only, device)
    if not peers:
        raise SystemExit(f"--only must name one of {', '.join(p.name for p in PEERS)}")
    if arguments.heavyball_compile == "off" and any(p.package == "heavyball" for p in peers):
        import heavyball

        heavyball.utils.compile_mode = None
    for name, reason in failed.items():
        show_progress(f"{name} is left out: {reason}")
    left_out = {"": failed} if failed else {}
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        found, errors = measure(case, device, arguments.seconds, peers)
        rows += found
        if errors:
            left_out[case] = errors
        write_measurements(
            arguments,
            device,
            peers=list_versions(peers),
            heavyball_compile=arguments.heavyball_compile,
            left_out=left_out,
            rows=rows,
        )
    print(format_rows(rows))


if __name__ == "__main__":
    main()
