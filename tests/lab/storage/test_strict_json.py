"""Values survive a round trip through the records: NaN, any script, any file name."""

import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import read_config, read_metrics
from neumann.lab.training.records import Records

TEXT = st.text().filter(lambda text: text not in strict_json.WORDS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.slow
@settings(deadline=None)
@given(VALUES)
def test_any_value_survives_a_round_trip_on_one_line(value):
    written = strict_json.dumps({"value": value})
    assert written.count(b"\n") == 1
    assert strict_json.loads(written) == {"value": value}


def test_nan_and_infinities(tmp_path):
    with Records(tmp_path).begin({}) as records:
        records.append(kind="step", step=1, losses=[math.nan, math.inf, -math.inf, 1e-320])
        records.append(kind="step", step=2, loss=np.float32("nan"), count=np.int64(3), ok=np.True_)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["losses"][0])
    assert first["losses"][1:] == [math.inf, -math.inf, 1e-320]
    assert math.isnan(second["loss"])
    assert (second["count"], second["ok"]) == (3, True)


def test_names_in_any_script_and_names_that_are_not_valid_text(tmp_path):
    config = {
        "data": "text:Gödel·数学\u2028.txt",
        "file": os.fsdecode(b"\xff.txt"),
        "path": tmp_path,
    }
    folder = tmp_path / "läufe" / "数"
    with Records(folder).begin(config) as records:
        records.append(kind="step", step=1, text="naïve\u2028\x85\n🎲")
    assert read_config(folder) == {**config, "path": str(tmp_path)}
    assert read_metrics(folder)[0]["text"] == "naïve\u2028\x85\n🎲"
    Records(folder).begin(config)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"loss": torch.ones(())}, TypeError, r"\['loss'\] is a torch.Tensor; records hold"),
        ({"x": {"y": [1, {2}]}}, TypeError, r"\['x'\]\['y'\]\[1\] is a builtins.set"),
        ({"x": {1: 2}}, TypeError, r"has the key 1; keys must be strings"),
        ({"x": "NaN"}, ValueError, r"\['x'\] is the string 'NaN', which stands for a number"),
        ({"step": 1.5}, TypeError, r"step must be an int, .*; got 1.5"),
    ],
)
def test_values_that_records_cannot_hold(fields, error, message, tmp_path):
    records = Records(tmp_path).begin({})
    with pytest.raises(error, match=message):
        records.append(kind="step", **fields)
    assert read_metrics(tmp_path) == []
