"""Parameter groups for any model: each parameter gets the P, decay and scale of its role.

    groups = param_groups(model)
    print(groups)  # a table: role, names, shapes, P, momentum before it, decay, scale
    optimizer = Neumann(groups, lr=0.01, weight_decay=0.1)

`neumann.optim.roles` finds the roles.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from torch import nn

from neumann.optim.preconditioners import (
    NAMED,
    Diagonal,
    Momentum,
    Preconditioner,
    SlowMomentum,
    Spectral,
)
from neumann.optim.preconditioners.matrix_view import WHOLE
from neumann.optim.roles import (
    EMBEDDING,
    FROZEN,
    HIDDEN,
    OUTPUT,
    ROLES,
    VECTOR,
    Assignment,
    find_roles,
    is_batch_normalized,
)
from neumann.validation import describe, is_count, is_number, require, require_positive


@dataclass(frozen=True)
class RoleOptions:
    """What the parameters of a role get."""

    precondition: Preconditioner | str  # P
    decay: bool  # whether weight decay applies to them
    scale: float = 1.0  # their learning rate, as a multiple of the optimizer's
    per_input: bool = False  # divide the scale by the number of a layer's inputs
    # the number of hidden matrices for which the scale is meant; a deeper network gets less
    depth: int | None = None
    # multiplies the scale of an output layer right after a layer norm, and of a vector that belongs
    # to a batch or group norm
    normalized: float = 1.0
    # takes the place of these options for an output layer over tokens, and for an embedding that
    # is the output layer too; None: they get these options
    vocabulary: "RoleOptions | None" = None

    def __post_init__(self) -> None:
        require_positive("scale", self.scale)
        require_positive("normalized", self.normalized)
        good = self.depth is None or (is_count(self.depth) and self.depth >= 1)
        require(good, "depth", self.depth, "None or an integer of at least 1")
        own = self.vocabulary
        good = own is None or (isinstance(own, RoleOptions) and own.vocabulary is None)
        require(good, "vocabulary", own, "None or a RoleOptions without a `vocabulary` of its own")
        for name in ("decay", "per_input"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "True or False")

    def scaled_by(self, factor: float) -> "RoleOptions":
        """The same options with a multiple of the learning rate."""
        own = None if self.vocabulary is None else self.vocabulary.scaled_by(factor)
        return replace(self, scale=self.scale * factor, vocabulary=own)

    def with_momentum(self, decay: float) -> "RoleOptions":
        """The same options with another momentum before P."""
        chosen: Any = self._find_preconditioner()
        own = None if self.vocabulary is None else self.vocabulary.with_momentum(decay)
        return replace(self, precondition=replace(chosen, before=Momentum(decay)), vocabulary=own)

    def make_preconditioner(self, inputs: int, normalized: bool = False) -> Preconditioner:
        """P with the scale built in, so that every scheduler may set one learning rate for all."""
        scale = self.scale / inputs if self.per_input else self.scale
        scale *= self.normalized if normalized else 1.0
        chosen = self._find_preconditioner()
        if scale == 1:
            return chosen
        if not is_dataclass(chosen) or not hasattr(chosen, "scale"):
            raise ValueError(f"{chosen!r} has no scale of its own: leave the role's scale at 1")
        scaled: Any = replace(chosen, scale=chosen.scale * scale)
        if isinstance(scaled, Spectral) and hasattr(scaled.vectors, "scale"):
            vectors: Any = scaled.vectors
            scaled = replace(scaled, vectors=replace(vectors, scale=vectors.scale * scale))
        preconditioner: Preconditioner = scaled
        return preconditioner

    def _find_preconditioner(self) -> Preconditioner:
        if not isinstance(self.precondition, str):
            return self.precondition
        known = ", ".join(map(repr, NAMED))
        good = self.precondition in NAMED
        require(good, "precondition", self.precondition, f"a Preconditioner or one of {known}")
        return NAMED[self.precondition]


# One learning rate for all roles, widths and depths; docs/tuning.md says where numbers come from.
DEPTH_POWER = 0.25
_FEWEST_TOKENS = 8  # an embedding with fewer rows, such as BERT's two types, has no tokens
MOMENTUM = 0.8  # before P
# The same where a batch or group norm follows most matrices, so that their size has no effect.
MOMENTUM_NORMALIZED = 0.6
_SPECTRAL = Spectral(scale=1.0, before=Momentum(MOMENTUM), scaling="norm")
_DIAGONAL = Diagonal(scale=1.0, before=Momentum(MOMENTUM))
DEFAULTS: Mapping[str, RoleOptions] = {
    # Outputs change by the same amount whatever the shape; by less in a deep network, where the
    # changes of many layers add up.
    HIDDEN: RoleOptions(_SPECTRAL, decay=True, depth=36),
    EMBEDDING: RoleOptions(
        _DIAGONAL,
        decay=False,
        scale=0.1,
        # Tied to the output layer: scores change by the same amount whatever the width.
        vocabulary=RoleOptions(_DIAGONAL, decay=False, scale=38.0, per_input=True),
    ),
    OUTPUT: RoleOptions(
        _SPECTRAL,
        decay=True,
        scale=12.0,
        normalized=0.25,  # after a layer norm, inputs are larger
        # Most rows rarely see their token, so each element has a step size of its own.
        vocabulary=RoleOptions(_DIAGONAL, decay=True, scale=45.0, per_input=True),
    ),
    # In a batch norm, the vectors alone decide how large activations are.
    VECTOR: RoleOptions(_DIAGONAL, decay=False, scale=0.05, normalized=3.0),
}


def default_options(
    model: nn.Module, roles: Mapping[str, str] | None = None
) -> dict[str, RoleOptions]:
    """The options of each role in a model, to change some of them.

    That is DEFAULTS, with less momentum in a network such as a ResNet. `roles` as for
    `param_groups`.
    """
    return _choose_options(model, find_roles(model, roles))


def _choose_options(model: nn.Module, assignments: Iterable[Assignment]) -> dict[str, RoleOptions]:
    if not is_batch_normalized(model, assignments):
        return dict(DEFAULTS)
    return {role: usual.with_momentum(MOMENTUM_NORMALIZED) for role, usual in DEFAULTS.items()}


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for `Neumann`; printed, they are a table."""

    def __init__(self, groups: Iterable[dict[str, Any]], frozen: list[Assignment]) -> None:
        super().__init__(groups)
        self.frozen = frozen  # parameters that need no gradient: in no group

    def __repr__(self) -> str:
        rows = [("role", "parameters", "shape", "P", "momentum", "decay", "scale")]
        for group in self:
            chosen = group["precondition"]
            view = str(getattr(chosen, "view", WHOLE))
            called = f"{chosen.name}, {view}" if view else chosen.name
            decay = group.get("weight_decay", "as given")
            scale = f"{chosen.scale:.3g}" if hasattr(chosen, "scale") else ""
            momentum = _describe_momentum(getattr(chosen, "before", None))
            for name, shape in _summarize(group["params"]):
                shown = "none" if decay == 0 else decay if isinstance(decay, str) else f"{decay:g}"
                rows.append((group["role"], name, shape, called, momentum, shown, scale))
        for name, shape in _summarize([(a.name, a.parameter) for a in self.frozen]):
            rows.append((FROZEN, name, shape, "", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = (map(str.ljust, row, widths) for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in cells)


def _describe_momentum(before: Preconditioner | None) -> str:
    if isinstance(before, SlowMomentum):
        return f"{before.decay:g} and {before.slow:.4g}"
    return f"{before.decay:g}" if isinstance(before, Momentum) else "none"


def param_groups(
    model: nn.Module,
    *,
    roles: Mapping[str, str] | None = None,
    options: Mapping[str, RoleOptions] | None = None,
    weight_decay: float | None = None,
    split_heads: bool = False,
) -> ParamGroups:
    """Groups for every parameter of a model that requires a gradient, by its role.

    Args:
        model: any module; after FSDP2 if that is used, since it replaces parameters, and before or
            after DDP and torch.compile.
        roles: {name pattern: role}, where roles should differ from those that are found:
            "hidden", "embedding", "output", "vector", or "frozen" to leave parameters out.
        options: `RoleOptions` by role, in place of those that `default_options` gives.
        weight_decay: of the roles that have weight decay; None takes the optimizer's.
        split_heads: orthogonalize fused attention projections head by head.

    Returns:
        The groups, which print as a table.

    Raises:
        ValueError: a parameter fits no role, the model has no matrix, or an argument is wrong.
        TypeError: `model` is not a module, or `roles` or `options` is not a dict.
    """
    if weight_decay is not None:
        good = is_number(weight_decay) and weight_decay >= 0
        require(good, "weight_decay", weight_decay, "None or a finite number of at least 0")
    require(isinstance(split_heads, bool), "split_heads", split_heads, "True or False")
    if not isinstance(options or {}, Mapping):
        raise TypeError(f"options must be a dict {{role: RoleOptions}}, got {describe(options)}")
    for role, given in (options or {}).items():
        require(role in ROLES, "a role in options", role, f"one of {', '.join(map(repr, ROLES))}")
        require(isinstance(given, RoleOptions), f"options[{role!r}]", given, "a RoleOptions")
    assignments = find_roles(model, roles, split_heads=split_heads)
    chosen = {**_choose_options(model, assignments), **(options or {})}
    trained = [a for a in assignments if a.role != FROZEN]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameters to train: unfreeze some")
    if all(a.role == VECTOR for a in trained):
        raise ValueError(
            f"{type(model).__name__} has no matrices to train: pass model.parameters() to Neumann, "
            'with precondition="diagonal" and a learning rate of about 0.0025'
        )
    rows = {len(a.parameter) for a in assignments if a.role == EMBEDDING}
    vocabularies = {count for count in rows if count >= _FEWEST_TOKENS}
    depth = _count_depth(trained)
    found: list[tuple[dict[str, Any], list[Any]]] = []
    for assignment in sorted(trained, key=lambda a: ROLES.index(a.role)):
        given = chosen[assignment.role]
        if given.vocabulary is not None and _is_over_tokens(assignment, vocabularies):
            given = given.vocabulary
        if given.depth is not None:
            given = given.scaled_by((given.depth / max(depth, 1)) ** DEPTH_POWER)
        inputs = _count_inputs(assignment) if given.per_input else 1
        made = given.make_preconditioner(inputs, assignment.normalized)
        if assignment.view != WHOLE and isinstance(made, Spectral):
            made = replace(made, view=assignment.view)
        options_of: dict[str, Any] = {"role": assignment.role, "precondition": made}
        if not given.decay:
            options_of["weight_decay"] = 0.0
        elif weight_decay is not None:
            options_of["weight_decay"] = float(weight_decay)
        # A search instead of a dict, because a P need not be hashable.
        params = next((params for known, params in found if known == options_of), None)
        if params is None:
            params = []
            found.append((options_of, params))
        params.append((assignment.name, assignment.parameter))
    groups = [{"params": params, **options_of} for options_of, params in found]
    return ParamGroups(groups, [a for a in assignments if a.role == FROZEN])


def _count_depth(trained: Iterable[Assignment]) -> int:
    """How many hidden matrices there are. Experts side by side count once, stacked or in a list."""
    hidden = (a for a in trained if a.role == HIDDEN)
    counts = {re.sub(r"(experts?)\.\d+\.", r"\1.*.", a.name): a.view.part_count for a in hidden}
    return sum(counts.values())


def _is_over_tokens(assignment: Assignment, vocabularies: set[int]) -> bool:
    """Whether its outputs are tokens: as many as an embedding has, or more than inputs."""
    if assignment.role == EMBEDDING or assignment.parameter.ndim < 2:
        return assignment.tied
    outputs, inputs = assignment.view.count_sides(assignment.parameter)
    return outputs > inputs or outputs in vocabularies


def _count_inputs(assignment: Assignment) -> int:
    if assignment.parameter.ndim < 2:
        raise ValueError(
            f"{assignment.name} is not a matrix and has no inputs: leave per_input at False for "
            f"its role, {assignment.role}"
        )
    return max(1, assignment.view.count_sides(assignment.parameter)[1])


def _summarize(named: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Names and shapes, one row for repeated layers: their numbers become a star."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, parameter in named:
        shape = " × ".join(map(str, parameter.shape)) or "scalar"
        found.setdefault(re.sub(r"\d+(?=\.)", "*", name), []).append((name, shape))
    rows = []
    for pattern, entries in found.items():
        shapes = list(dict.fromkeys(shape for _, shape in entries))
        shown = shapes[0] if len(shapes) == 1 else f"{shapes[0]} … {shapes[-1]}"
        rows.append((f"{pattern} ({len(entries)})" if len(entries) > 1 else entries[0][0], shown))
    return rows
