"""The README's example of several processes, started as the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sharding import needs_fsdp
from tests.support.timeouts import PROCESS_TIMEOUT

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun_digits.py"
CHECKED = Path(__file__).parents[2] / "support" / "check_threads_end.py"


def accuracy(*arguments):
    """What the example prints; it leaves no thread of its process group behind."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(CHECKED), str(EXAMPLE), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return float(re.search(r"on 2 processes: ([\d.]+) % correct", done.stdout)[1])


def test_digits_with_ddp():
    assert accuracy("--epochs", "20") > 94


@needs_fsdp
def test_digits_with_fsdp():
    assert accuracy("--epochs", "20", "--fsdp") > 94
