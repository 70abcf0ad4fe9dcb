"""What the spectral P costs on many processes: operations and bytes by formula, not measured.

Prints the table of docs/scale.md, for the matrices of Llama 2. Its embedding and output layer are
left out: in the recipe they have the diagonal P, which needs no exchange.

    python -m benchmarks.step.scale_table
"""

from dataclasses import dataclass
from itertools import starmap
from math import prod

from benchmarks.common.markdown import format_table
from neumann.optim.preconditioners.orthogonalization import count_operations
from neumann.optim.preconditioners.ownership import divide

ITEMSIZE = 4  # P's arithmetic takes and gives float32

Shape = tuple[int, int]


@dataclass(frozen=True)
class Cost:
    """Of one process in one step: of the busiest, where they differ."""

    operations: float
    bytes_sent: float
    matrices: int


def list_matrices(width: int, inner: int, keys: int, layers: int) -> list[Shape]:
    """The matrices of a Llama, those with the most operations first."""
    layer = [(width, width)] * 2 + [(keys, width)] * 2 + [(inner, width)] * 3
    return sorted(layer * layers, key=lambda shape: count_operations(*shape), reverse=True)


MODELS = {
    "7 B": list_matrices(4096, 11008, 4096, 32),
    "70 B": list_matrices(8192, 28672, 1024, 80),
}
# Replicas and shards; DDP has no shards, and 70 B parameters do not fit into one GPU.
MESHES = [
    ("7 B", "FSDP2", 1, 64),
    ("7 B", "HSDP, 8 × 8", 8, 8),
    ("7 B", "DDP", 64, 1),
    ("7 B", "FSDP2", 1, 1024),
    ("7 B", "HSDP, 16 × 64", 16, 64),
    ("70 B", "FSDP2", 1, 64),
    ("70 B", "HSDP, 2 × 32", 2, 32),
    ("70 B", "FSDP2", 1, 1024),
    ("70 B", "HSDP, 16 × 64", 16, 64),
]


def replicated_cost(matrices: list[Shape], shards: int) -> Cost:
    """Every process gathers and orthogonalizes every matrix."""
    sent = ITEMSIZE * sum(map(prod, matrices)) * (shards - 1) / shards
    return Cost(sum(starmap(count_operations, matrices)), sent, len(matrices))


def owner_cost(matrices: list[Shape], replicas: int, shards: int) -> Cost:
    """Every matrix has an owner; the formulas are those of docs/scale.md."""
    processes = replicas * shards
    owners = divide([*starmap(count_operations, matrices)], processes)
    owned = [[m for m, o in zip(matrices, owners, strict=True) if o == p] for p in range(processes)]
    elements = [sum(map(prod, own)) for own in owned]  # E_p
    bytes_sent = []
    for process, own in enumerate(elements):
        first = process - process % shards
        replica = sum(elements[first : first + shards])  # E_r
        there_and_back = (replica - own + (shards - 1) * own) / shards
        bytes_sent.append(ITEMSIZE * (there_and_back + (replicas - 1) * replica / shards))
    return Cost(
        max(sum(starmap(count_operations, own)) for own in owned),
        max(bytes_sent),
        max(map(len, owned)),
    )


def make_table() -> str:
    heads = ["parameters", "GPUs", "layout", "matrices", "operations", "GB sent"]
    rows = []
    for name, layout, replicas, shards in MESHES:
        matrices = MODELS[name]
        before, after = replicated_cost(matrices, shards), owner_cost(matrices, replicas, shards)
        rows.append(
            [
                name,
                f"{replicas * shards:,}",
                layout,
                f"{before.matrices} → {after.matrices}",
                f"{before.operations:.2g} → {after.operations:.2g}".replace("e+", "e"),
                f"{before.bytes_sent / 1e9:.3g} → {after.bytes_sent / 1e9:.3g}",
            ]
        )
    return format_table(heads, "lrlrrr", rows)


if __name__ == "__main__":
    print(make_table())
