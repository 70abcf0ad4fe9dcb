"""One optimizer step of Neumann's spectral form beside other optimizers of its kind.

    python -m benchmarks.step.compare_muons --device cuda --output results/muons-h200.json
    python -m benchmarks.step.compare_muons --device cpu --cases tiny --seconds 1

torch.optim.Muon, heavyball's Muon and SOAP, pytorch_optimizer's Muon and, for scale, torch's fused
AdamW, on the parameters of whole networks with random gradients; there is no forward pass. Who
takes which parameters is in `benchmarks/step/peers.py` and in the JSON. All optimizers step on the
same weights in one process, in rounds that visit them in a random order. `wall` is the time of a
step with its Python, until the device has finished; `gpu` is the time that the device is busy with
it, without launch latency. Both are medians with quartiles. SOAP renews its bases in every second
step, so each of its times is the mean of two steps.

`state` is what the allocator holds more after the first steps than before (on a CPU: the sum over
the tensors of the state), `peak` what a step needs beyond that. `graph` is what a CUDA graph keeps
between steps in its own memory pool, which is what a step needs too: a replay has no peak.

The numbers are written after every case. heavyball compiles its steps when it first takes them,
which may take minutes on a GPU; --heavyball-compile off leaves that out. An optimizer that fails,
for lack of memory for example, has a row that says why, and the others go on.
"""

import sys
from typing import Any

import torch

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import find_quartiles
from benchmarks.step.networks import NETWORKS, PUBLISHED, build_network
from benchmarks.step.peers import (
    PEERS,
    Peer,
    Stepping,
    find_peers,
    list_versions,
    make_gradients,
)
from benchmarks.step.step_tables import format_peers
from benchmarks.step.timed_optimizer import free_memory, time_in_rounds
from benchmarks.step.timed_peer import TimedPeer


def measure(
    case: str, device: torch.device, seconds: float, peers: list[Peer]
) -> list[dict[str, Any]]:
    """The rows of a case."""
    model = build_network(case, device)
    weights = sum(p.numel() for p in model.parameters())
    shared = Stepping([], make_gradients(list(model.parameters())))
    timed = [TimedPeer(peer, model, device) for peer in peers if peer.takes(weights)]
    for entry in timed:
        show_progress(f"{NETWORKS[case].title}: building {entry.peer.name}")
        shared.give_gradients()  # a peer that made its own would count them as state
        entry.attempt(entry.build)
    *_, (rounds, passed) = (0, 0.0), *time_in_rounds(timed, seconds)
    show_progress(f"{NETWORKS[case].title}: {rounds} rounds, {passed:.0f} s")
    rows = []
    for entry in timed:
        rows.append(make_row(case, weights, entry))
        entry.release()  # the next one may need the memory
        free_memory(device)
    del model, shared, entry
    timed.clear()
    free_memory(device)
    return rows


def make_row(case: str, weights: int, timed: TimedPeer) -> dict[str, Any]:
    """One optimizer on one network, or why it was not measured. Quartiles include the median."""
    row = {"case": case, "weights": weights, "name": timed.peer.name, "note": timed.peer.note}
    peak = None if timed.error else timed.attempt(timed.measure_peak_bytes)
    if timed.error:
        show_progress(f"{timed.peer.name} failed: {timed.error}")
        return {**row, "error": timed.error}
    return {
        **row,
        "wall_quartiles_ms": find_quartiles(timed.wall_ms),
        "gpu_quartiles_ms": find_quartiles(timed.gpu_ms),
        "state_bytes": timed.state_bytes,
        "graph_bytes": timed.graph_bytes,
        "peak_bytes": peak,
        "build_seconds": timed.build_seconds,
        "rounds": len(timed.wall_ms),
    }


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = create_parser(__doc__, "cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=list(NETWORKS), default=PUBLISHED)
    parser.add_argument("--seconds", type=float, default=15.0, help="time for the rounds of a case")
    parser.add_argument("--only", nargs="+", default=[], help="words in the optimizers' names")
    parser.add_argument("--heavyball-compile", choices=["default", "off"], default="default")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peers, left_out = find_peers(arguments.only, device)
    if not peers:
        raise SystemExit(f"--only must name one of {', '.join(p.name for p in PEERS)}")
    if arguments.heavyball_compile == "off" and any(p.package == "heavyball" for p in peers):
        import heavyball

        heavyball.utils.compile_mode = None
    for name, reason in left_out.items():
        show_progress(f"{name} is left out: {reason}")
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        rows += measure(case, device, arguments.seconds, peers)
        write_measurements(
            arguments,
            device,
            peers=list_versions(peers),
            heavyball_compile=arguments.heavyball_compile,
            left_out=left_out,
            rows=rows,
        )
    print(format_peers(rows))


if __name__ == "__main__":
    main()
