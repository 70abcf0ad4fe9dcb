"""The layers that compute a model's outputs.

HF and timm models name theirs. Otherwise it is the last layer of the model, unless that is one of
the repeated layers: then the model has no output layer, as an encoder has none. Heads beside the
last layer, auxiliary classifiers and layers with the name of an output are outputs, too. In a list
of whole networks, each has its own.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from neumann.optim.roles.branches import find_beside, find_narrow_end, find_networks
from neumann.optim.roles.places import (
    Place,
    find_places,
    is_layer,
    is_matrix_module,
    read_size,
    unwrap,
)

_OUTPUT_NAMES = re.compile(
    r"(?<!pre_)classifier|logits|unembed|(^|(?<!conv)_)head(_|$)|^(actor|critic)$"
    r"|^(cls|class|bbox|kps)_|_pred$|^(text|visual)_projection$|^qa_outputs$|^seq_relationship$"
)
# Layers that may come last, or be named like an output, but are not outputs.
_NO_OUTPUTS = re.compile(r"pooler|multi_modal_projector|embeddings\.|embed_tokens")
# How HF and timm models are asked for their output layer.
_QUESTIONS = ("get_output_embeddings", "get_classifier")
Shapes = list[tuple[str, torch.Size | None]]  # of parameters, by name; None: not known yet


def find_outputs(places: Sequence[Place]) -> set[nn.Module]:
    """The linear layers and convolutions among these places that compute outputs."""
    places = _drop_frozen_copies(places)
    layers = [place for place in places if is_matrix_module(place.module)]
    layers = [place for place in layers if not _NO_OUTPUTS.search(place.path)]
    auxiliary: dict[str, list[Place]] = {}
    main: list[Place] = []
    for place in layers:
        branch = re.match(r"(.*\.)?aux[^.]*", place.path, re.IGNORECASE)
        (auxiliary.setdefault(branch[0], []) if branch else main).append(place)
    answer = _ask(_find_core(places))
    networks = find_networks(main[-1], main, places) if main and answer is None else []
    if networks:
        outputs = {layer for each in networks for layer in find_outputs(list(find_places(each)))}
    else:
        outputs = _find_last(main, places) if answer is None else answer
    for branch_layers in auxiliary.values():
        outputs |= _find_last(branch_layers, places)
    for place in places:
        named = _OUTPUT_NAMES.search(place.layer) and not _NO_OUTPUTS.search(place.path)
        if named and not place.lists:
            if is_layer(place.module):
                outputs.add(place.module)
            elif re.search("classifier|^(actor|critic)$", place.layer):
                inside = [p for p in layers if p.path.startswith(f"{place.path}.")]
                outputs |= _find_last(inside, places)
    return outputs


def follows_layer_norm(place: Place, places: Sequence[Place], outputs: set[nn.Module]) -> bool:
    """Whether the last module with a function of its own before this one is a layer norm.

    Outputs beside it do not count: several heads take the same inputs.
    """
    for other in reversed(places[: places.index(place)]):
        if re.search("LayerNorm|RMSNorm", type(other.module).__name__, re.IGNORECASE):
            return True
        if other.module in outputs and other.parent is place.parent:
            continue
        is_leaf = not any(True for _ in other.module.children())
        if is_leaf and any(True for _ in other.module.parameters()):
            return False
    return False


def _drop_frozen_copies(places: Sequence[Place]) -> list[Place]:
    """The places without frozen copies of a network, such as a teacher, and all in them.

    A copy is a child of the model, or of one of its children, whose parameters are all frozen and
    have the names and shapes of a trained child's. A single layer is not taken for a copy, nor is
    a module in a list, because it runs after the one that it resembles.
    """
    frozen: dict[str, Shapes] = {}
    trained: list[Shapes] = []
    for place in places[1:]:
        in_a_row = isinstance(place.parent, nn.Sequential | nn.ModuleList)
        if place.path.count(".") > 1 or in_a_row or is_matrix_module(place.module):
            continue
        shapes: Shapes = [
            (name, None if isinstance(p, UninitializedParameter) else p.shape)
            for name, p in place.module.named_parameters()
        ]
        if any(p.requires_grad for p in place.module.parameters()):
            trained.append(shapes)
        else:
            frozen[place.path] = shapes
    copies = [path for path, shapes in frozen.items() if shapes and shapes in trained]
    return [
        place
        for place in places
        if not any(place.path == path or place.path.startswith(f"{path}.") for path in copies)
    ]


def _find_core(places: Sequence[Place]) -> nn.Module:
    """The model, or what a wrapper around it holds: the one child with all its layers."""
    module = places[0].module
    layers = {place.module for place in places if is_matrix_module(place.module)}
    while not any(callable(getattr(module, method, None)) for method in _QUESTIONS):
        children = [unwrap(child) for child in module.children()]
        inner = [child for child in children if layers <= set(child.modules())]
        if len(inner) != 1 or not layers:
            break
        module = inner[0]
    return module


def _ask(model: nn.Module) -> set[nn.Module] | None:
    """What an HF or timm model says; None if it does not say."""
    for method in _QUESTIONS:
        ask = getattr(model, method, None)
        if not callable(ask):
            continue
        try:
            answer = ask()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        modules = answer if isinstance(answer, tuple | list) else [answer]
        modules = [part for part in modules if isinstance(part, nn.Module)]
        if modules or method == "get_classifier":
            return {layer for part in modules for layer in _find_ends(part)}
    return None


def _find_ends(module: nn.Module) -> list[nn.Module]:
    """The layers of a classifier: one or several heads, or the last one of an MLP."""
    layers = [m for m in module.modules() if is_layer(m)]
    sizes = [read_size(layer) or (0, 0) for layer in layers]
    taken = [one[1] == after[0] != after[1] for one, after in pairwise(sizes)]
    return [layer for layer, inner in zip(layers, [*taken, False], strict=False) if not inner]


def _find_last(layers: Sequence[Place], places: Sequence[Place], depth: int = 0) -> set[nn.Module]:
    """The last of these layers, with those beside it if it is one of several heads.

    `depth` is the number of lists that hold all of them.
    """
    if not layers or not is_layer(layers[-1].module):
        return set()
    place = layers[-1]
    last, parent = place.module, place.parent
    if place.lists - depth > isinstance(parent, nn.ModuleList):  # part of a block in a list
        return _find_last(find_narrow_end(place, layers, places, depth), places, depth + 1)
    if not isinstance(parent, nn.ModuleList | nn.ModuleDict):
        heads = find_beside(place, layers, places, depth)
        return {last}.union(*(_find_last(head.layers, places, depth) for head in heads))
    children = map(unwrap, parent.children())
    beside = {child: size for child in children if (size := read_size(child))}
    inputs, outputs = beside[last]
    if inputs == outputs:  # like a hidden layer
        return set()
    if isinstance(parent, nn.ModuleDict):  # which may hold other layers as well
        beside = {child: size for child, size in beside.items() if size[0] == inputs}
    chained = all(one[1] == after[0] for one, after in pairwise(beside.values()))
    return {last} if chained else set(beside)
