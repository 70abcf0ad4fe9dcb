"""The comparison of steps with other optimizers of the kind: it runs, and says what it measured."""

import contextlib
import json
import sys
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.step import compare_muons, peers, time_symmetric_product
from benchmarks.step.networks import build_network
from benchmarks.step.timed_optimizer import LEAST_ROUNDS
from benchmarks.step.timed_peer import WARM_UP

pytestmark = pytest.mark.slow


def run(module, monkeypatch, path, *arguments):
    given = [module.__name__, "--device", "cpu", "--output", str(path), *arguments]
    monkeypatch.setattr(sys, "argv", given)
    module.main()
    return json.loads(path.read_text())


def test_a_tiny_comparison(tmp_path, monkeypatch, capsys):
    arguments = ["--cases", "tiny", "--seconds", "0", "--only", "Neumann", "torch Muon"]
    found = run(compare_muons, monkeypatch, tmp_path / "muons.json", *arguments)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"Neumann spectral", "Neumann spectral, bf16 state"} <= set(rows)
    for row in rows.values():
        low, median, high = row["wall_quartiles_ms"]
        assert 0 < low <= median <= high
        assert row["rounds"] >= LEAST_ROUNDS
        assert row["note"]
    assert found["environment"]["versions"]
    # m and P's momentum of the matrices, 4 or 2 bytes each, and a mean of squares for the rest
    state = {name: row["state_bytes"] / row["weights"] for name, row in rows.items()}
    assert 8 <= state["Neumann spectral"] < 10
    assert 4 <= state["Neumann spectral, bf16 state"] < 6
    table = capsys.readouterr().out
    assert all(name in table for name in rows)


def test_every_peer_takes_every_parameter_once():
    model = build_network("tiny", torch.device("cpu"))
    wanted = sorted(p.data_ptr() for p in model.parameters())
    for peer in peers.find_peers([])[0]:
        stepping = peer.build(model)
        groups = [group for o in stepping.optimizers for group in o.param_groups]
        assert sorted(p.data_ptr() for group in groups for p in group["params"]) == wanted, (
            peer.name
        )
        assert sorted(p.data_ptr() for p, _ in stepping.gradients) == wanted, peer.name


def run_with(chosen, monkeypatch, tmp_path, left_out):
    monkeypatch.setattr(compare_muons, "find_peers", lambda *given: (chosen, left_out))
    arguments = ["--cases", "tiny", "--seconds", "0"]
    return run(compare_muons, monkeypatch, tmp_path / "muons.json", *arguments)


def test_a_peer_that_fails_has_a_row_that_says_why_and_the_others_go_on(
    tmp_path, monkeypatch, capsys
):
    def fail(model):
        raise RuntimeError("out of memory\nin a kernel")

    chosen = [peers.Peer("broken", fail, "takes nothing"), peers.PEERS[0]]
    found = run_with(chosen, monkeypatch, tmp_path, {"gone": "no wheel"})
    broken, measured = found["rows"]
    assert broken["error"] == "RuntimeError: out of memory"
    assert "wall_quartiles_ms" not in broken
    assert measured["wall_quartiles_ms"]
    assert found["left_out"] == {"gone": "no wheel"}
    assert "| broken | RuntimeError: out of memory |" in capsys.readouterr().out


def test_a_peer_that_fails_in_a_later_round_is_let_go(tmp_path, monkeypatch):
    kept = []

    class Failing(peers.Stepping):
        def step(self):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps > WARM_UP + 2:
                raise RuntimeError("no memory left")

    def build(model):
        stepping = Failing([], [])
        kept.append(weakref.ref(stepping))
        return stepping

    chosen = [peers.Peer("late", build, "takes nothing"), peers.PEERS[0]]
    late, measured = run_with(chosen, monkeypatch, tmp_path, {})["rows"]
    assert late["error"] == "RuntimeError: no memory left"
    assert measured["rounds"] == LEAST_ROUNDS
    assert kept[0]() is None


def test_if_all_fail_the_file_says_so(tmp_path, monkeypatch):
    def fail(model):
        raise ValueError("no")

    (row,) = run_with([peers.Peer("a", fail, "")], monkeypatch, tmp_path, {})["rows"]
    assert row["error"] == "ValueError: no"


def test_gradients_that_a_peer_drops_are_not_the_state_of_the_next(tmp_path, monkeypatch):
    def build(model):
        stepping = peers.build_adamw(model)
        for p in model.parameters():
            p.grad = None
        return stepping

    made = []
    monkeypatch.setattr(peers.torch, "randn_like", lambda p: made.append(p) or torch.ones_like(p))
    adamw = peers.PEERS[-1]
    run_with([peers.Peer("drops", build, ""), adamw], monkeypatch, tmp_path, {})
    assert len(made) == len(list(build_network("tiny", torch.device("cpu")).parameters()))


def test_peers_of_a_period_are_timed_over_all_of_it():
    """SOAP renews its bases in every second step, so a clock that sees one of two is wrong."""
    pytest.importorskip("heavyball")
    soap = next(peer for peer in peers.PEERS if peer.name == "heavyball SOAP")
    model = build_network("tiny", torch.device("cpu"))
    (optimizer, _) = soap.build(model).optimizers
    assert soap.period == 1 / optimizer.precond_schedule == 2


def test_what_a_graph_keeps_is_what_it_reserves_beyond_its_tensors(monkeypatch):
    """50 bytes are free before the capture, which reserves 100 and leaves 30 of them to tensors."""
    memory = {"reserved": 150, "allocated": 100}

    @contextlib.contextmanager
    def capture(graph, stream):
        yield
        memory["reserved"] += 100
        memory["allocated"] += 30

    monkeypatch.setattr(peers, "find_capture_stream", MagicMock())
    for name in (
        "stream",
        "current_stream",
        "current_device",
        "synchronize",
        "empty_cache",
        "CUDAGraph",
    ):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: memory["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: memory["allocated"])
    stepping = peers.CapturedStepping(peers.build_adamw(build_network("tiny", torch.device("cpu"))))
    assert stepping.graph_bytes == 70


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, missing = peers.find_peers(["heavyball", "Neumann"])
    assert [peer.name for peer in found] == ["Neumann spectral", "Neumann spectral, bf16 state"]
    assert missing["heavyball SOAP"] == "heavyball is not installed"


def test_the_symmetric_product_is_compared_by_value(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    import tests.support.triton_runs  # noqa: F401  # lets the interpreter run loops

    arguments = ["--sizes", "2x70x20"]
    found = run(time_symmetric_product, monkeypatch, tmp_path / "product.json", *arguments)
    assert len(found["rows"]) == 4
    for row in found["rows"]:
        assert row["error"] < 2**-7
        if row["variant"] == "symmetric":
            assert row["symmetric"]
