"""What goes into the records comes out: numbers that JSON does not have, any script, any name."""

import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neumann.lab import plain_json
from neumann.lab.records import Records, read_config, read_metrics

TEXT = st.text().filter(lambda text: text not in plain_json.WORDS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(VALUES)
def test_whatever_goes_in_comes_out_on_one_line(value):
    written = plain_json.dumps({"value": value})
    assert written.count(b"\n") == 1
    assert plain_json.loads(written) == {"value": value}


def test_numbers_that_json_does_not_have(tmp_path):
    with Records.create(tmp_path, {}) as records:
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


def test_names_in_any_script_and_names_that_are_no_text(tmp_path):
    config = {
        "data": "text:Gödel·数学\u2028.txt",
        "file": os.fsdecode(b"\xff.txt"),
        "path": tmp_path,
    }
    folder = tmp_path / "läufe" / "数"
    with Records.create(folder, config) as records:
        records.append(kind="step", step=1, text="naïve\u2028\x85\n🎲")
    assert read_config(folder) == {**config, "path": str(tmp_path)}
    assert read_metrics(folder)[0]["text"] == "naïve\u2028\x85\n🎲"
    assert Records.create(folder, config).continued


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
def test_what_records_cannot_hold(fields, error, message, tmp_path):
    records = Records.create(tmp_path, {})
    with pytest.raises(error, match=message):
        records.append(kind="step", **fields)
    assert read_metrics(tmp_path) == []
