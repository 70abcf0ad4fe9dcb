"""The role of every parameter of a model.

The type of the module that owns a parameter decides first, its name second, and patterns given by
the user override both. A weight that several modules share appears once; if one of them is an
embedding, it is an embedding. A parameter that fits no role is an error.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView
from neumann.optim.roles.outputs import find_outputs, follows_layer_norm
from neumann.optim.roles.places import Place, find_places, is_matrix_module
from neumann.optim.roles.views import find_view
from neumann.validation import describe, require

HIDDEN, EMBEDDING, OUTPUT, VECTOR = "hidden", "embedding", "output", "vector"
ROLES = (HIDDEN, EMBEDDING, OUTPUT, VECTOR)
FROZEN = "frozen"  # no role: left out, and listed

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
BATCH_NORMS = (_NormBase, nn.GroupNorm)  # after them, the size of a weight has no effect
_NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.RMSNorm)

# The weight of a layer: as it is, under weight_norm, and under spectral_norm or pruning.
_WEIGHTS = ("weight", "weight_v", "weight_orig")

# Names that decide where no module type does, in this order.
_NAMES = (
    (EMBEDDING, re.compile(r"table|relative")),  # of the biases of positions, say
    (VECTOR, re.compile(r"bias|gamma|beta$|alpha|scal(e|ing)|norm|freq|^A(_log)?$|^D$")),
    (EMBEDDING, re.compile(r"emb|(^|_)(pos|rel)(_|$)|position|token|latent|quer(y|ies)$")),
    (EMBEDDING, re.compile(r"prompt|code(book|vector)")),
    (HIDDEN, re.compile(r"weight|proj|kernel|^[wv][0-9qkvo]?$|expert|lora|router|gate")),
)


@dataclass(frozen=True)
class Assignment:
    """A parameter with its role, and where its matrices are."""

    name: str
    parameter: Tensor
    role: str
    view: MatrixView = WHOLE
    # an output layer right after a layer norm, or a vector of a batch or group norm
    normalized: bool = False
    tied: bool = False  # an embedding that is the weight of a layer too


@dataclass(frozen=True)
class _Owned:
    """A parameter with its first name, and every place that has it."""

    name: str
    parameter: Tensor
    places: list[tuple[Place, str]]  # with the name of the parameter in the module
    names: list[str]  # the first one and those of other modules that share it


def find_roles(
    model: nn.Module, overrides: Mapping[str, str] | None = None, *, split_heads: bool = False
) -> list[Assignment]:
    """The role of every parameter, in the order of the model.

    Names have no parts that DDP or torch.compile add.

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
    if not isinstance(overrides or {}, Mapping):
        raise TypeError(f"roles must be a dict {{pattern: role}}, got {describe(overrides)}")
    places = list(find_places(model))
    _refuse_packed(places)
    owned = _find_parameters(places)
    chosen = _match_patterns(overrides or {}, owned)
    outputs = find_outputs(places)
    found = []
    for own in owned:
        role = chosen.get(own.name)
        if role != FROZEN:
            _refuse_untrainable(own.name, own.parameter)
        if role == FROZEN or not own.parameter.requires_grad:
            found.append(Assignment(own.name, own.parameter, FROZEN))
            continue
        role = role or _choose_role(own, outputs)
        view = WHOLE
        if role in (HIDDEN, OUTPUT):
            if own.parameter.ndim < 2:
                raise ValueError(
                    f"{own.name}, of shape {tuple(own.parameter.shape)}, cannot be {role}: it is "
                    'not a matrix; give it the role "vector", or let the pattern match only weights'
                )
            view = find_view(own.parameter, *own.places[0], split_heads)
        place = own.places[0][0]
        normalized = (role == OUTPUT and follows_layer_norm(place, places, outputs)) or (
            role == VECTOR and isinstance(place.module, BATCH_NORMS)
        )
        kinds = {is_matrix_module(p.module) for p, _ in own.places}
        tied = role == EMBEDDING and kinds == {True, False}
        found.append(Assignment(own.name, own.parameter, role, view, normalized, tied))
    return found


