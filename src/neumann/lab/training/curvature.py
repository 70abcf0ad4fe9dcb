"""The curvature of the training loss during a run, as lines of kind "spectrum".

The extreme eigenvalues of the Hessian are measured at the training weights, in float32 with
BatchNorm over the batch and without weight decay, on two batches: the `probe`, the same for
every seed and optimizer, and `current`, the start of the last step. The run has the same
weights as one without measurements. Where a product is not finite, the line says so under "failed".
A model that cannot be differentiated twice, or too little memory, is a UsageError.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, Plan
from neumann.lab.data.plan import derive_seed
from neumann.lab.errors import UsageError, shorten
from neumann.lab.models import classification_loss
from neumann.lab.training.random_state import get_rng_state, set_rng_state
from neumann.optim import Neumann
from neumann.spectrum import About, Extremes, Hessian, NonFiniteProduct, coefficients, extremes
from neumann.spectrum.operators.model_state import without_tf32

MAX_EXAMPLES = 512  # per measurement, unless --spectrum-batch says otherwise
TOLERANCE = 1e-3

Batch = tuple[Tensor, Tensor]


class Curvature:
    """Measures the curvature of a run's training loss."""

    def __init__(
        self, config: TrainConfig, dataset: Dataset, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._config, self._dataset = config, dataset
        self._model, self._optimizer = model, optimizer
        self._examples = config.spectrum_batch or min(config.batch_size, MAX_EXAMPLES)
        self._probe: Batch | None = None
        limit = f"{len(dataset.train)}, the size of the training set"
        if config.spectrum_every and self._examples > len(dataset.train):
            raise UsageError(f"--spectrum-batch must be at most {limit}; got {self._examples}")

    def is_due(self, step: int, last: int) -> bool:
        every = self._config.spectrum_every
        return every > 0 and (step % every == 0 or step == last)

    def measure(self, batch: Batch) -> dict[str, Any]:
        """Measure on the probe and on the start of `batch`; return the fields of a line."""
        if self._probe is None:
            self._probe = load_probe_batch(self._dataset, self._examples)
        inputs, labels = batch
        current = inputs[: self._examples], labels[: self._examples]
        with without_tf32(inputs.device):
            probe, about = self._measure_extremes(self._probe)
            return {
                "momentum": current_momentum(self._optimizer),
                "probe": probe,
                "current": self._measure_extremes(current)[0],
                "about": about,
            }

    def _measure_extremes(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the extreme eigenvalues on a batch, and a description of the matrix."""
        loss = partial(classification_loss, smoothing=self._config.smoothing)
        try:
            operator = Hessian(self._model, loss, batch=batch, batchnorm="batch")
            products = self._config.spectrum_products
            found = extremes(operator, tolerance=TOLERANCE, max_products=products)
        except NonFiniteProduct as error:
            failed = {"examples": len(batch[1]), "failed": shorten(error)}
            return failed, about_as_dict(operator.about)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "--spectrum-every: out of device memory; lower --spectrum-batch or "
                f"--spectrum-products: {shorten(error, 120)}"
            ) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(f"--spectrum-every: {shorten(error, 400)}") from error
        return extremes_as_dict(found), about_as_dict(found.about)


def extremes_as_dict(found: Extremes) -> dict[str, Any]:
    """Return eigenvalues, their errors, and the μ and η that they imply (None if there are none).

    The values named "outside" use bounds that enclose the whole spectrum, so that B̂ has no negative
    eigenvalue.
    """
    ends: dict[str, Any] = {}
    for name, end in (("smallest", found.smallest), ("largest", found.largest)):
        ends |= {name: end.value, f"{name}_error": end.error, f"{name}_converged": end.converged}
    return {
        "examples": found.about.examples,
        **ends,
        "products": found.products,
        "noise": found.noise,
        **_imply_momentum_and_lr("", found.smallest.value, found.largest.value),
        **_imply_momentum_and_lr("_outside", *found.outside),
    }


def about_as_dict(found: About) -> dict[str, Any]:
    """Describe what was measured in plain values, without the names of the parameters."""
    return {
        "matrix": found.matrix,
        "parameters": found.parameters,
        "dtype": str(found.dtype).removeprefix("torch."),
        "device": found.device.type,
        "batchnorm": found.batchnorm,
        "randomness": found.randomness,
        "weight_decay": found.weight_decay,
    }


def _imply_momentum_and_lr(suffix: str, smallest: float, largest: float) -> dict[str, float | None]:
    momentum = lr = None
    with contextlib.suppress(ValueError):  # no positive curvature, or an unbounded end
        found = coefficients(smallest, largest)
        momentum, lr = found.momentum, found.lr
    return {f"implied_momentum{suffix}": momentum, f"implied_lr{suffix}": lr}


def load_probe_batch(dataset: Dataset, examples: int) -> Batch:
    """Load a fixed batch of training examples, the same for every seed, optimizer and process."""
    before = get_rng_state()
    try:
        # With the run's own seed this would be the first batch that it trains on.
        plan = Plan(examples, seed=derive_seed("spectrum"))
        (batch,) = next(iter(dataset.train.batches(plan)))
    finally:
        set_rng_state(before)
    return batch


def current_momentum(optimizer: Optimizer) -> float | None:
    """Return μ of Neumann's last step, or another optimizer's constant; None if it has none."""
    if isinstance(optimizer, Neumann):
        return optimizer.diagnostics().groups[0].momentum
    group = optimizer.param_groups[0]
    found = group.get("momentum", next(iter(group.get("betas") or ()), None))
    return None if found is None else float(found)
