"""Parts of a model beside each other, judged by their numbers of inputs and outputs.

A part that takes what the one before it gives comes after it. Parts of one kind with the same
inputs that cannot follow one another run side by side, as several heads do, or the networks of an
ensemble. Numbers are weak evidence, so in doubt a part is not taken for one of several: a head that
is missed trains too slowly, a hidden layer that is taken for a head may break the training.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from neumann.optim.roles.places import RECURRENT, Place, is_layer, read_size

# Parts that weigh, project, modulate or skip inside a network, whatever comes after them.
_INNER = re.compile(
    r"att(n|ention)|gat(e|ing)|rout|query|key|qkv|kv|weigh|scor|align|energy|alpha|mask|pool|ctx"
    r"|skip|shortcut|residual|down|up|hidden|embed|enc|proj|cell|state|film|modul|theta"
    r"|^[a-z]2h$|^[qk]$",
    re.IGNORECASE,
)
# Heads with a single output; others with one output mostly weigh something.
_SCALAR = re.compile(r"val|^v\d?$|^q\d?$|critic|reward|done|baseline|std|sigma|var|mean|mu")


@dataclass(frozen=True)
class Branch:
    """A part of a model with layers in it."""

    place: Place
    layers: Sequence[Place]  # all that have matrices, in order

    @property
    def inputs(self) -> int | None:
        """Inputs of the first layer; None if unknown."""
        first = self.layers[0].module
        if isinstance(first, RECURRENT):
            return int(first.input_size)
        size = read_size(first)
        return None if size is None else size[0]

    @property
    def outputs(self) -> int | None:
        """Outputs of the last layer; None if unknown."""
        size = read_size(self.layers[-1].module)
        return None if size is None else size[1]

    @property
    def keeps_or_multiplies(self) -> bool:
        """Whether it keeps its width, or multiplies it, as what gates, splits or modulates does."""
        return not self.inputs or not self.outputs or self.outputs % self.inputs == 0

    @property
    def is_block(self) -> bool:
        """Whether its numbers are those of a block in a row, whatever order defines its layers."""
        if self.keeps_or_multiplies:
            return True
        inner = (read_size(layer.module) for layer in self.layers[:-1])
        return any(size[1] == self.inputs for size in inner if size)

    @property
    def may_be_head(self) -> bool:
        """Whether its layers follow one another to a number of outputs that only the last has.

        What one gives the next may be flattened in between. Blocks in a list are no head.
        """
        name, sizes = self.place.layer, [read_size(layer.module) for layer in self.layers]
        if self.keeps_or_multiplies or _INNER.search(name):
            return False
        if self.outputs == 1 and not _SCALAR.search(name):
            return False
        chained = all(
            one and after and one[1] and after[0] % one[1] == 0 for one, after in pairwise(sizes)
        )
        alone = self.outputs not in [size[1] for size in sizes[:-1] if size]
        return chained and alone and all(x.lists == self.place.lists for x in self.layers)

    def feeds(self, other: "Branch") -> bool:
        """Whether the other takes the outputs of this layer, or of two uses of it side by side."""
        if len(self.layers) > 1 or self.outputs is None:
            return False
        return other.inputs in (self.outputs, 2 * self.outputs)

    def resembles(self, other: "Branch") -> bool:
        """Whether both are of one kind, as heads mostly are, with the same inputs."""
        kinds = type(self.place.module), len(self.layers), self.inputs
        return kinds == (type(other.place.module), len(other.layers), other.inputs)


def find_networks(
    last: Place, layers: Sequence[Place], places: Sequence[Place]
) -> Sequence[nn.Module]:
    """The members of the list that holds the last layer, if they are whole networks.

    Then they take the same inputs, and none can take what another gives.
    """
    block = _find_block(last, places, 0)
    if block is None or is_layer(block.module) or not isinstance(block.parent, nn.ModuleList):
        return []
    members = _list_children(block, layers, places)
    alike = len({member.inputs for member in members}) == 1
    if len(members) < 2 or not alike or any(member.is_block for member in members):
        return []
    return [member.place.module for member in members]


def find_narrow_end(
    last: Place, layers: Sequence[Place], places: Sequence[Place], depth: int
) -> Sequence[Place]:
    """The layers of the last block in a list, if it has fewer outputs than any block before it.

    Then it is not one of the repeated blocks. `depth` is the number of lists that hold all layers.
    """
    block = _find_block(last, places, depth)
    if block is None:
        return []
    *others, own = _list_children(block, layers, places)
    widths = [other.outputs for other in others]
    if own.outputs is None or not widths:
        return []
    narrow = all(width is not None and own.outputs < width for width in widths)
    return own.layers if narrow else []


def find_beside(
    last: Place, layers: Sequence[Place], places: Sequence[Place], depth: int
) -> Sequence[Branch]:
    """The parts just before the one that ends in the last layer, and side by side with it.

    If the last part takes as many inputs as earlier ones have outputs together, it comes after.
    """
    node = last
    for ancestor in reversed(_list_ancestors(last, places)):
        if ancestor.lists < depth:
            break
        if not isinstance(ancestor.module, nn.Sequential | nn.ModuleList):
            *before, own = _list_children(node, layers, places)
            together = list(accumulate(branch.outputs or 0 for branch in reversed(before)))
            beside: list[Branch] = []
            for branch in reversed(before):
                if not branch.resembles(own) or not branch.may_be_head or branch.feeds(own):
                    break
                beside.append(branch)
            if beside and own.inputs not in together and not own.keeps_or_multiplies:
                return beside
        node = ancestor
    return []


def _list_ancestors(place: Place, places: Sequence[Place]) -> list[Place]:
    """The modules that it is in, the model first."""
    return [
        other
        for other in places
        if other.path != place.path and (not other.path or place.path.startswith(f"{other.path}."))
    ]


def _find_block(last: Place, places: Sequence[Place], depth: int) -> Place | None:
    """The outermost block with the last layer, in a list that does not hold all layers."""
    chain = [*_list_ancestors(last, places), last]
    return next((place for place in chain if place.lists == depth + 1), None)


def _list_children(
    place: Place, layers: Sequence[Place], places: Sequence[Place]
) -> Sequence[Branch]:
    """The module and those before it in the same parent, as far as they have layers."""
    parent = place.path.rpartition(".")[0]
    found = []
    for other in places[: places.index(place) + 1]:
        if other.parent is place.parent and other.path.rpartition(".")[0] == parent:
            inside = [
                layer
                for layer in layers
                if layer.path == other.path or layer.path.startswith(f"{other.path}.")
            ]
            if inside:
                found.append(Branch(other, inside))
    return found
