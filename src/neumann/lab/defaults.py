"""Settings that a record lacks because they are younger than it.

A version that brings a new setting must go on with the folders of those before it. A setting that
was not written down had no other value than today's default, so it is no difference where it has
that default here as well.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from neumann.lab.config import TrainConfig
from neumann.lab.processes import expected_ranks


def completed(
    there: Mapping[str, Any], here: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any]:
    """What is written there, with the settings it lacks that are as usual here."""
    young = {
        key: value
        for key, value in here.items()
        if key not in there and key in usual and usual[key] == value
    }
    return {**there, **young}


def completed_run(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a run, in whose record everything automatic is resolved."""
    if here.keys() <= there.keys():
        return dict(there)
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    known = {key: value for key, value in here.items() if key in names and key in there}
    try:
        usual = TrainConfig(**known).resolve(expected_ranks()).as_dict()
    except (TypeError, ValueError, AttributeError):  # no settings of a training
        usual = {}
    return completed(there, here, usual)
