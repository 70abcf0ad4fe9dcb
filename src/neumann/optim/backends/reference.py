"""The readable update, one tensor at a time: slow, but autograd can record it."""

from collections.abc import Callable

from neumann.optim.backends.host import HostBackend
from neumann.optim.phases import Coefficients
from neumann.optim.precision import prepare_update
from neumann.optim.tensors import Tensors
from neumann.optim.update import update_single


class ReferenceBackend(HostBackend):
    """`update_single` on any device."""

    name = "reference"

    def prepare_update(
        self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int
    ) -> Callable[[], float]:
        return prepare_update(tensors, coefficients, update_single, seed)
