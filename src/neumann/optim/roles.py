"""What each parameter of a model is for: a hidden matrix, an embedding, the output, or a vector.

The type of the module that owns a parameter decides first, its name second, and patterns given by
the user override both. A weight that several modules share appears once; if one of them is an
embedding, it is an embedding. A parameter that fits no role is an error.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView

HIDDEN, EMBEDDING, OUTPUT, VECTOR = "hidden", "embedding", "output", "vector"
ROLES = (HIDDEN, EMBEDDING, OUTPUT, VECTOR)
FROZEN = "frozen"  # no role: left out, and listed

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}  # matrices that a recurrent layer fuses into one

# Names that decide where no module type does.
_EMBEDDING_NAMES = re.compile(r"embed|pos(ition)?_|token|table|relative|latent|quer(y|ies)$|prompt")
_VECTOR_NAMES = re.compile(r"bias|gamma|beta$|scale|norm")
_MATRIX_NAMES = re.compile(r"weight|proj|kernel|^w[0-9qkvo]?$|expert|lora|router|gate")

# Fused projections, by the name of their layer: how many there are.
_FUSED_QKV = {"qkv", "Wqkv", "to_qkv", "in_proj_qkv", "qkv_proj", "c_attn"}
_FUSED_TWO = {"gate_up_proj", "kv", "to_kv", "kv_proj"}


@dataclass(frozen=True)
class Assignment:
    """A parameter with its role, and where its matrices are."""

    name: str
    parameter: Tensor
    role: str
    view: MatrixView = WHOLE


@dataclass(frozen=True)
class _Owner:
    """A module that has a parameter of its own, and the name of the parameter in it."""

    path: str  # of the module, without what wrappers add
    module: nn.Module
    attribute: str
    parent: nn.Module | None

    @property
    def layer(self) -> str:
        """The last part of the module's name."""
        return self.path.rpartition(".")[2]


def find_roles(
    model: nn.Module, overrides: Mapping[str, str] | None = None, *, split_heads: bool = False
) -> list[Assignment]:
    """The role of every parameter, in the order of the model.

    Args:
        model: any module, also after FSDP2, DDP or torch.compile.
        overrides: roles by pattern, as in `{"*.router.weight": "vector"}`; "frozen" leaves a
            parameter out.
        split_heads: split fused attention projections into heads, too.

    Raises:
        ValueError: a parameter has no role, is on the meta device or is quantized; a pattern
            matches nothing, contradicts another or names an unknown role.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    owners = _find_owners(model)
    chosen = _match_patterns(overrides or {}, [name for name, _, _ in owners])
    outputs = _find_outputs(model)
    found = []
    for name, parameter, places in owners:
        role = chosen.get(name)
        if role != FROZEN:
            _refuse_untrainable(name, parameter)
        if role == FROZEN or not parameter.requires_grad:
            found.append(Assignment(name, parameter, FROZEN))
            continue
        if role is None:
            role = _choose_role(name, parameter, places, outputs)
        view = WHOLE
        if role == HIDDEN:
            view = _find_view(parameter, places[0], split_heads)
        if role == HIDDEN and parameter.ndim < 2:
            raise ValueError(f"{name} cannot be hidden: it has shape {tuple(parameter.shape)}")
        found.append(Assignment(name, parameter, role, view))
    return found


# ------------------------------------------------------------------ owners


def _find_owners(model: nn.Module) -> list[tuple[str, Tensor, list[_Owner]]]:
    """Every parameter with its first name and the modules that have it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, str] = {}
    parameters: dict[int, Tensor] = {}
    owners: dict[int, list[_Owner]] = {}
    for path, module in modules.items():
        for attribute, parameter in module.named_parameters(recurse=False):
            clean = clean_name(path)
            owner = _Owner(clean, module, attribute, modules.get(path.rpartition(".")[0]))
            # A parametrized weight: torch keeps it in a list below the layer that it belongs to.
            base, parametrized, weight = path.partition(".parametrizations.")
            if parametrized and base in modules:
                parent = modules.get(base.rpartition(".")[0])
                owner = _Owner(clean_name(base), modules[base], weight, parent)
            key = id(parameter)
            names.setdefault(key, f"{clean}.{attribute}" if clean else attribute)
            parameters.setdefault(key, parameter)
            owners.setdefault(key, []).append(owner)
    return [(names[key], parameters[key], owners[key]) for key in names]


