"""Checkpoints load as they were saved; a damaged one is detected and the one before used."""

import collections
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.lab.training.checkpoints import CheckpointError, Checkpoints
from neumann.lab.training.random_state import get_rng_state, set_rng_state
from tests.support.checkpointing import consistent, names, payload


def test_save_and_load(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load_latest() is None
    path = checkpoints.save(7, payload(7))
    loaded = checkpoints.load_latest()
    assert loaded.step == 7
    assert loaded.path == path
    assert loaded.damaged == ()
    assert consistent(loaded)


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 30, 200):
        checkpoints.save(step, payload(step))
    assert names(tmp_path) == ["checkpoint-000000000030.pt", "checkpoint-000000000200.pt"]
    checkpoints.save(200, payload(200))
    assert checkpoints.load_latest().step == 200
    assert len(names(tmp_path)) == 2


def test_other_files_are_left_alone(tmp_path):
    for name in ("checkpoint-1.pt", "checkpoint-000000000001.pt.bak", "notes", ".hidden.tmp"):
        (tmp_path / name).write_text("mine")
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, payload(step))
    assert len(names(tmp_path)) == 5


def test_torch_load_reads_a_checkpoint_too(tmp_path):
    path = Checkpoints(tmp_path).save(3, payload(3))
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap)["step"] == 3


def test_training_resumes_from_saved_state_dicts_with_the_same_bits(tmp_path):
    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = Neumann(model.parameters(), lr=0.05, warmup_steps=2, reset_steps=3)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
        return model, optimizer, scheduler

    def train(model, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()]

    run = start()
    train(*run, 5)
    states = {str(index): part.state_dict() for index, part in enumerate(run)}
    Checkpoints(tmp_path).save(5, {**states, "rng": get_rng_state()})
    expected = train(*run, 5)
    loaded = Checkpoints(tmp_path).load_latest().payload
    fresh = start()
    for index, part in enumerate(fresh):
        part.load_state_dict(loaded[str(index)])
    set_rng_state(loaded["rng"])
    assert all(map(torch.equal, expected, train(*fresh, 5)))


def test_every_type_that_the_docstring_promises(tmp_path):
    everything = {
        "plain": [1, 2**70, 0.1, float("inf"), True, None, "ü\n", b"\0\xff", 1j],
        ("a", 1): {"set": {1, 2}, "ordered": collections.OrderedDict(b=1, a=2)},
        3: (torch.Size([2]), torch.bfloat16, torch.device("cpu"), collections.Counter("aab")),
    }
    Checkpoints(tmp_path).save(0, everything)
    assert Checkpoints(tmp_path).load_latest().payload == everything
    Checkpoints(tmp_path).save(1, {"p": nn.Parameter(torch.ones(2)), "h": torch.ones(1).half()})
    loaded = Checkpoints(tmp_path).load_latest().payload
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["h"].dtype is torch.float16


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": [0, np.float64(1)]}, r"payload\['a'\]\[1\] is a numpy.float64"),
        ({"a": {"b": np.zeros(2)}}, r"payload\['a'\]\['b'\] is a numpy.ndarray"),
        ({"a": (len,)}, r"payload\['a'\]\[0\] is a builtins.builtin_function"),
        ({np.int64(3): 1}, "the key .*3.* of payload is a numpy.int64"),
        ({"a": collections.defaultdict(int)}, "collections.defaultdict"),
    ],
)
def test_unloadable_payloads_are_refused_before_anything_is_written(bad, where, tmp_path):
    with pytest.raises(TypeError, match=where):
        Checkpoints(tmp_path / "c").save(1, bad)
    assert not (tmp_path / "c").exists()


def test_arguments_out_of_range(tmp_path):
    with pytest.raises(ValueError, match=r"keep must be at least 1.*got 0"):
        Checkpoints(tmp_path, keep=0)
    for step in (-1, 10**12):
        with pytest.raises(ValueError, match=f"step must be .*; got {step}"):
            Checkpoints(tmp_path).save(step, {})


def test_a_truncated_file_is_skipped_for_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, payload(1))
    path = checkpoints.save(2, payload(2))
    whole = path.read_bytes()
    lengths = {0, 1, 4, len(whole) // 2, *range(len(whole) - 150, len(whole))}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        loaded = checkpoints.load_latest()
        assert loaded.step == 1
        assert consistent(loaded)
        assert loaded.damaged == (path,)
    path.write_bytes(whole + b"\n")
    assert checkpoints.load_latest().damaged == (path,)
    path.write_bytes(whole)
    assert checkpoints.load_latest().step == 2


def test_a_flipped_bit_is_detected_anywhere(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, payload(1))
    path = checkpoints.save(2, payload(2, size=100))
    whole = path.read_bytes()
    chance = random.Random(0)
    places = [*range(len(whole) - 120, len(whole)), *chance.sample(range(len(whole)), 300)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        assert checkpoints.load_latest().step == 1


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, payload(1))
    other = tmp_path / "checkpoint-000000000009.pt"
    shutil.copy(path, other)
    loaded = checkpoints.load_latest()
    assert (loaded.step, loaded.damaged) == (1, (other,))


def test_all_damaged_is_an_error_that_names_them(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, payload(step)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"-000000000002\.pt, checkpoint-000000000001\.pt"):
        checkpoints.load_latest()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_checkpoint_does_not_push_out_an_intact_one(keep, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    checkpoints.save(80, payload(80))
    Checkpoints(tmp_path, keep=2).save(100, payload(100)).write_bytes(b"damaged")
    for step in (85, 90):
        checkpoints.save(step, payload(step))
        loaded = checkpoints.load_latest()
        assert (loaded.step, loaded.damaged) == (step, ())
        assert len(names(tmp_path)) == keep


def test_an_intact_later_checkpoint_stays_and_so_does_the_one_just_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (100, 5):
        checkpoints.save(step, payload(step))
    assert [step for step, _ in checkpoints._list()] == [100, 5]


def test_an_intact_file_that_torch_cannot_load_is_an_error_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("neumann.lab.training.checkpoints._check_loadable", lambda *_: None)
    Checkpoints(tmp_path).save(1, payload(1))
    Checkpoints(tmp_path).save(2, {"x": range(3)})
    with pytest.raises(CheckpointError, match=r"002\.pt is intact, but torch .* cannot load it"):
        Checkpoints(tmp_path).load_latest()