def is_batch_normalized(model: nn.Module, assignments: Iterable[Assignment]) -> bool:
    """Whether a batch or group norm follows most of the hidden matrices.

    They are counted, not traced: a norm for every second matrix is enough. Norms that come before
    the first matrix normalize inputs, and do not count.
    """
    modules = [place.module for place in find_places(model)]
    inner = itertools.dropwhile(lambda module: not is_matrix_module(module), modules)
    norms = sum(isinstance(module, BATCH_NORMS) for module in inner)
    return norms > 0 and 2 * norms >= sum(each.role == HIDDEN for each in assignments)


def _find_parameters(places: list[Place]) -> list[_Owned]:
    """Every parameter once, in the order of the model."""
    by_path = {place.path: place for place in places}
    owned: dict[int, _Owned] = {}
    for place in places:
        for attribute, parameter in place.module._parameters.items():
            if parameter is None:
                continue
            name, owner = place.name_of(attribute), place
            own = owned.setdefault(id(parameter), _Owned(name, parameter, [], []))
            if isinstance(place.module, ParametrizationList):  # the weight of the layer above
                base = f".{place.path}".rpartition(".parametrizations.")[0].removeprefix(".")
                owner = by_path[base]
                attribute = attribute if attribute == "original0" else place.layer
            own.places.append((owner, attribute))
            own.names.append(name)
    return list(owned.values())


def _match_patterns(overrides: Mapping[str, str], owned: list[_Owned]) -> dict[str, str]:
    """The role that patterns give to each parameter they match, by its first name.

    A shared weight has all its names. A pattern may be a whole name: some contain brackets.
    """
    chosen: dict[str, tuple[str, str]] = {}
    for pattern, role in overrides.items():
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern in roles must be a string, got {pattern!r}")
        known = ", ".join(map(repr, (*ROLES, FROZEN)))
        good = isinstance(role, str) and role in (*ROLES, FROZEN)
        require(good, f"roles[{pattern!r}]", role, f"one of {known}")
        matched = [
            own.name
            for own in owned
            if any(name == pattern or fnmatchcase(name, pattern) for name in own.names)
        ]
        if not matched:
            shown = ", ".join(own.name for own in owned[:3]) + (", …" if len(owned) > 3 else "")
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
    kind = parameter.dtype
    narrow = kind.is_floating_point and kind.itemsize == 1  # float8
    if parameter.is_quantized or narrow or not (kind.is_floating_point or kind.is_complex):
        raise ValueError(
            f"{name} is quantized ({kind}) and cannot be trained: leave it out with "
            f'roles={{"{name}": "frozen"}}, or all of its dtype with roles={{n: "frozen" '
            f"for n, p in model.named_parameters() if p.dtype == {kind}}}"
        )


def _refuse_packed(places: list[Place]) -> None:
    """Raise for a layer whose weights torch has quantized and packed: it has no parameters."""
    for place in places:
        if hasattr(place.module, "_packed_params"):
            raise ValueError(
                f"{place.path or 'the model'} is quantized ({type(place.module).__name__}) and has "
                "no parameters to train: build the optimizer for the unquantized model"
            )


# ------------------------------------------------------------------ roles


def _choose_role(own: _Owned, outputs: set[nn.Module]) -> str:
    parameter = own.parameter
    if parameter.ndim > 1:
        modules = [place.module for place, name in own.places if name in _WEIGHTS]
        if any(map(_is_embedding, modules)):
            return EMBEDDING
        if any(module in outputs for module in modules):
            return OUTPUT
    if sum(size > 1 for size in parameter.shape) <= 1:
        return VECTOR
    place, attribute = own.places[0]
    module = place.module
    if isinstance(module, _NORMS):
        return VECTOR
    if is_matrix_module(module):
        return VECTOR if "bias" in attribute else HIDDEN
    if "Norm" in type(module).__name__:
        return VECTOR
    called = [attribute]
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        called += place.path.split(".")[-2:]
    for role, names in _NAMES:
        if any(map(names.search, called)):
            return role
    raise ValueError(
        f"{own.name}, of shape {tuple(parameter.shape)} in a {type(module).__name__}, fits no "
        f'role: name one, for example roles={{"{own.name}": "hidden"}}'
    )


def _is_embedding(module: nn.Module) -> bool:
    named = "Embedding" in type(module).__name__ and not is_matrix_module(module)
    return named or isinstance(module, _EMBEDDINGS)
