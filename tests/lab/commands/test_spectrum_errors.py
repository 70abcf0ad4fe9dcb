"""`neumann spectrum`: errors in the user's code, flags without effect, and advice about noise."""

import json

import pytest

from neumann.lab.commands.main import main
from neumann.lab.commands.spectrum import describe_measurement

OWN = """
import torch
from torch import nn

torch.manual_seed(0)
X, Y = torch.randn(20, 3), torch.randn(20, 2)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

def well():
    return MODEL, nn.functional.mse_loss, (X, Y)

def key():
    return MODEL, lambda out, target: {}["missing"], (X, Y)

def index():
    return MODEL, lambda out, target: [][3], (X, Y)

def attribute():
    return MODEL, lambda out, target: out.foo, (X, Y)

def asserts():
    def loss(out, target):
        assert out.shape == (), "a shape"
    return MODEL, loss, (X, Y)

def shapes():
    return MODEL, lambda out, target: (out @ target).mean(), (X, Y)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.iner(x)

def module():
    return Broken(), nn.functional.mse_loss, (X, Y)

def batches():
    yield X, Y
    raise StopAsyncIteration("no more")

def loader():
    return MODEL, nn.functional.mse_loss, batches()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module that no other test has imported."""
    name = f"refused_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def line_of(text):
    return next(number for number, line in enumerate(OWN.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        ("key", "KeyError: 'missing'", '["missing"]'),
        ("index", "IndexError: list index out of range", "[][3]"),
        ("attribute", "AttributeError: 'Tensor' object has no attribute 'foo'", "out.foo"),
        ("asserts", "AssertionError: a shape", "assert out"),
        ("shapes", "RuntimeError: mat1 and mat2", "out @ target"),
        ("module", "AttributeError: 'Broken' object has no attribute 'iner'", "self.iner"),
        ("loader", "StopAsyncIteration: no more", "raise Stop"),
    ],
)
def test_exception_in_user_code_is_one_line(own, entry, error, text, capsys):
    assert main(["spectrum", "--entry", f"{own}:{entry}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"neumann: --entry {own}:{entry}: {error}")
    assert printed.endswith(f"({own}.py:{line_of(text)})\n")
    assert printed.count("\n") == 1


def test_bug_of_ours_keeps_its_traceback(own, monkeypatch):
    def fails(*args, **kwargs):
        return {}["ours"]

    monkeypatch.setattr("neumann.lab.studies.spectrum_measurement.extremes", fails)
    monkeypatch.setattr("neumann.lab.user_code._is_user_file", lambda file: own in file)
    with pytest.raises(KeyError, match="ours"):
        main(["spectrum", "--entry", f"{own}:well"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights", "training"], "--weights is for --checkpoint, not for --entry"),
        (["--weights", "evaluation"], "--weights is for --checkpoint, not for --entry"),
        (["--device", "cpu"], "--device is for --checkpoint, not for --entry"),
        (["--probes", "3"], "--probes is for the density: add --density"),
        (["--steps", "3"], "--steps is for the density: add --density"),
    ],
)
def test_flags_without_effect_are_refused(own, flags, message, capsys):
    assert main(["spectrum", "--entry", f"{own}:well", *flags]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"neumann: {message}")
    assert printed.count("\n") == 1


def test_running_statistics_mean_evaluation_mode(own, capsys):
    flags = ("--max-products", "3")
    assert main(["spectrum", "--entry", f"{own}:well", *flags]) == 0
    assert "dropout" in capsys.readouterr().out
    assert main(["spectrum", "--entry", f"{own}:well", *flags, "--batchnorm", "running"]) == 0
    assert "dropout" not in capsys.readouterr().out
    with open("spectrum.json") as file:
        about = json.load(file)["about"]
    assert about["batchnorm"] == "running"
    assert about["randomness"] is None


def record(noise, tolerance, converged=False):
    end = {"value": 1.0, "error": 1.0, "tolerance": tolerance, "converged": converged}
    return {
        "about": {
            "matrix": "hessian",
            "parameters": 3,
            "examples": 3,
            "dtype": "float32",
            "device": "cpu",
            "batchnorm": None,
            "randomness": None,
            "weight_decay": 0.0,
        },
        "extremes": {
            "smallest": end,
            "largest": end | {"converged": True},
            "products": 3,
            "noise": noise,
            "risk": 1e-3,
        },
        "source": {},
    }


def test_more_products_are_advised_only_if_they_help():
    assert "a larger --max-products helps" in describe_measurement(record(1e-6, 1e-3))[-1]
    noisy = describe_measurement(record(2e-3, 1e-3))[-1]
    assert "More products do not help" in noisy
    assert "another --operator or a model in float64" in noisy
    assert "--max-products helps" not in noisy
    assert "A tolerance of 0 cannot be reached" in describe_measurement(record(1e-6, 0.0))[-1]
    done = describe_measurement(record(1e-6, 1e-3, converged=True))
    assert not any("onverge" in sentence for sentence in done)
    assert done[-1].endswith("for the loss as computed in float32.")
