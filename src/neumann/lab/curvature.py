"""The curvature of the training loss along a training, as lines of kind "spectrum".

Every `--spectrum-every` steps, before the first and after the last, the ends of the spectrum of the
Hessian are measured twice at the weights as they are in training (for Neumann the displaced ones),
in float32 without autocast, with BatchNorm over the batch and without weight decay:

probe       always the same examples with the same augmentation, whatever seed and optimizer
current     the first examples of the first micro-batch of the step just taken (at step 0: of the
            first), in the leading process

Each has λ_min and λ_max with errors that hold (see neumann.spectrum.extremes), and the paper's μ
and η for them, beside the scheduled ones. A measurement changes nothing: modes, buffers, gradients
and random generators come back, so the weights of a run are those of one without it.

How it fails: at weights or data where a product is not finite, the line says so under "failed" and
the run goes on, to end as diverged if it has. A model that cannot be differentiated twice and a
device without the memory are UsageErrors, before the first step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, Plan
from neumann.lab.data.plan import key
from neumann.lab.errors import UsageError, shorten
from neumann.lab.generators import restore_rng, rng_state
from neumann.lab.models import classification_loss
from neumann.optim import Neumann
from neumann.spectrum import About, Extremes, Hessian, NonFiniteProduct, coefficients, extremes
from neumann.spectrum.precision import without_tf32

EXAMPLES = 512  # of a measurement, where a batch has more
TOLERANCE = 1e-3

Batch = tuple[Tensor, Tensor]


class Curvature:
    """What measures, and what it measures on."""

    def __init__(
        self, config: TrainConfig, dataset: Dataset, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._config, self._dataset = config, dataset
        self._model, self._optimizer = model, optimizer
        self._examples = config.spectrum_batch or min(config.batch_size, EXAMPLES)
        self._probe: Batch | None = None
        if config.spectrum_every and self._examples > len(dataset.train):
            raise UsageError(
                f"--spectrum-batch must be at most {len(dataset.train)}, the size of the training "
                f"set; got {self._examples}"
            )

    def due(self, step: int, last: int) -> bool:
        """Whether there is to be a line of this step."""
        every = self._config.spectrum_every
        return every > 0 and (step % every == 0 or step == last)

    def measured(self, piece: Batch) -> dict[str, Any]:
        """What a line says of both batches, and the optimizer's momentum."""
        if self._probe is None:
            self._probe = probe_batch(self._dataset, self._examples)
        inputs, labels = piece
        current = inputs[: self._examples], labels[: self._examples]
        with without_tf32(inputs.device):
            probe, about = self._ends(self._probe)
            return {
                "momentum": momentum_of(self._optimizer),
                "probe": probe,
                "current": self._ends(current)[0],
                "about": about,
            }

    def _ends(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ends on a batch, and what they are ends of."""
        smoothing = self._config.smoothing
        try:
            operator = Hessian(
                self._model,
                lambda outputs, labels: classification_loss(outputs, labels, smoothing),
                batch=batch,
                batchnorm="batch",
            )
            found = extremes(
                operator, tolerance=TOLERANCE, max_products=self._config.spectrum_products
            )
        except NonFiniteProduct as error:
            return {"examples": len(batch[1]), "failed": shorten(error)}, about_plain(
                operator.about
            )
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "--spectrum-every: the device has not the memory; a smaller --spectrum-batch or "
                f"fewer --spectrum-products need less: {shorten(error, 120)}"
            ) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(f"--spectrum-every: {shorten(error, 400)}") from error
        return ends(found), about_plain(found.about)


def ends(found: Extremes) -> dict[str, Any]:
    """As plain numbers, all in one level: eigenvalues, how sure they are, and μ and η for them.

    What is implied "outside" is for numbers between which the whole spectrum lies, so that B̂ has no
    negative eigenvalue. None where there is no such number.
    """
    return {
        "examples": found.about.examples,
        "smallest": found.smallest.value,
        "smallest_error": found.smallest.error,
        "smallest_converged": found.smallest.converged,
        "largest": found.largest.value,
        "largest_error": found.largest.error,
        "largest_converged": found.largest.converged,
        "products": found.products,
        "noise": found.noise,
        **_implied("", found.smallest.value, found.largest.value),
        **_implied("_outside", *found.outside),
    }


def about_plain(found: About) -> dict[str, Any]:
    """What was measured, as plain values, without the names of the parameters."""
    return {
        "matrix": found.matrix,
        "parameters": found.parameters,
        "dtype": str(found.dtype).removeprefix("torch."),
        "device": found.device.type,
        "batchnorm": found.batchnorm,
        "randomness": found.randomness,
        "weight_decay": found.weight_decay,
    }


def _implied(suffix: str, smallest: float, largest: float) -> dict[str, float | None]:
    try:
        found = coefficients(smallest, largest)
    except ValueError:  # no positive curvature, or an end that is not bounded
        return {f"implied_momentum{suffix}": None, f"implied_lr{suffix}": None}
    return {f"implied_momentum{suffix}": found.momentum, f"implied_lr{suffix}": found.lr}


def probe_batch(dataset: Dataset, examples: int) -> Batch:
    """A fixed batch of training examples: the same for every seed, optimizer and process."""
    before = rng_state()
    try:
        # A seed of its own: by the run's, it would be the first batch that is trained on.
        plan = Plan(examples, seed=key("spectrum"))
        (piece,) = next(iter(dataset.train.batches(plan)))
    finally:
        restore_rng(before)
    return piece


def momentum_of(optimizer: Optimizer) -> float | None:
    """μ of the last step of Neumann's; the constant of others; None where there is none."""
    if isinstance(optimizer, Neumann):
        return optimizer.diagnostics().groups[0].momentum
    group = optimizer.param_groups[0]
    found = group.get("momentum", next(iter(group.get("betas") or ()), None))
    return None if found is None else float(found)
