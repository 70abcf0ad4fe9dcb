"""Payloads whose values all follow from the step, so that a mixture of two is detected."""

import torch


def payload(step, size=1000):
    return {"step": step, "x": torch.full((size,), float(step))}


def consistent(loaded):
    step = loaded.step
    return loaded.payload["step"] == step and bool((loaded.payload["x"] == step).all())


def names(folder):
    return sorted(path.name for path in folder.iterdir())
