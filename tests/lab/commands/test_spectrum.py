"""`neumann spectrum`: what it prints and writes, for checkpoints and for a user's own model."""

import dataclasses
import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch import distributed

from neumann.lab.commands import progress
from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arms import evaluation_mode
from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import read_metrics
from neumann.lab.studies.settings import SpectrumConfig
from neumann.lab.studies.study_files import write_object
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.curvature import load_probe_batch
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.spectrum import Hessian, extremes

pytestmark = pytest.mark.slow

CONFIG = TrainConfig(
    data="synthetic:1x4x4,4,64",
    model="cnn",
    opt="neumann:warmup_epochs=1,lr=0.05",
    batch_size=8,
    epochs=2,
    spectrum_every=100,
    spectrum_products=40,
).resolve()


def loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectrum") / "run"
    training = Training(CONFIG, Process())
    training.run(folder)
    return folder, training.learner


def measure(folder, *flags):
    """Run the command and return its record."""
    assert main(["spectrum", "--checkpoint", str(folder), *flags]) == 0
    return strict_json.loads((folder / "spectrum.json").read_bytes())


@pytest.mark.slow
def test_checkpoint_has_the_curvature_that_the_run_recorded(run, capsys):
    folder, _ = run
    flags = ("--weights", "training", "--examples", "8", "--max-products", "40")
    found = measure(folder, *flags)
    line = [line for line in read_metrics(folder) if line["kind"] == "spectrum"][-1]
    for end in ("smallest", "largest"):
        assert found["extremes"][end]["value"] == pytest.approx(line["probe"][end], rel=1e-5)
    assert found["source"]["step"] == line["step"] == 16
    assert found["about"]["batchnorm"] == "batch"
    assert found["about"]["examples"] == 8
    assert found["density"] is None
    printed = capsys.readouterr()
    assert "training weights of step 16" in printed.out
    assert "weight decay not included" in printed.out
    assert re.search(r"λ max +[\d.]+ +[\d.e-]+ +converged", printed.out)
    assert re.search(r"μ = .* 0\.\d+ +0\.\d+", printed.out)
    assert "ends  10 products  λ from" in printed.err


@pytest.mark.slow
def test_evaluation_weights_are_the_default(run):
    folder, learner = run
    found = measure(folder, "--examples", "16", "--batchnorm", "running", "--chunk", "8")
    batch = load_probe_batch(learner.dataset, 16)
    learner.model.eval()
    with evaluation_mode(learner.optimizer):
        operator = Hessian(learner.model, loss, batch=batch, batchnorm="running")
        expected = extremes(operator)
    learner.model.train()
    for end in ("smallest", "largest"):
        value, exact = found["extremes"][end], getattr(expected, end)
        assert abs(value["value"] - exact.value) <= value["error"] + exact.error
    assert found["source"]["weights"] == "evaluation"
    assert found["about"]["batchnorm"] == "running"


@pytest.mark.slow
def test_evaluation_weights_of_a_run_with_an_average(tmp_path):
    config = dataclasses.replace(CONFIG, ema=0.9, spectrum_every=0)
    training = Training(config, Process())
    training.run(tmp_path / "run")
    learner = training.learner
    found = measure(tmp_path / "run", "--examples", "8")["extremes"]["largest"]["value"]
    batch = load_probe_batch(learner.dataset, 8)
    learner.model.train()
    with learner.evaluation_weights():
        expected = extremes(Hessian(learner.model, loss, batch=batch), tolerance=1e-4).largest
    assert found == pytest.approx(expected.value, rel=1e-2)
    plain = measure(tmp_path / "run", "--examples", "8", "--weights", "training")
    assert abs(plain["extremes"]["largest"]["value"] / found - 1) > 0.02


def test_earlier_checkpoint_and_selected_parameters(run):
    folder, _ = run
    found = measure(folder, "--step", "8", "--parameters", "*.bias", "--weight-decay", "0.5")
    assert found["source"]["step"] == 8
    assert all(name.endswith(".bias") for name in found["about"]["names"])
    assert found["about"]["weight_decay"] == 0.5


