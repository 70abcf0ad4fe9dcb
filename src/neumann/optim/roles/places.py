"""The modules of a model, where they are, and of which kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)

# Where wrappers keep what they wrap: torch.compile, activation checkpointing.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True)
class Place:
    """A module of a model, and where it is."""

    path: str  # its name, without what wrappers add
    module: nn.Module
    parent: nn.Module | None = None
    lists: int = 0  # in how many lists of layers it is, one inside the other

    @property
    def layer(self) -> str:
        """The last part of the name."""
        return self.path.rpartition(".")[2]

    def name_of(self, attribute: str) -> str:
        """The name of something in this module."""
        return f"{self.path}.{attribute}" if self.path else attribute


def find_places(
    module: nn.Module, path: str = "", parent: nn.Module | None = None, lists: int = 0
) -> Iterator[Place]:
    """A module and all modules below it. One that is used twice appears twice."""
    module = unwrap(module)
    place = Place(path, module, parent, lists)
    yield place
    for name, child in module._modules.items():
        if child is not None:
            more = int(_is_repeated(child, module))
            yield from find_places(child, place.name_of(name), module, lists + more)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, torch.compile and activation checkpointing."""
    while True:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "the model belongs to FullyShardedDataParallel (FSDP1), whose flat shards do not "
                "say what they are parts of: use fully_shard (FSDP2)"
            )
        names = ["module"] if isinstance(module, _PARALLEL) else _WRAPPED
        inner = next((module._modules[name] for name in names if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def _is_repeated(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a module is one of several layers: in a list, or a block like another beside it."""
    if isinstance(parent, nn.ModuleList):
        return True
    kind = _find_class(child)
    if not isinstance(parent, nn.Sequential) or kind is nn.Sequential:
        return False
    is_block = any(True for _ in unwrap(child).children())
    return is_block and sum(_find_class(other) is kind for other in parent.children()) > 1


def _find_class(module: nn.Module) -> type:
    """The class of a module without wrappers. FSDP2 puts one of its own before that."""
    kind = type(unwrap(module))
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def is_matrix_module(module: nn.Module) -> bool:
    """Whether the weights of a module are matrices, by its type."""
    known = (nn.Bilinear, nn.MultiheadAttention, *RECURRENT)
    return is_layer(module) or isinstance(module, known)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """HF's Conv1D, a linear layer that stores in × out."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in type(module).__mro__
    )


def read_size(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer or a convolution; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return module.in_channels, module.out_channels
    if is_conv1d(module):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return None
