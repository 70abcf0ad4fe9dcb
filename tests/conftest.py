"""Triton decides when it is imported whether it interprets; without a GPU it has to."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
