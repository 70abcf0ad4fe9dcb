"""The comparison of steps with other optimizers of the kind: it runs, and says what it measured."""

import json
import sys

import pytest
import torch

from benchmarks.step import compare_muons, peers, time_symmetric_product
from benchmarks.step.networks import build_network
from benchmarks.step.timed_optimizer import LEAST_ROUNDS

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


def test_a_peer_that_fails_is_listed_and_the_others_go_on(tmp_path, monkeypatch):
    def fail(model):
        raise RuntimeError("out of memory\nin a kernel")

    broken = peers.Peer("broken", fail, "takes nothing")
    chosen = [broken, peers.PEERS[0]]
    monkeypatch.setattr(compare_muons, "find_peers", lambda *given: (chosen, {"gone": "no wheel"}))
    arguments = ["--cases", "tiny", "--seconds", "0"]
    found = run(compare_muons, monkeypatch, tmp_path / "muons.json", *arguments)
    assert [row["name"] for row in found["rows"]] == ["Neumann spectral"]
    assert found["left_out"] == {
        "": {"gone": "no wheel"},
        "tiny": {"broken": "RuntimeError: out of memory"},
    }


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
