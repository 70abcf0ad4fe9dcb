"""Where the matrices of a hidden parameter are.

A layer that holds several projections is known by its name, and by the layers beside it: attention
has an output projection that takes a third of what a fused QKV computes, a gated MLP has a second
layer that takes half of what the first computes.
"""

from typing import Any

from torch import Tensor, nn

from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView
from neumann.optim.roles.places import (
    CONVOLUTIONS,
    RECURRENT,
    TRANSPOSED,
    Place,
    is_conv1d,
    is_matrix_module,
    read_size,
)

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}  # matrices that a recurrent layer fuses into one

# Layers with several projections of attention, by their names.
_FUSED_QKV = {"qkv", "Wqkv", "to_qkv", "in_proj_qkv", "qkv_proj", "c_attn"}
_FUSED_TWO = {"kv", "to_kv", "kv_proj", "qk", "to_qk"}
# Attention whose fused layer goes from head to head, each with its query, key and value.
_HEAD_BY_HEAD = {"CodeGenAttention", "MiniMaxLightningAttention"}


def find_view(parameter: Tensor, place: Place, attribute: str, split_heads: bool) -> MatrixView:
    """The view of a parameter in a module."""
    module = place.module
    if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        return MatrixView(parts=3, heads=module.num_heads if split_heads else 1)
    if isinstance(module, RECURRENT):
        return MatrixView(parts=_count_gates(module, attribute))
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) and parameter.ndim > 2:
        return _convolution_view(module, parameter.shape[1])
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return _linear_view(parameter, place, split_heads)
    if parameter.ndim == 3:
        return _stacked_view(module, attribute)
    return WHOLE


def _count_gates(module: Any, attribute: str) -> int:
    """How many matrices a weight of a recurrent layer holds; a projection is one."""
    if attribute.startswith("weight_hr"):
        return 1
    mode = getattr(module, "mode", type(module).__name__.removesuffix("Cell"))
    return _GATES.get(mode, 1)


def _convolution_view(module: Any, second: int) -> MatrixView:
    transposed = isinstance(module, TRANSPOSED)
    if module.groups > 1 and second == 1 and not transposed:  # depthwise: a kernel for each channel
        return MatrixView(stacked=True)
    return MatrixView(groups=module.groups, transposed=transposed)


def _linear_view(parameter: Tensor, place: Place, split_heads: bool) -> MatrixView:
    transposed = is_conv1d(place.module)
    outputs, inputs = parameter.shape[::-1] if transposed else parameter.shape
    if place.layer in _FUSED_QKV | _FUSED_TWO:
        parts = _split_attention(place, outputs, inputs)
        heads = _read_count(place.parent, "num_heads", "num_attention_heads") or 1
        if not split_heads or not isinstance(parts, int) or parts == 1 or outputs % (parts * heads):
            heads = 1
        return MatrixView(transposed=transposed, parts=parts, heads=heads)
    if _is_gated(place, outputs, inputs) or (place.layer == "gate_up_proj" and outputs % 2 == 0):
        return MatrixView(transposed=transposed, parts=2)
    return MatrixView(transposed=transposed)


def _is_gated(place: Place, outputs: int, inputs: int) -> bool:
    """Whether this is the first of two layers, and the second takes half of its outputs."""
    layers = _layers_in(place.parent)
    if len(layers) != 2 or layers[0] is not place.module:
        return False
    return read_size(layers[1]) == (outputs / 2, inputs)


def _split_attention(place: Place, outputs: int, inputs: int) -> int | tuple[int, ...]:
    """The projections in a fused layer: their number, the outputs of each, or 1 if unknown."""
    parent = place.parent
    if _goes_by_head(parent):
        return 1
    heads = _read_count(parent, "num_heads", "num_attention_heads")
    of_keys = _read_count(parent, "num_key_value_heads", "num_kv_heads")
    fused = place.layer in _FUSED_QKV
    if fused and heads and of_keys and heads != of_keys and outputs % (heads + 2 * of_keys) == 0:
        size = outputs // (heads + 2 * of_keys)
        return heads * size, of_keys * size, of_keys * size
    keys, values = _read_count(parent, "key_dim"), _read_count(parent, "value_dim")
    if fused and keys and values and 2 * keys + values == outputs:
        return keys, keys, values
    sizes = map(read_size, _layers_in(parent))
    widths = {inputs, *(size[0] for size in sizes if size)}
    for count in (3, 2) if fused else (2,):  # of a cross-attention's c_attn there are two
        if outputs % count == 0 and outputs // count in widths:
            return count
    return 1


def _goes_by_head(attention: nn.Module | None) -> bool:
    """Whether the outputs of a fused layer are sorted by head first: then it stays whole."""
    by_name = any(base.__name__ in _HEAD_BY_HEAD for base in type(attention).__mro__)
    by_option = getattr(attention, "head_first", False) is True  # timm's MaxViT
    return by_name or by_option or hasattr(attention, "val_dim")  # timm's LeViT and its kin


def _layers_in(module: nn.Module | None) -> list[nn.Module]:
    return [m for m in module.modules() if is_matrix_module(m)] if module else []


def _stacked_view(module: nn.Module, attribute: str) -> MatrixView:
    """Experts: out × in each, unless the two weights of a gated MLP show the opposite."""
    first, second = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if attribute not in ("gate_up_proj", "down_proj") or first is None or second is None:
        return MatrixView(stacked=True)
    transposed = first.ndim == second.ndim == 3 and first.shape[2] == 2 * second.shape[1]
    # GPT-OSS, which has biases, alternates the rows of gate and up projection.
    apart = getattr(module, "is_concatenated", not hasattr(module, "gate_up_proj_bias"))
    fused = attribute == "gate_up_proj" and apart
    return MatrixView(stacked=True, transposed=transposed, parts=2 if fused else 1)


def _read_count(module: nn.Module | None, *names: str) -> int | None:
    """A number of heads or of outputs, from a module or its config."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
