"""What each parameter of a model is for: a hidden matrix, an embedding, the output, or a vector.

find      the role of every parameter; the type of its module decides first, its name second
places    the modules of a model and their kinds, without what DDP and torch.compile add
outputs   the layers that compute the model's outputs
branches  which parts of a model run side by side, by their numbers of inputs and outputs
views     where the matrices of a parameter are: fused projections, experts, groups
"""

from neumann.optim.roles.find import (
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

__all__ = [
    "EMBEDDING",
    "FROZEN",
    "HIDDEN",
    "OUTPUT",
    "ROLES",
    "VECTOR",
    "Assignment",
    "find_roles",
    "is_batch_normalized",
]
