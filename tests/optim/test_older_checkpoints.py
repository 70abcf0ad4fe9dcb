"""Checkpoints written by version 0.1.0 load, and training continues as it did there."""

import io
import lzma
from pathlib import Path

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Momentum, Spectral

FILE = Path(__file__).parents[1] / "data" / "optimizer_0.1.0.pt.xz"
OPTIONS = {
    "paper": {},
    "bf16": {"state_dtype": torch.bfloat16},
    "diagonal": {"precondition": "diagonal"},
    "spectral": {"precondition": "spectral"},
    "own": {"precondition": Spectral(scale=0.5, before=Momentum(0.8))},
    "eval": {},  # saved in evaluation mode
}
# Few steps: the spectral form amplifies the rounding of another machine about twofold per step.
SAVED_AT, END = 13, 19


@pytest.mark.parametrize("name", OPTIONS)
def test_training_continues(name):
    """The kind of machine that wrote the file gives the same bits, others the same to 1e-5."""
    saved = torch.load(io.BytesIO(lzma.decompress(FILE.read_bytes())), weights_only=True)[name]
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    clock = {"warmup_steps": 3, "reset_steps": 4}
    options = {"weight_decay": 0.01, **clock, **OPTIONS[name]}
    optimizer = Neumann(model.named_parameters(), 0.05, **options)
    model.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    optimizer.train()
    for step in range(SAVED_AT, END):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    # bfloat16 state is rounded with noise that depends on the kernel, so it may differ more.
    tolerance = 2e-2 if name == "bf16" else 1e-5
    for found, expected in zip(model.parameters(), saved["end"], strict=True):
        torch.testing.assert_close(found, nn.Parameter(expected), rtol=tolerance, atol=tolerance)
