"""The README's example of several processes, which leave no thread of their group behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_ranks
from tests.support.sharding import needs_fsdp
from tests.support.timeouts import PROCESS_TIMEOUT

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun_digits.py"
CHECKED = Path(__file__).parents[2] / "support" / "check_threads_end.py"


def accuracy(output):
    return float(re.search(r"on 2 processes: ([\d.]+) % correct", output)[1])


def test_digits_with_ddp():
    leader, other = run_ranks(2, str(CHECKED), str(EXAMPLE), "--epochs", "20")
    assert (leader.returncode, other.returncode) == (0, 0), leader.stderr + other.stderr
    assert accuracy(leader.stdout) > 94


@needs_fsdp
def test_digits_with_fsdp_and_torchrun():
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(CHECKED), str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--epochs", "20", "--fsdp"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 94
