"""Matrices divided among processes: a small run in every layout, with what it costs counted."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from neumann import Neumann
from neumann.optim.preconditioners import Spectral, journey, ownership
from neumann.optim.preconditioners import orthogonalization as arithmetic
from neumann.optim.preconditioners.matrix_view import MatrixView
from tests.support.small_training import OPTIONS

STEPS = 6
# Several of one shape, one transposed, a convolution, and rows that two or four processes cannot
# divide evenly: of "short" some have none.
SHAPES = {
    "a": (6, 8),
    "b": (6, 8),
    "c": (6, 8),
    "tall": (8, 6),
    "ragged": (7, 3),
    "short": (2, 9),
    "filters": (4, 3, 2, 2),
    "vector": (5,),
}
MATRICES = len(SHAPES) - 1
LAYOUTS = ["flat", "columns", "hybrid", "both", "ddp"]
PLACEMENTS = {
    "flat": (Shard(0),),
    "columns": (Shard(1),),
    "hybrid": (Replicate(), Shard(0)),
    "both": (Shard(0), Shard(1)),
}


def value(name, step):
    generator = torch.Generator().manual_seed(1000 * list(SHAPES).index(name) + step)
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


def stepped(optimizer, parameters, place, steps=range(STEPS), absent=()):
    """Gradients that pull to 0, with noise; in step 2 `absent` have none."""
    for step in steps:
        for name, p in parameters.items():
            gradient = 0.3 * p.detach() + place(name, value(name, step + 1))
            p.grad = None if name in absent and step == 2 else gradient
        optimizer.step()


def groups_of(parameters):
    """One group with a P of its own, as a fused projection has, and the rest."""
    view = Spectral(view=MatrixView(parts=2))
    rest = [(name, p) for name, p in parameters.items() if name != "a"]
    return [{"params": rest}, {"params": [("a", parameters["a"])], "precondition": view}]


def make_optimizer(parameters, names=SHAPES, **options):
    chosen = {name: parameters[name] for name in names}
    groups = groups_of(chosen) if "a" in chosen else list(chosen.items())
    return Neumann(groups, **{"precondition": "spectral", **OPTIONS, **options})


def alone(names=SHAPES, absent=(), device="cpu", **options):
    parameters = {name: nn.Parameter(value(name, 0).to(device)) for name in names}
    optimizer = make_optimizer(parameters, names, **options)
    stepped(optimizer, parameters, lambda name, noise: noise.to(device), absent=absent)
    return {name: p.detach().cpu() for name, p in parameters.items()}


class Layout:
    """Parameters laid out over all processes, and the options that go with them."""

    def __init__(self, kind, names=SHAPES, device="cpu"):
        self.kind, self.device, self.options = kind, device, {}
        if kind == "ddp":
            self.options = {"process_group": distributed.group.WORLD, "distributed": "owner"}
        else:
            processes = distributed.get_world_size()
            sizes = (processes,) if len(PLACEMENTS[kind]) == 1 else (2, processes // 2)
            self.mesh, self._host_mesh = (init_device_mesh(d, sizes) for d in (device, "cpu"))
        self.parameters = {n: nn.Parameter(self.place(n, value(n, 0))) for n in names}

    def place(self, name, tensor):
        tensor = tensor.to(self.device)
        if self.kind == "ddp":
            return tensor
        placements = PLACEMENTS[self.kind]
        if tensor.ndim == 1:
            placements = [p if p.is_replicate() else Shard(0) for p in placements]
        return distribute_tensor(tensor, self.mesh, placements)

    def whole(self):
        return {name: self._gather(p.detach()) for name, p in self.parameters.items()}

    def _gather(self, p):
        """On the host: gloo crashes if it gathers a DTensor on a GPU (pytorch#152645)."""
        if not isinstance(p, DTensor):
            return p.cpu()
        local, layout = p.to_local().cpu(), {"shape": p.shape, "stride": p.stride()}
        return DTensor.from_local(local, self._host_mesh, p.placements, **layout).full_tensor()


@contextmanager
def counted():
    """Counts matrices that are orthogonalized here, and bytes that leave this process."""
    counts = {"matrices": 0, "bytes": 0, "collectives": 0}
    original = arithmetic.iterate

    def iterate(x):
        counts["matrices"] += len(x)
        return original(x)

    def all_to_all_single(output, given, arriving, leaving, group, async_op):
        me = distributed.get_rank(group)
        others = sum(count for rank, count in enumerate(leaving) if rank != me)
        counts["bytes"] += others * given.element_size()
        counts["collectives"] += 1
        return distributed.all_to_all_single(
            output, given, arriving, leaving, group=group, async_op=async_op
        )

    def broadcast(tensor, source, group, async_op):
        if source == distributed.get_rank():
            copies = distributed.get_world_size(group) - 1
            counts["bytes"] += copies * tensor.numel() * tensor.element_size()
        counts["collectives"] += 1
        return distributed.broadcast(tensor, source, group=group, async_op=async_op)

    watched = mock.Mock(wraps=distributed, ReduceOp=distributed.ReduceOp)
    watched.all_to_all_single, watched.broadcast = all_to_all_single, broadcast
    with (
        mock.patch.object(arithmetic, "iterate", iterate),
        mock.patch.object(journey, "distributed", watched),
    ):
        yield counts


def spread(kind, names=SHAPES, round_bytes=0, absent=(), device="cpu", **options):
    """The run of `alone` over all processes; small rounds, so that there are several."""
    layout = Layout(kind, names, device)
    with mock.patch.object(ownership, "ROUND_BYTES", round_bytes), counted() as counts:
        optimizer = make_optimizer(layout.parameters, names, **{**layout.options, **options})
        stepped(optimizer, layout.parameters, layout.place, absent=absent)
    parts = [] if optimizer._exchange is None else optimizer._exchange.parts
    plans = [part.plan for part in parts]
    return layout.whole(), counts, plans


def largest_difference(ours, expected):
    return max(float((ours[name] - expected[name]).abs().max()) for name in expected)