def clean_name(path: str) -> str:
    """A name without the parts that DDP and torch.compile add."""
    parts = [part for part in path.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _match_patterns(overrides: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """The role that patterns give to each name they match."""
    chosen: dict[str, tuple[str, str]] = {}
    for pattern, role in overrides.items():
        if role not in (*ROLES, FROZEN):
            known = ", ".join(map(repr, (*ROLES, FROZEN)))
            raise ValueError(f"roles[{pattern!r}] must be one of {known}, got {role!r}")
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise ValueError(f"the pattern {pattern!r} in roles matches no parameter of {shown}")
        for name in matched:
            before = chosen.setdefault(name, (pattern, role))
            if before[1] != role:
                raise ValueError(
                    f"two patterns in roles disagree about {name}: {before[0]!r} says "
                    f"{before[1]!r}, {pattern!r} says {role!r}"
                )
    return {name: role for name, (_, role) in chosen.items()}


def _refuse_untrainable(name: str, parameter: Tensor) -> None:
    """Raise for a parameter that cannot be trained as it is."""
    if parameter.is_meta or isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"{name} has no data yet (meta or lazy): materialize the model first, for example "
            "with model.to_empty(device=…) and its initialization, or one forward pass"
        )
    if parameter.is_quantized or not (parameter.is_floating_point() or parameter.is_complex()):
        raise ValueError(
            f"{name} is quantized ({parameter.dtype}) and cannot be trained: leave it out with "
            f'roles={{"{name}": "frozen"}}'
        )


# ------------------------------------------------------------------ roles


def _choose_role(
    name: str, parameter: Tensor, owners: list[_Owner], outputs: set[nn.Module]
) -> str:
    if sum(size > 1 for size in parameter.shape) <= 1:
        return VECTOR
    if any(isinstance(owner.module, _EMBEDDINGS) for owner in owners):
        return EMBEDDING
    if any(owner.module in outputs and owner.attribute == "weight" for owner in owners):
        return OUTPUT
    owner = owners[0]
    if isinstance(owner.module, _NORMS) or "Norm" in type(owner.module).__name__:
        return VECTOR
    if _is_matrix_module(owner.module):
        return VECTOR if _VECTOR_NAMES.search(owner.attribute) else HIDDEN
    for role, names in (
        (VECTOR, re.compile(r"bias$|gamma|layer_scale")),
        (EMBEDDING, _EMBEDDING_NAMES),
        (HIDDEN, _MATRIX_NAMES),
        (VECTOR, _VECTOR_NAMES),
    ):
        if names.search(owner.attribute):
            return role
    raise ValueError(
        f"{name}, of shape {tuple(parameter.shape)} in a {type(owner.module).__name__}, fits no "
        f'role: name one, for example roles={{"{name}": "hidden"}}'
    )


def _is_matrix_module(module: nn.Module) -> bool:
    """Whether the weights of a module are matrices, by its type."""
    known = (
        nn.Linear,
        nn.Bilinear,
        *_CONVOLUTIONS,
        *_TRANSPOSED,
        nn.MultiheadAttention,
        nn.RNNBase,
        nn.RNNCellBase,
    )
    return isinstance(module, known) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """HF's Conv1D, a linear layer that stores in × out."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in type(module).__mro__
    )


def _find_outputs(model: nn.Module) -> set[nn.Module]:
    """The modules that compute the model's outputs.

    HF and timm models say so. Otherwise it is the last linear layer or convolution that is not in
    a list of layers, and every other layer of that name and size, such as an auxiliary classifier.
    """
    inner = unwrap(model)
    for method in ("get_output_embeddings", "get_classifier"):
        ask = getattr(inner, method, None)
        if not callable(ask):
            continue
        try:
            said = ask()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        modules = said if isinstance(said, tuple | list) else [said]
        layers = {m for part in modules if isinstance(part, nn.Module) for m in part.modules()}
        if layers or method == "get_classifier":
            return {m for m in layers if _has_outputs(m)}
    last: tuple[str, nn.Module] | None = None
    for path, module in _modules_outside_lists(inner):
        if _has_outputs(module) and "pooler" not in path:
            last = path, module
    if last is None:
        return set()
    name, size = last[0].rpartition(".")[2], getattr(last[1], "out_features", None)
    if name.isdigit() or size is None:
        return {last[1]}
    return {
        module
        for path, module in inner.named_modules()
        if path.rpartition(".")[2] == name and getattr(module, "out_features", None) == size
    }


def _has_outputs(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS))


def _modules_outside_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules below this one, without those in a ModuleList or ModuleDict."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            continue
        yield below, child
        yield from _modules_outside_lists(child, below)


# ------------------------------------------------------------------ matrices


def _find_view(parameter: Tensor, owner: _Owner, split_heads: bool) -> MatrixView:
    """Where the matrices of a hidden parameter are."""
    module = owner.module
    if isinstance(module, nn.MultiheadAttention) and owner.attribute == "in_proj_weight":
        return MatrixView(parts=3, heads=module.num_heads if split_heads else 1)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return MatrixView(parts=_count_gates(module, owner.attribute))
    if isinstance(module, _CONVOLUTIONS):
        return _convolution_view(module.groups, parameter.shape[1], transposed=False)
    if isinstance(module, _TRANSPOSED):
        return _convolution_view(module.groups, parameter.shape[1], transposed=True)
    if isinstance(module, nn.Linear):
        return _fused_view(parameter.shape[0], parameter.shape[1], owner, split_heads, False)
    if _is_conv1d(module):
        return _fused_view(parameter.shape[1], parameter.shape[0], owner, split_heads, True)
    if parameter.ndim == 3:
        return _stacked_view(parameter, owner)
    return WHOLE


def _count_gates(module: Any, attribute: str) -> int:
    """How many matrices a weight of a recurrent layer holds; a projection is one."""
    if attribute.startswith("weight_hr"):
        return 1
    mode = getattr(module, "mode", type(module).__name__.removesuffix("Cell"))
    return _GATES.get(mode, 1)


def _convolution_view(groups: int, second: int, *, transposed: bool) -> MatrixView:
    if groups > 1 and second == 1 and not transposed:  # depthwise: a kernel for each channel
        return MatrixView(stacked=True)
    return MatrixView(groups=groups, transposed=transposed)


def _fused_view(
    outputs: int, inputs: int, owner: _Owner, split_heads: bool, transposed: bool
) -> MatrixView:
    """The view of a linear layer, which may hold several projections."""
    parts: int | tuple[int, ...] = 1
    heads = _read_count(owner.parent, "num_heads", "num_attention_heads")
    crossed = owner.layer == "c_attn" and outputs == 2 * inputs  # keys and values of an encoder
    if crossed or (owner.layer in _FUSED_TWO and outputs % 2 == 0):
        parts = 2
    elif owner.layer in _FUSED_QKV:
        of_keys = _read_count(owner.parent, "num_key_value_heads", "num_kv_heads")
        if heads and of_keys and heads != of_keys and outputs % (heads + 2 * of_keys) == 0:
            size = outputs // (heads + 2 * of_keys)
            parts = (heads * size, of_keys * size, of_keys * size)
        elif outputs % 3 == 0:
            parts = 3
    attention = parts != 1 and owner.layer != "gate_up_proj"
    divisible = isinstance(parts, int) and heads and outputs % (parts * heads) == 0
    by_head = split_heads and attention and divisible
    return MatrixView(transposed=transposed, parts=parts, heads=heads if by_head and heads else 1)


def _stacked_view(parameter: Tensor, owner: _Owner) -> MatrixView:
    """Experts, out × in each. The projections of a gate are fused in the first of two weights."""
    down = getattr(owner.module, "down_proj", None)
    if owner.attribute == "gate_up_proj" and isinstance(down, Tensor) and down.ndim == 3:
        count, outputs, inputs = parameter.shape
        if tuple(down.shape) == (count, inputs, outputs // 2):
            return MatrixView(stacked=True, parts=2)
        if tuple(down.shape) == (count, inputs // 2, outputs):
            return MatrixView(stacked=True, transposed=True)
    return MatrixView(stacked=True)


def _read_count(module: nn.Module | None, *names: str) -> int | None:
    """A number of heads, from a module or its config."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