@pytest.mark.slow
def test_gauss_newton_and_differences(run, capsys):
    folder, _ = run
    flags = ("--examples", "8", "--parameters", "*.bias")
    curvature = measure(folder, *flags, "--operator", "gauss-newton")
    assert curvature["extremes"]["smallest"]["value"] > -curvature["extremes"]["smallest"]["error"]
    assert "Gauss–Newton" in capsys.readouterr().out
    exact = measure(folder, *flags)["extremes"]["largest"]
    near = measure(folder, *flags, "--operator", "differences")["extremes"]["largest"]
    assert abs(exact["value"] - near["value"]) <= exact["error"] + near["error"]


@pytest.mark.slow
def test_density_and_its_plot(run, capsys):
    folder, _ = run
    flags = ("--examples", "8", "--density", "--probes", "2", "--steps", "5")
    output = folder / "new" / "here.json"
    assert main(["spectrum", "--checkpoint", str(folder), *flags, "--output", str(output)]) == 0
    found = strict_json.loads(output.read_bytes())
    assert len(found["density"]["points"]) == len(found["density"]["density"]) == 512
    assert found["density"]["products"] == 10
    assert (folder / "new" / "here.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Trace" in printed
    assert "95 % interval over 2 probes" in printed
    assert f"plot: {folder / 'new' / 'here.png'}" in printed


def test_too_few_products_are_reported(run, capsys):
    folder, _ = run
    found = measure(folder, "--examples", "8", "--max-products", "3")
    assert found["extremes"]["products"] == 3
    assert not found["extremes"]["smallest"]["converged"]
    assert found["extremes"]["smallest"]["error"] > 0
    assert "a larger --max-products helps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "3"], "--step 3: .* has checkpoints of the steps 8, 16"),
        (["--examples", "65"], "--examples must be at most 64, the size of the training set; got"),
        (["--examples", "0"], "--examples must be at least 1, got 0"),
        (["--parameters", "0.weigth"], "unknown --parameters '0.weigth'; did you mean "),
        (["--chunk", "4"], 'chunk=4 conflicts with batchnorm="batch"'),
        (["--operator", "hesian"], "unknown --operator 'hesian'; did you mean hessian"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0, got -1"),
        (["--probes", "1"], "--probes must be at least 2, got 1"),
        (["--example", "3"], "unknown flag '--example'; did you mean --examples"),
        (["--entry", "a:b"], "give either --checkpoint or --entry, got both"),
        (["--data-dir", "none", "--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_unusable_flags_for_a_checkpoint(run, flags, message, capsys):
    folder, _ = run
    before = sorted(folder.iterdir())
    assert main(["spectrum", "--checkpoint", str(folder), "--examples", "8", *flags]) == 2
    error = capsys.readouterr().err
    assert re.match(f"neumann: {message}", error)
    assert error.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_unusable_folders(run, tmp_path, capsys):
    folder, _ = run
    assert main(["spectrum"]) == 2
    assert "give either --checkpoint or --entry, got neither" in capsys.readouterr().err
    assert main(["spectrum", "--checkpoint", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert main(["spectrum", "--checkpoint", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    Checkpoints(tmp_path / "checkpoints").save(3, {"model": {}, "optimizer": {}})
    assert main(["spectrum", "--checkpoint", str(tmp_path)]) == 2
    assert "is not the checkpoint of a run" in capsys.readouterr().err
    path = tmp_path / "checkpoints" / "checkpoint-000000000003.pt"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["spectrum", "--checkpoint", str(tmp_path), "--step", "3"]) == 2
    assert "checkpoint-000000000003.pt is damaged" in capsys.readouterr().err


def test_record_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*x\.json"):
        write_object(tmp_path / "file" / "x.json", {})


def test_progress_bar_in_a_terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=shown, force_terminal=True, width=120)
    )
    with progress.show_products(40, "ends") as observe:
        observe(7, -1.25, 3.5)
    assert "ends 7/40 products" in shown.getvalue()
    assert "λ from -1.25 to 3.5" in shown.getvalue()


def test_default_file_of_the_record(tmp_path):
    assert SpectrumConfig(entry="a:b").file.as_posix() == "spectrum.json"
    assert SpectrumConfig(checkpoint=tmp_path).file == tmp_path / "spectrum.json"


# ---------------------------------------------------------------------- a user's own model

OWN = """
import torch
from torch import nn
from neumann.spectrum import Objective

torch.manual_seed(0)
MODEL = nn.Linear(3, 2)
X, Y = torch.randn(20, 3), torch.randn(20, 2)
BATCHES = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]

def batch():
    return MODEL, nn.functional.mse_loss, (X, Y)

def loader():
    return MODEL, nn.functional.mse_loss, iter(BATCHES)

def objective():
    whole = Objective(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
                      lambda output, batch: output)
    return [MODEL, whole, {"x": X, "y": Y}]

def number():
    return 3

def pair():
    return MODEL, (X, Y)

def wrong_order():
    return nn.functional.mse_loss, MODEL, (X, Y)

def raises():
    return {}["missing"]

def not_finite():
    return MODEL, lambda out, target: (out * float("inf")).square().mean(), (X, Y)

def not_scalar():
    return MODEL, lambda out, target: out, (X, Y)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module that no other test has imported."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def measure_entry(entry, *flags):
    assert main(["spectrum", "--entry", entry, *flags]) == 0
    with open("spectrum.json") as file:
        return json.load(file)


def test_batch_loader_and_objective_give_the_same_matrix(own, capsys):
    found = [measure_entry(f"{own}:{name}") for name in ("batch", "loader", "objective")]
    torch.manual_seed(0)
    torch.nn.Linear(3, 2)
    x = torch.randn(20, 3).double()
    x = torch.cat([x, torch.ones(20, 1).double()], 1)
    expected = torch.linalg.eigvalsh(x.T @ x / 20)  # each twice: two outputs, mean over both
    for record in found:
        ends = record["extremes"]
        assert ends["smallest"]["value"] == pytest.approx(float(expected[0]), rel=1e-4)
        assert ends["largest"]["value"] == pytest.approx(float(expected[-1]), rel=1e-4)
        assert record["about"]["examples"] == 20
        assert record["coefficients"]["values"]["lowest"] > 0
    assert "of 8 parameters" in capsys.readouterr().out
    assert measure_entry(f"{own}:loader", "--examples", "9")["about"]["examples"] == 16


@pytest.mark.parametrize(
    ("entry", "flags", "message"),
    [
        ("{}:bacth", [], "unknown function of {} 'bacth'; did you mean batch"),
        ("{}x:batch", [], "unknown module of --entry '{}x'; did you mean {}"),
        ("{}", [], "--entry must be MODULE:FUNCTION, got '{}'"),
        ("broken:x", [], "--entry broken:x: ModuleNotFoundError: No module named 'no_such_pac"),
        ("{}:number", [], "--entry {}:number must return (model, loss, batch or loader), got int"),
        ("{}:pair", [], "--entry {}:pair must return (model, loss, batch or loader), got tuple of"),
        ("{}:wrong_order", [], "--entry {}:wrong_order must return (model, loss, batch or loader)"),
        ("{}:raises", [], "--entry {}:raises: KeyError: 'missing' ({}.py:"),
        ("{}:not_finite", [], "the loss is not finite"),
        ("{}:not_scalar", [], "loss must return a scalar"),
        ("{}:batch", ["--examples", "3"], "--examples works only with a loader"),
        ("{}:batch", ["--step", "3"], "--step is for --checkpoint, not for --entry"),
        ("{}:batch", ["--parameters", "wieght"], "unknown --parameters 'wieght'; did you mean w"),
    ],
)
def test_unusable_entries_are_one_line(own, entry, flags, message, capsys, tmp_path):
    assert main(["spectrum", "--entry", entry.format(own), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"neumann: {message.replace('{}', own)}")
    assert error.count("\n") == 1
    assert not (tmp_path / "spectrum.json").exists()


def test_help_states_the_contract_of_an_entry(capsys):
    assert main(["spectrum", "--help"]) == 0
    printed = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "returns (model, loss, data)" in printed


def shard(config, folder):
    process = Process(distributed.get_rank(), distributed.get_world_size())
    Training(config, process).run(folder)


def test_sharded_run_is_measured_in_one_process(two, tmp_path):
    """Its checkpoint is complete, with the optimizer's state keyed by name."""
    config = dataclasses.replace(CONFIG, fsdp=True, spectrum_every=0, epochs=1)
    two.run(shard, config, tmp_path / "run")
    found = measure(tmp_path / "run", "--examples", "8", "--max-products", "20")
    trained = measure(
        tmp_path / "run", "--examples", "8", "--max-products", "20", "--weights", "training"
    )
    assert found["extremes"]["largest"]["value"] > 0
    assert trained["source"]["weights"] == "training"
