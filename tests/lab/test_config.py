"""Settings: what is refused, what "auto" becomes, and reading them from files."""

import dataclasses
import json

import pytest
import torch

from neumann.lab.config import BOOKKEEPING, TrainConfig
from neumann.lab.config_files import load_settings, parse_settings
from neumann.lab.errors import UsageError


def test_resolve_replaces_every_auto():
    resolved = TrainConfig(opt="sgd").resolve()
    assert resolved.lr == 0.2
    on_gpu = torch.cuda.is_available()
    assert resolved.amp == ("bf16" if on_gpu else "off")
    assert resolved.compile == resolved.channels_last == ("on" if on_gpu else "off")
    assert resolved.resolve() == resolved
    assert "auto" not in json.dumps({**resolved.as_dict(), "resume": ""})


def test_resolve_keeps_explicit_settings():
    resolved = TrainConfig(opt="sgd:lr=3", lr=2.0, amp="bf16", compile="on", device="cpu").resolve()
    assert (resolved.lr, resolved.amp, resolved.compile) == (3.0, "bf16", "on")


def test_settings_survive_a_round_trip_through_json():
    config = TrainConfig(data="text:a.txt", lr=0.3, target=3.5).resolve()
    assert parse_settings(json.loads(json.dumps(config.as_dict())), TrainConfig) == config


def test_settings_load_from_a_toml_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('batch-size = 7\nlr = 0.5\ndata_dir = "here"\n')
    config = load_settings(file, TrainConfig)
    assert (config.batch_size, config.lr, str(config.data_dir)) == (7, 0.5, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 3", "unknown setting 'batchsize'; did you mean batch_size"),
        ("batch-size = ", "is not TOML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(file, TrainConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"micro_batch_size": 0}, "--micro-batch-size must be at least 1"),
        ({"checkpoint_every": -1}, "--checkpoint-every must be at least 0"),
        ({"sched": "cosin"}, "unknown --sched 'cosin'; did you mean cosine"),
        ({"smoothing": 1.0}, "--smoothing must be in"),
        ({"lr": -0.1}, "--lr must be a number of at least 0"),
        ({"lr": float("nan")}, "--lr must be a number of at least 0"),
        ({"lr": float("inf")}, "--lr must be a number of at least 0"),
        ({"target": float("nan")}, "--target must be a number, such as 95; got nan"),
        ({"ramp_epochs": 21.0}, "--ramp-epochs must be between 0 and --epochs"),
        ({"clip_grad": 0.0}, "--clip-grad must be a norm above 0, got 0.0"),
        ({"clip_grad": -1.0}, "--clip-grad must be a norm above 0"),
        ({"clip_grad": float("inf")}, "--clip-grad must be a norm above 0"),
        ({"device": "tpu-ish"}, "--device must be auto, cpu, cuda"),
        ({"opt": "sgd:nestrov=true"}, "did you mean nesterov"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(TrainConfig(), **settings).resolve()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu():
    with pytest.raises(UsageError, match="finds no CUDA device"):
        TrainConfig(device="cuda").resolve()


def test_bookkeeping_names_settings():
    assert set(BOOKKEEPING) <= {field.name for field in dataclasses.fields(TrainConfig)}


def test_second_derivatives_go_without_what_lacks_them(monkeypatch):
    """As on a GPU, where conjugate gradients would otherwise fail in their first step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TrainConfig(opt="sgd").resolve().cuda_graph == "on"
    assert TrainConfig(opt="cg").resolve().cuda_graph == "off"
    with pytest.raises(UsageError, match=r"--sync-bn: cg needs second derivatives"):
        TrainConfig(opt="cg", sync_bn=True).resolve(ranks=2)
