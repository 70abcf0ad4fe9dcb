"""Two versions of the library measured in one sitting."""

from pathlib import Path

import pytest
import torch

from benchmarks.step.versions import LEAST_ROUNDS, compare_versions, format_ratios

SOURCE = Path(__file__).parents[2] / "src"


def compare(before):
    return compare_versions(
        ["e"], torch.device("cpu"), before, 0.1, steps=2, only="foreach", pairs=1
    )


@pytest.mark.slow
def test_a_version_compared_with_itself():
    ((row,),) = compare(SOURCE)
    assert row["rounds"] >= LEAST_ROUNDS
    low, middle, high = row["wall_ratio"]
    assert 0 < low <= middle <= high
    assert row["name"] == "Neumann foreach"
    assert row["gpu_ratio"] is None
    assert f"{middle:.3f} [{low:.3f}, {high:.3f}]" in format_ratios([row])


def test_a_folder_without_the_library_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no package neumann"):
        list(compare(tmp_path))
