"""Runs of the Triton kernel beside the oracle, on a GPU or through Triton's interpreter.

The interpreter takes milliseconds for every operation on a block, so programs are few: blocks and
tensors are as small as the question allows.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from neumann.optim.backends.base import Scalars
from neumann.optim.backends.cuda import TritonBackend
from neumann.optim.options import StepOptions
from neumann.optim.phases import Timetable
from tests.oracle import Oracle
from tests.support.oracle_runs import Run, initial, relative_error


def _speed_up_the_interpreter() -> None:
    """Avoid work in Triton's interpreter that does not change any result here.

    One change mends it: NumPy 2.4 refuses how it turns a scalar into the end of a loop.

    It patches its language again for every helper that a kernel calls, although the launch of the
    kernel has done so. (What this leaves patched is done once and never undone.) It builds a table
    of dtypes for every operation. It builds the type and the shape of a block again for every
    result. And it repeats integer arithmetic to look for overflow.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(core.block_type, "with_element_ty"):
        return  # a Triton before 3.3, whose interpreter no test uses

    from neumann.optim.backends.cuda import update_kernel

    patched = {id(update_kernel.__dict__)}
    found: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    def dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = dtype_of
    blocks: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    replace_element = core.block_type.with_element_ty

    def with_element_ty(self: Any, scalar: Any) -> Any:
        key = (*self.shape, str(scalar))
        if key not in blocks:
            blocks[key] = replace_element(self, scalar)
        return blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = core.constexpr(math.prod(sizes)), shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor
    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = lambda self, builder: self  # which the interpreter builds anew
    core.tensor.__init__ = init_tensor
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if not torch.cuda.is_available():
    _speed_up_the_interpreter()

STRONG = {"cubic": 0.05, "repulsive": 0.05}  # forces of the size of the gradient


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def scalar(value: float = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device())


@dataclasses.dataclass
class Group:
    """What the backend reads of a `Tensors`, in a form that tests can change."""

    weights: list[Tensor]
    gradients: list[Tensor | None]
    iterates: list[Tensor]
    offsets: list[Tensor] | None
    options: dict[str, Any]
    momentum: Tensor


def group_of(
    weights: list[Tensor],
    gradients: list[Tensor | None],
    *,
    iterates: list[Tensor] | None = None,
    offsets: list[Tensor] | str | None = "zero",
    last_momentum: Tensor | None = None,
    **changes: Any,
) -> Group:
    """A group with m = δ = 0 and plain options."""
    options: dict[str, Any] = {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "decoupled_weight_decay": False,
        "maximize": False,
    }
    zeros = [torch.zeros_like(w) for w in weights]
    return Group(
        weights,
        gradients,
        zeros if iterates is None else iterates,
        [torch.zeros_like(w) for w in weights] if offsets == "zero" else offsets,
        {**options, **changes},
        scalar() if last_momentum is None else last_momentum,
    )


def make_backend(**options: Any) -> TritonBackend:
    """The backend with small programs, rounding to nearest unless told otherwise."""
    return TritonBackend(device(), **{"block": 32, "rounding": "nearest", **options})


@torch.no_grad()
def take_step(
    backend: TritonBackend,
    groups: list[Group],
    options: StepOptions,
    clock: Tensor,
    squared: Tensor,
    **scaling: Tensor,
) -> None:
    backend.prepare(groups, options, Scalars(clock, squared, squared, **scaling))()


def shared_of(timetable: Timetable = Timetable(0, 0, 2.0), **changes: Any) -> StepOptions:  # noqa: B008
    options = {"cubic": 0.05, "repulsive": 0.05, "average": 0.99, "bounded": True}
    return StepOptions(timetable, **{**options, **changes})


class Stepping:
    """A Run of `runs`, stepped by the kernel."""

    def __init__(
        self,
        run: Run,
        dtype: torch.dtype = torch.float64,
        *,
        lr: Callable[[float], float | Tensor] = float,
        **backend: Any,
    ) -> None:
        options = {"lr": 0.1, "cubic": 1e-7, "repulsive": 1e-5, "average": 0.99, **run.options}
        forces = bool(options["cubic"] or options["repulsive"])
        self.run, self.lr = run, lr
        self.backend = make_backend(**backend)
        self.clock, self.squared = scalar(dtype=torch.int64), scalar()
        self.groups = []
        for g, given in enumerate(run.groups):
            merged = {**options, **given}
            weights = [
                torch.tensor(initial(g, i, size)).to(device(), dtype)
                for i, size in enumerate(given["sizes"])
            ]
            names = ("lr", "momentum", "weight_decay", "decoupled_weight_decay", "maximize")
            own = {name: merged[name] for name in names if name in merged}
            group = group_of(weights, [], **own)
            if not forces:
                group.offsets = None
            self.groups.append(group)
        self.rates = [group.options["lr"] for group in self.groups]
        tensors = sum(len(group.weights) for group in self.groups)
        self.shared = StepOptions(
            Timetable(run.warmup, run.interval, options.get("reset_growth", 2.0)),
            options["cubic"],
            options["repulsive"] * tensors,
            options["average"],
            options.get("bounded", True),
        )

    def gradients(self, step: int, scale: float = 1.0) -> list[list[Tensor | None]]:
        """What the run says, at the weights as they are."""
        found: list[list[Tensor | None]] = []
        for g, group in enumerate(self.groups):
            found.append([])
            for i, w in enumerate(group.weights):
                gradient = self.run.gradient(step, g, i, w.double().cpu().numpy())
                if gradient is not None:
                    gradient = torch.tensor(scale * gradient).to(w)
                found[-1].append(gradient)
        return found

    def advance(self, step: int, scale: float = 1.0, **scaling: Tensor) -> None:
        for group, rate, gradients in zip(
            self.groups, self.rates, self.gradients(step, scale), strict=True
        ):
            group.options["lr"] = self.lr(rate * self.run.schedule(step))
            group.gradients = gradients
        self.step(**scaling)

    def step(self, **scaling: Tensor) -> None:
        take_step(self.backend, self.groups, self.shared, self.clock, self.squared, **scaling)

    def finish(self) -> "Stepping":
        for step in range(self.run.steps):
            self.advance(step)
        return self

    def tensors(self, *, finish: bool = True) -> list[Tensor]:
        """Copies of everything a step writes."""
        if finish:
            self.backend.finish_distance(self.squared)
        found = [self.clock, self.squared]
        for group in self.groups:
            found += [*group.weights, *group.iterates, *(group.offsets or []), group.momentum]
        return [tensor.clone() for tensor in found]

    def deviation(self, oracle: Oracle) -> float:
        """The largest relative error of w, w − μm and v in any tensor."""
        errors = []
        for group, exact in zip(self.groups, oracle.groups, strict=True):
            mu = float(group.momentum)
            assert abs(mu - float(exact.mu)) < 1e-15
            for i, w in enumerate(group.weights):
                w = w.double().cpu()
                m = group.iterates[i].double().cpu()
                errors.append(relative_error(w, exact.weights[i]))
                errors.append(
                    relative_error(w - mu * m, exact.weights[i] - exact.mu * exact.iterate[i])
                )
                if group.offsets is not None:
                    v = w - group.offsets[i].double().cpu()
                    errors.append(relative_error(v, exact.average[i]))
        return max(errors)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
