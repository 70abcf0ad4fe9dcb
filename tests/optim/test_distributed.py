"""More than one process: a gradient that overflows on one rank is skipped on all."""

import subprocess
import sys

import torch

WORKER = """
import sys, torch
import torch.distributed as dist
from neumann import Neumann

rank, file, foreach = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "foreach"
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
p = torch.nn.Parameter(torch.ones(3))
optimizer = Neumann(
    [p], lr=0.1, warmup_steps=2, reset_steps=3, skip_nonfinite=True, foreach=foreach or None
)
for step in range(8):
    p.grad = torch.full((3,), float("nan") if (rank == 1 and step in (1, 4)) else 0.5)
    optimizer.step()
torch.save((p.detach(), optimizer.diagnostics().as_dict()), f"{file}.{rank}")
dist.destroy_process_group()
"""


def test_an_overflow_on_one_rank_is_skipped_on_all(tmp_path):
    for form in ("foreach", "chosen"):
        file = tmp_path / form
        processes = [
            subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(file), form])
            for rank in range(2)
        ]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        results = [torch.load(f"{file}.{rank}", weights_only=True) for rank in range(2)]
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]
        assert (results[0][1]["step"], results[0][1]["skipped"]) == (6, 2)
