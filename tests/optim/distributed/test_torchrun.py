"""The README's example of several processes, which leave no thread of their group behind."""

import re
from pathlib import Path

import pytest

from tests.support.programs import run_ranks
from tests.support.sharding import needs_fsdp

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun_digits.py"
CHECKED = Path(__file__).parents[2] / "support" / "check_threads_end.py"


def accuracy(output):
    return float(re.search(r"on 2 processes: ([\d.]+) % correct", output)[1])


@pytest.mark.parametrize("flags", [[], pytest.param(["--fsdp"], marks=needs_fsdp)])
def test_digits(flags):
    leader, other = run_ranks(2, str(CHECKED), str(EXAMPLE), "--epochs", "20", *flags)
    assert (leader.returncode, other.returncode) == (0, 0), leader.stderr + other.stderr
    assert accuracy(leader.stdout) > 94
