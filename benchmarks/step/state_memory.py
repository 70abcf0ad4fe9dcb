"""How much memory the state of the spectral form takes, per weight of the network.

    python -m benchmarks.step.state_memory
    python -m benchmarks.step.state_memory --device cuda

With every option at its default, and by role (`large_batch`), where embeddings and output layers
have the diagonal P. On a GPU this is what the allocator holds more after the optimizer was built
than before it, elsewhere the sum over the tensors of its state, which exist before the first step.
"""

import gc

import torch
from torch import nn

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser
from benchmarks.step.networks import NETWORKS, build_network
from benchmarks.step.timed_peer import count_bytes
from neumann import Neumann, large_batch

FORMS = {
    'precondition="spectral"': lambda model, dtype: Neumann(
        model.parameters(), lr=0.015, precondition="spectral", state_dtype=dtype
    ),
    "large_batch": lambda model, dtype: large_batch(model, steps=100, state_dtype=dtype)[0],
}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
CASES = ["resnet50", "gpt2-124m"]


def measure_state(model: nn.Module, form: str, dtype: str, device: torch.device) -> float:
    """Bytes of state per weight."""
    gc.collect()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    optimizer = FORMS[form](model, DTYPES[dtype])
    held = count_bytes(optimizer.state)
    if device.type == "cuda":
        held = torch.cuda.memory_allocated() - before
    return held / sum(p.numel() for p in model.parameters())


def make_table(cases: list[str], device: torch.device) -> str:
    rows = []
    for case in cases:
        model = build_network(case, device)
        for form in FORMS:
            found = [measure_state(model, form, dtype, device) for dtype in DTYPES]
            rows.append([NETWORKS[case].title, f"`{form}`", *[f"{size:.3f}" for size in found]])
    heads = ["network", "form", *[f"{dtype}, B/weight" for dtype in DTYPES]]
    return format_table(heads, "llrr", rows)


def main() -> None:
    parser = create_parser(__doc__, "cpu", output=False)
    parser.add_argument("--cases", nargs="+", choices=list(NETWORKS), default=CASES)
    arguments = parser.parse_args()
    print(make_table(arguments.cases, torch.device(arguments.device)))


if __name__ == "__main__":
    main()
