"""Data sets by name, and the batches they give.

`load.py` has the table of data sets: to add one, start there. A loader turns a `Request` into a
`Dataset`: one source of batches to train on and one to test on. A `Plan` says which batches.
"""

from neumann.lab.data.dataset import Dataset, Source
from neumann.lab.data.load import load
from neumann.lab.data.plan import Plan

__all__ = ["Dataset", "Plan", "Source", "load"]
