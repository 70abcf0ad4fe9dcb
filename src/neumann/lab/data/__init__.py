"""Data sets: what they are called, where they lie, and the batches they give."""

from neumann.lab.data.load import FORMS, NAMES, load
from neumann.lab.data.plan import Plan
from neumann.lab.data.source import Dataset, Source

__all__ = ["FORMS", "NAMES", "Dataset", "Plan", "Source", "load"]
