"""Neumann's spectral form and the optimizers of its kind, as users of each would set them up.

Neumann takes all parameters, by role. In every peer the hidden matrices go to Muon or SOAP and all
other parameters (embeddings, output layer, biases, norms) to AdamW: the peer's own where it has
one, torch's fused one elsewhere. Fused AdamW for all parameters is there for scale.
"""

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import neumann
from benchmarks.step.timed_optimizer import free_memory
from neumann.capture_stream import find_capture_stream
from neumann.optim.preconditioners.captured import ORDINARY_STEPS
from neumann.optim.roles import HIDDEN, find_roles

LR = 1e-6  # the values of the weights should stay what they are
REFERENCE = "torch Muon"
SOAP_PERIOD = 2  # steps between two renewals of SOAP's bases: heavyball's default


@dataclass
class Stepping:
    """Optimizers that step together, and the gradients that they are given."""

    optimizers: list[torch.optim.Optimizer]
    gradients: list[tuple[Tensor, Tensor]]  # of each parameter
    graph_bytes: int = 0  # GPU memory that a CUDA graph keeps, beyond parameters and state
    counts_allocated: ClassVar[bool] = False  # whether some of it counts as allocated

    def give_gradients(self) -> None:
        """Before every step: a peer may drop them after its own."""
        for p, gradient in self.gradients:
            p.grad = gradient

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Peer:
    """An optimizer to compare."""

    name: str
    build: Callable[[nn.Module], Stepping]
    note: str  # who takes which parameters
    package: str | None = None  # that it needs, beyond torch
    on_cuda_only: bool = False
    period: int = 1  # steps after which its work repeats
    most_weights: float = math.inf  # of a network on which it is measured

    def takes(self, weights: int) -> bool:
        return weights <= self.most_weights


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices, and everything else."""
    found = find_roles(model)
    hidden = [a.parameter for a in found if a.role == HIDDEN]
    rest = [a.parameter for a in found if a.role != HIDDEN]
    return hidden, rest  # type: ignore[return-value]  # they are the model's parameters


def make_gradients(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Random gradients, kept with the parameters: all optimizers share them."""
    for p in parameters:
        if p.grad is None:
            p.grad = 1e-3 * torch.randn_like(p)
    return [(p, p.grad) for p in parameters if p.grad is not None]


def build_neumann(model: nn.Module, **options: Any) -> Stepping:
    gradients = make_gradients(list(model.parameters()))
    fused = True if gradients[0][0].is_cuda else None
    groups = neumann.param_groups(model)
    return Stepping([neumann.Neumann(groups, lr=LR, fused=fused, **options)], gradients)


def build_plain(model: nn.Module) -> Stepping:
    """Neumann with P = I and no forces: what is left of its step without P."""
    gradients = make_gradients(list(model.parameters()))
    fused = True if gradients[0][0].is_cuda else None
    plain: dict[str, Any] = {"warmup_steps": 0, "reset_steps": 0, "cubic": 0.0, "repulsive": 0.0}
    optimizer = neumann.Neumann([p for p, _ in gradients], lr=LR, fused=fused, **plain)
    return Stepping([optimizer], gradients)


class CapturedStepping(Stepping):
    """A step in a CUDA graph, replayed: what is left of it without the host.

    A graph has a memory pool of its own. Nobody else can use it between steps, and the allocator
    counts what is free in it as free, so `graph_bytes` is measured here.
    """

    def __init__(self, stepping: Stepping) -> None:
        super().__init__(stepping.optimizers, stepping.gradients)
        self.give_gradients()
        stream = find_capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # builds tables and compiles kernels
                super().step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        free_memory(torch.device("cuda"))  # what is reserved from here on belongs to the graph
        before = count_free_bytes()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            super().step()
        self.graph_bytes = count_free_bytes() - before

    def step(self) -> None:
        self._graph.replay()


class SelfCapturedStepping(Stepping):
    """A step in which the optimizer replays a graph of P that it has captured by itself.

    Its memory is all that this adds: copies of the gradients, directions, and what P works with.
    """

    counts_allocated = True

    def __init__(self, stepping: Stepping) -> None:
        super().__init__(stepping.optimizers, stepping.gradients)
        for _ in range(ORDINARY_STEPS - 1):
            self.give_gradients()
            self.step()
        before = self._count_reserved()
        for _ in range(2):  # makes copies of the gradients, and captures
            self.give_gradients()
            self.step()
        self.graph_bytes = self._count_reserved() - before

    def _count_reserved(self) -> int:
        torch.cuda.synchronize()
        free_memory(torch.device("cuda"))
        return torch.cuda.memory_reserved()


def allocate_workspaces(device: torch.device) -> None:
    """Have torch allocate what its products need on each stream, so that it is nobody's state."""
    if device.type != "cuda":
        return
    for stream in (torch.cuda.current_stream(), find_capture_stream(torch.cuda.current_device())):
        with torch.cuda.stream(stream):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = torch.ones(2, 16, 16, dtype=dtype, device=device)
                torch.bmm(x, x)
                torch.addmm(x[0], x[0], x[1])
    torch.cuda.synchronize()


