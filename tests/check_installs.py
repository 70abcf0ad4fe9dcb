"""Install the wheel and the source distribution into empty environments, and use them there.

    python -m tests.check_installs dist --torch .venv-torch

Each environment holds torch, the package alone or with one extra, and what pip installs for that.
Torch is gigabytes, so it is borrowed from an environment that holds nothing else. Extras that add
to the lab are installed on top of a copy of the environment with the extra `lab`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

TRAIN = """
import torch
import neumann

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer, schedule = neumann.large_batch(model, steps=3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()
    schedule.step()
with optimizer.evaluating():
    torch.save(model.state_dict(), "model.pt")
"""
TRAIN_FUSED = """
import torch
import neumann

p = torch.nn.Parameter(torch.ones(3))
optimizer = neumann.Neumann([p], 0.1, warmup_steps=1, reset_steps=0, fused=True)
p.grad = torch.ones(3)
optimizer.step()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from neumann.integrations.accelerate import large_batch

accelerator, model = Accelerator(cpu=True), torch.nn.Linear(8, 4)
model, optimizer, schedule = accelerator.prepare(model, *large_batch(accelerator, model, 1))
accelerator.backward(model(torch.randn(32, 8)).square().mean())
optimizer.step()
schedule.step()
"""
LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from neumann.integrations.lightning import EvaluationWeights, large_batch

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 4)

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return large_batch(self)

batches = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=32)
Trainer(max_epochs=1, accelerator="cpu", callbacks=[EvaluationWeights()]).fit(Module(), batches)
"""
TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from neumann.integrations.transformers import large_batch

model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 16
arguments = TrainingArguments("run", max_steps=2, use_cpu=True, report_to=[])
Trainer(model, arguments, train_dataset=rows, **large_batch(model, steps=2)).train()
"""
COMMAND = ("-m", "neumann")
RUN = (*COMMAND, "train", "--epochs", "1", "--output", "run")


class Use(NamedTuple):
    """What an extra is for: arguments of Python that use it."""

    words: tuple[tuple[str, ...], ...]
    adds_to_lab: bool = False


ALONE = "alone"
USES = {
    ALONE: Use((("-W", "error", "-c", TRAIN), (*COMMAND, "--help"))),
    "cpu": Use((("-c", TRAIN_FUSED),)),
    "lab": Use((RUN, (*COMMAND, "report", "run"), (*COMMAND, "demo", "--seeds", "1"))),
    "accelerate": Use((("-c", ACCELERATE),)),
    "lightning": Use((("-c", LIGHTNING),)),
    "transformers": Use((("-c", TRANSFORMERS),)),
    "schedulefree": Use(((*RUN, "--opt", "schedulefree"),), adds_to_lab=True),
    "tensorboard": Use(((*RUN, "--tensorboard"),), adds_to_lab=True),
    "timm": Use(((*RUN, "--opt", "muon"),), adds_to_lab=True),
    "pytorch-optimizer": Use(((*RUN, "--opt", "soap"),), adds_to_lab=True),
}


class Environment:
    """A virtual environment that also sees the packages of others."""

    def __init__(self, folder: Path, *borrowed: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.python = folder / "bin/python"
        (self.packages,) = folder.glob("lib/python3*/site-packages")
        (self.packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))

    def copy_packages(self, other: "Environment") -> None:
        """Take over what another environment holds; links instead of bytes."""
        shutil.rmtree(self.packages)
        shutil.copytree(other.packages, self.packages, copy_function=os.link)

    def install(self, package: str) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--constraint", "constraints.txt"]
        self.run(["-m", "pip", "install", *options, package], ROOT)

    def run(self, words: Sequence[str], folder: Path) -> None:
        """Run Python without anything of the repository or the user; SystemExit if it fails."""
        command = [str(self.python), "-I", *words]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if found.returncode:
            raise SystemExit(f"{' '.join(words)}\n{found.stdout}{found.stderr}")


def check_distribution(
    path: Path, torch: Path, folder: Path, extras: Sequence[str]
) -> Iterator[str]:
    """Install a distribution with each extra and use it; yields the extras that work."""
    lab: Environment | None = None
    for extra in (name for name in USES if name in extras):
        place, use = folder / extra, USES[extra]
        environment = Environment(place, torch)
        if use.adds_to_lab:
            assert lab is not None, f"{extra} needs lab before it"
            environment.copy_packages(lab)
        environment.install(str(path) if extra == ALONE else f"{path}[{extra}]")
        work = place / "work"
        work.mkdir()
        for words in use.words:
            environment.run(words, work)
        lab = environment if extra == "lab" else lab
        yield extra


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path, help="the folder of the wheel and the sdist")
    parser.add_argument("--torch", type=Path, required=True, help="an environment with torch alone")
    names = ", ".join(USES)
    parser.add_argument(
        "--extras",
        nargs="+",
        choices=USES,
        default=list(USES),
        metavar="EXTRA",
        help=f"some of {names}; all by default",
    )
    arguments = parser.parse_args()
    (torch,) = arguments.torch.resolve().glob("lib/python3*/site-packages")
    found = (arguments.dist.glob(kind) for kind in ("*.whl", "*.tar.gz"))
    distributions = [path for paths in found for path in paths]
    if len(distributions) != 2:
        parser.error(f"{arguments.dist} must hold one wheel and one sdist, has {distributions}")
    for path in distributions:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            for extra in check_distribution(path.resolve(), torch, Path(folder), arguments.extras):
                seconds, started = time.perf_counter() - started, time.perf_counter()
                print(f"{path.name}, {extra}: works ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
