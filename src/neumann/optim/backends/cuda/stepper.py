"""The step on an NVIDIA GPU: one pass over the weights, for any number of tensors.

A step is two launches, and one more for each further combination of dtypes. One program works out
phase and coefficients from the clock and the last step's partial sums. Then the weights are updated
(:mod:`neumann.optim.update`), leaving new partial sums of δ². The host sends tables and never
waits: what changes from step to step is read from device memory, so a captured CUDA graph can be
replayed while clock, phase and a tensor learning rate advance. Sums are added in a fixed order: the
same input gives the same bits.

It can fail in three ways, each with an error: no Triton or no device (`unavailable`), a tensor of
another dtype or device, and a graph captured before a first step has built tables and kernels. In a
graph tensors are static: between replays no weight or state may move, nor a gradient of the
capture. A GPU needs compute capability 7.0. On CPU tensors it runs, slowly, if TRITON_INTERPRET=1
was set before Triton was imported.

On ROCm torch reports devices of type "cuda" too. The kernels have never run there, so the backend
says that it is unavailable and the optimizer falls back to lists.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from neumann.optim.backends.base import Scalars
from neumann.optim.backends.cuda import device_tables
from neumann.optim.backends.cuda.device_tables import Mirror
from neumann.optim.backends.cuda.layout import Launch, Layout
from neumann.optim.options import StepOptions
from neumann.optim.tensors import Tensors
from neumann.optim.triton_runtime import is_interpreted, launches_compiled

BLOCK = 1024  # weights per program: the fastest of 1,024 to 8,192 (benchmarks/step/tune_blocks.py)
SCALAR_WARPS = 16
ROUNDINGS = ("nearest", "stochastic")


class TritonBackend:
    """Steps whose clock and coefficients never leave the GPU. See `base.Backend`.

    Args:
        device: where all tensors are.
        block: weights per program; a power of 2.
        warps: warps of 32 threads per program; None gives each thread 64 bytes of each tensor.
        rounding: of bfloat16 state, "nearest" or "stochastic" (deterministic: a hash of clock,
            tensor and element). Weights round to nearest.
    """

    name: ClassVar[str] = "triton"
    device_type: ClassVar[str | None] = "cuda"
    on_device: ClassVar[bool] = True
    unscales: ClassVar[bool] = True

    def __init__(
        self,
        device: torch.device | str,
        *,
        block: int = BLOCK,
        warps: int | None = None,
        rounding: str = "stochastic",
    ) -> None:
        reason = self.unavailable(sums=1)
        if reason is not None:
            raise RuntimeError(reason)
        device = torch.device(device)
        wanted = "cpu" if _is_interpreted(_import_kernels()) else "cuda"
        if device.type != wanted:
            raise ValueError(f"device must be of type {wanted} here, got {device}")
        if block < 32 or block & (block - 1):
            raise ValueError(f"block must be a power of 2 of at least 32, got {block}")
        if warps is not None and warps > 1 and block < 256 * warps:
            # Warps without elements of their own would repeat those of other warps while these
            # are being written, and would add them to the sum.
            raise ValueError(f"warps={warps} needs a block of {256 * warps} or more, got {block}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
        if wanted == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.block = block
        self.warps = warps
        self.rounding = rounding
        self._layout: Layout | None = None
        self._constants: list[dict[str, Any]] = []
        self._captured: list[Layout] = []
        self._mirrors = {name: Mirror(device) for name in ("gradients", "settings", "resets")}

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        """Why Triton cannot be used here; None if it can."""
        if sums > 1:
            return (
                "the CUDA kernel keeps one sum of squares, and these parameters are sharded in "
                "different ways"
            )
        if torch.version.hip is not None:
            return (
                "the CUDA kernel has been tested on NVIDIA GPUs only, and this torch is built for "
                "ROCm"
            )
        try:
            kernels = _import_kernels()
        except ImportError as error:
            return f"Triton cannot be imported ({error}): install it with `pip install triton`"
        if _is_interpreted(kernels) or torch.cuda.is_available():
            return None
        return "torch finds no CUDA device"

    def forget(self) -> None:
        """Drop the tables and the pending sums: the next step takes the distance it is given.

        Graphs captured before keep what they use.
        """
        self._layout = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start without tables, so finish the distance first."""
        make = partial(TritonBackend, block=self.block, warps=self.warps, rounding=self.rounding)
        return make, (self.device,)

    def prepare(
        self, groups: Sequence[Tensors], options: StepOptions, scalars: Scalars
    ) -> Callable[[], None]:
        """Get one step of all groups ready: tables and kernels. Call it under torch.no_grad().

        The result takes the step. It brings r² up to the state before this step; Σδ² of this step
        stays pending until the next one or `finish_distance`.
        """
        clock, distance_squared = scalars.clock, scalars.distance_squared
        self._check_scalar("clock", clock, torch.int64)
        self._check_scalar("distance_squared", distance_squared, torch.float64)
        for group in groups:
            self._check_scalar("momentum", group.momentum, torch.float64)
        with self._on_device():
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            layout, addresses, copies = self._lay_out(groups, distance_squared, capturing)
            contents = {
                "gradients": device_tables.pack_addresses(addresses),
                "settings": device_tables.pack_options(groups, options, self.device),
                "resets": device_tables.pack_resets(options.timetable)[0],
            }
            tables = {
                name: self._mirrors[name].send(contents[name], capturing) for name in contents
            }
            arguments: tuple[Any, ...] = (
                clock,
                distance_squared,
                layout.pending,
                layout.partials,
                layout.sums,
                scalars.found_inf,
                scalars.grad_scale,
                tables["settings"],
                tables["settings"].view(torch.float64),
                len(groups),
                tables["resets"],
                layout.coefficients,
            )
            constants = {"OFFSETS": layout.with_offsets, "num_warps": SCALAR_WARPS}
            launches = [
                self._prepare_launch(_import_scalars().scalars_kernel, -1, 1, arguments, constants),
                *self._prepare_update(layout, tables["gradients"], clock),
            ]
            layout.fill_stand_ins()
        written = [] if capturing else _list_written(groups, clock, distance_squared)

        def take_step() -> None:
            nonlocal copies
            with self._on_device():
                for launch in launches:
                    launch()
                layout.copy_stand_ins_back()
                copies = []  # not before the launches that read them
                if written:
                    increment_version(written)

        return take_step

    @torch.no_grad()
    def measure(self, groups: Sequence[Tensors], sums: Tensor) -> None:
        """See `Backend.measure`."""
        self._check_scalar("sums", sums, torch.float64)
        with self._on_device():
            layout, addresses, copies = self._lay_out(groups, sums, False)
            gradients = self._mirrors["gradients"].send(device_tables.pack_addresses(addresses))
            layout.fill_stand_ins()
            layout.set_idle_coefficients()
            clock = torch.zeros((), dtype=torch.int64, device=self.device)
            for launch in self._prepare_update(layout, gradients, clock):
                launch()
            del copies
            layout.pending.fill_(1)
        self.finish_distance(sums)

    def _prepare_update(
        self, layout: Layout, gradients: Tensor, clock: Tensor
    ) -> list[Callable[[], Any]]:
        """The launches of the update, with the coefficients that the layout holds."""
        launches = []
        for launch, constants in zip(layout.launches, self._constants, strict=True):
            arguments = (
                layout.programs,
                layout.records,
                gradients,
                layout.coefficients,
                clock,
                layout.partials,
                launch.base,
            )
            kernel = _import_kernels().update_kernel
            launches.append(
                self._prepare_launch(kernel, launch.base, launch.programs, arguments, constants)
            )
        return launches

    def _prepare_launch(
        self,
        kernel: Any,
        position: int,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> Callable[[], Any]:
        """A launch of a kernel, compiled now unless such arguments have been seen before.

        Triton would inspect every argument and constant again, which takes longer than all other
        Python of a step, so what it compiled is launched directly. `position` distinguishes the
        launches of a layout.
        """
        form = (position, *map(_form, arguments))
        known = self._compiled.get(form)
        if known is None:
            compiled = None
            if launches_compiled(kernel):
                compiled = kernel[(0,)](*arguments, **constants)  # without programs nothing runs
            if compiled is None:
                return partial(kernel[(programs,)], *arguments, **constants)
            names = kernel.arg_names[len(arguments) :]
            known = self._compiled[form] = (compiled, [constants[name] for name in names])
        compiled, values = known
        return partial(compiled[(programs, 1, 1)], *arguments, *values)

    def finish_distance(self, distance_squared: Tensor) -> None:
        """Add up what the last step left pending, with the bits that the next step would get."""
        self._check_scalar("distance_squared", distance_squared, torch.float64)
        layout = self._layout
        if layout is None or not layout.with_offsets:
            return
        if torch.compiler.is_compiling():  # a tracer sees tensors and launches no kernel
            total = torch.where(layout.pending != 0, layout.partials.sum(), distance_squared)
            distance_squared.view(1).copy_(total.view(1))  # see `traced._write`
            layout.pending.zero_()
            return
        with self._on_device():
            _import_scalars().finish_distance_kernel[(1,)](
                distance_squared,
                layout.pending,
                layout.partials,
                layout.sums,
                num_warps=SCALAR_WARPS,
            )
            if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                increment_version(distance_squared)

    def _lay_out(
        self, groups: Sequence[Tensors], distance_squared: Tensor, capturing: bool
    ) -> tuple[Layout, list[int], list[Tensor]]:
        """A layout for these groups, the addresses of their gradients, and copies among those."""
        gradients = [gradient for group in groups for gradient in group.gradients]
        layout = self._layout
        found = None
        if layout is not None and layout.fits(groups):
            found = layout.gradient_addresses(gradients)
        if layout is None or found is None:
            if capturing:
                raise RuntimeError(
                    "this step cannot be captured yet: take an ordinary step with the same "
                    "parameters before the capture, and do not move them afterwards"
                )
            self.finish_distance(distance_squared)  # the sums are those of the old layout
            pad = int(_import_scalars().REDUCE.value)
            self._layout = None  # an interrupt must not leave constants of another layout
            layout = Layout(groups, self.device, self.block, pad)
            self._constants = [self._constants_of(launch) for launch in layout.launches]
            self._compiled: dict[Any, tuple[Any, list[Any]]] = {}
            found = layout.gradient_addresses(gradients)
            assert found is not None  # the layout has their dtypes
            self._layout = layout
        if capturing:
            self._captured.append(layout)
        return layout, *found

    def _constants_of(self, launch: Launch) -> dict[str, Any]:
        language = _import_kernels().tl

        def in_triton(dtype: torch.dtype | None) -> Any:
            return None if dtype is None else getattr(language, str(dtype).removeprefix("torch."))

        dtypes = launch.dtypes
        warps = self.warps or min(max(self.block * dtypes.arithmetic.itemsize // 2048, 1), 16)
        return {
            "WEIGHT_TYPE": in_triton(dtypes.weight),
            "GRADIENT_TYPE": in_triton(dtypes.gradient),
            "ITERATE_TYPE": in_triton(dtypes.iterate),
            "OFFSET_TYPE": in_triton(dtypes.offset),
            "ARITHMETIC": in_triton(dtypes.arithmetic),
            "BLOCK": self.block,
            "VECTOR": dtypes.vector,
            "STOCHASTIC": self.rounding == "stochastic"
            and torch.bfloat16 in (dtypes.iterate, dtypes.offset),
            "num_warps": warps,
        }

    def _check_scalar(self, name: str, scalar: Tensor, dtype: torch.dtype) -> None:
        if scalar.device != self.device or scalar.dtype != dtype or scalar.numel() != 1:
            raise ValueError(
                f"{name} must be one {dtype} value on {self.device}, got {scalar.numel()} of "
                f"{scalar.dtype} on {scalar.device}"
            )

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()


def _form(argument: Any) -> Any:
    """What Triton specializes on: dtype and alignment of a tensor, width of a number."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument is None or argument.bit_length() < 32


def _list_written(
    groups: Sequence[Tensors], clock: Tensor, distance_squared: Tensor
) -> list[Tensor]:
    """The tensors that a step changes unless it is skipped."""
    written = [clock, distance_squared]
    for group in groups:
        written.append(group.momentum)
        written += group.iterates
        moved = [gradient is not None for gradient in group.gradients]
        written += compress(group.weights, moved)
        written += compress(group.offsets or (), moved)
    return written


def _import_kernels() -> ModuleType:
    """Imported on first use: the package works without Triton."""
    from neumann.optim.backends.cuda import update_kernel

    return update_kernel


def _import_scalars() -> ModuleType:
    from neumann.optim.backends.cuda import scalars_kernel

    return scalars_kernel


def _is_interpreted(kernels: ModuleType) -> bool:
    return is_interpreted(kernels.update_kernel)