def count_free_bytes() -> int:
    """GPU memory that the allocator holds and no tensor uses."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def capture(model: nn.Module, build: Callable[..., Stepping]) -> Stepping:
    return CapturedStepping(build(model, capturable=True))


def capture_itself(model: nn.Module) -> Stepping:
    return SelfCapturedStepping(build_neumann(model, capturable=True))


def build_torch_muon(model: nn.Module, *, capturable: bool = False) -> Stepping:
    """Takes matrices alone, so convolutions are seen as out × (in·kh·kw), in the same memory.

    Muon itself can be captured as it is: only AdamW has an option for it.
    """
    hidden, rest = split_parameters(model)
    gradients = make_gradients(hidden)
    flat = [nn.Parameter(p.detach().flatten(1)) for p in hidden]
    seen = [(q, g.flatten(1)) for q, (_, g) in zip(flat, gradients, strict=True)]
    muon: Any = torch.optim.Muon(flat, lr=LR)
    optimizers = [muon, adamw(rest, capturable=capturable)]
    return Stepping(optimizers, [*seen, *make_gradients(rest)])


def build_heavyball(model: nn.Module, name: str, **options: Any) -> Stepping:
    import heavyball

    hidden, rest = split_parameters(model)
    gradients = make_gradients([*hidden, *rest])
    optimizer = getattr(heavyball, name)(hidden, lr=LR, **options)
    return Stepping([optimizer, adamw(rest)], gradients)


def build_pytorch_optimizer(model: nn.Module, **options: Any) -> Stepping:
    import pytorch_optimizer

    hidden, rest = split_parameters(model)
    groups = [
        {"params": hidden, "lr": LR, "use_muon": True},
        {"params": rest, "lr": LR, "use_muon": False},
    ]
    optimizer = pytorch_optimizer.Muon(groups, **options)
    return Stepping([optimizer], make_gradients([*hidden, *rest]))


def build_adamw(model: nn.Module) -> Stepping:
    parameters = list(model.parameters())
    return Stepping([adamw(parameters)], make_gradients(parameters))


def adamw(parameters: list[nn.Parameter], *, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True, capturable=capturable)


ALL = "takes all parameters, by role"
FUSED = "AdamW fused of torch takes all but the hidden matrices"
OWN = "its own AdamW takes all but the hidden matrices"
MATRICES = f"{FUSED}; convolutions as matrices"
REPLAYED = "replayed as a CUDA graph"
PEERS = [
    Peer("Neumann spectral", build_neumann, ALL),
    Peer("Neumann spectral, bf16 state", partial(build_neumann, state_dtype=torch.bfloat16), ALL),
    Peer(
        "Neumann spectral, captured",
        partial(capture, build=build_neumann),
        f"{ALL}; capturable=True, {REPLAYED}",
        on_cuda_only=True,
    ),
    Peer(
        "Neumann spectral, capturable",
        capture_itself,
        f"{ALL}; capturable=True: the optimizer replays a CUDA graph of P",
        on_cuda_only=True,
        most_weights=5e8,  # all optimizers share the card's memory
    ),
    Peer(REFERENCE, build_torch_muon, MATRICES),
    Peer(
        f"{REFERENCE}, captured",
        partial(capture, build=build_torch_muon),
        f"{MATRICES}; {REPLAYED}, in which Muon's learning rate cannot change",
        on_cuda_only=True,
    ),
    Peer("heavyball Muon", partial(build_heavyball, name="Muon"), FUSED, "heavyball"),
    Peer(
        "heavyball SOAP",
        partial(build_heavyball, name="SOAP", precondition_frequency=SOAP_PERIOD),
        f"{FUSED}; times are means over {SOAP_PERIOD} steps, of which one renews the bases",
        "heavyball",
        period=SOAP_PERIOD,
    ),
    Peer("pytorch_optimizer Muon", build_pytorch_optimizer, OWN, "pytorch_optimizer"),
    Peer(
        "pytorch_optimizer Muon, Gram",
        partial(build_pytorch_optimizer, ns_method="gram_newton_schulz"),
        f'{OWN}; ns_method="gram_newton_schulz"',
        "pytorch_optimizer",
    ),
    Peer("torch AdamW, fused", build_adamw, "takes all parameters and orthogonalizes none"),
]


def find_peers(
    only: Sequence[str], device: torch.device | str = "cpu"
) -> tuple[list[Peer], dict[str, str]]:
    """The peers whose name contains one of these words, and why others are left out."""
    chosen = [p for p in PEERS if not only or any(word in p.name for word in only)]
    if torch.device(device).type != "cuda":
        chosen = [p for p in chosen if not p.on_cuda_only]
    missing: dict[str, str] = {}
    for peer in chosen:
        if peer.package is not None and importlib.util.find_spec(peer.package) is None:
            missing[peer.name] = f"{peer.package} is not installed"
        elif peer.name.startswith(REFERENCE) and not hasattr(torch.optim, "Muon"):
            missing[peer.name] = f"torch {torch.__version__} has no Muon"
    return [p for p in chosen if p.name not in missing], missing


def list_versions(peers: Sequence[Peer]) -> dict[str, str]:
    """The versions of the packages that these peers come from."""
    packages = {peer.package for peer in peers if peer.package is not None}
    return {name: importlib.metadata.version(name) for name in sorted(packages)}
