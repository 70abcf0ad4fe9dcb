"""Small models whose roles are known."""

import torch
from torch import Tensor, nn

from neumann.optim.roles import find_roles


def list_outputs(model: nn.Module) -> list[str]:
    """The names of the parameters that are taken for a model's outputs."""
    return [one.name for one in find_roles(model) if one.role == "output"]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.num_heads = 2


class Network(nn.Module):
    """A transformer with a little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.pos = nn.Parameter(torch.zeros(1, 5, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=3)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(x))
        scores: Tensor = self.classify(self.dropout(y))
        return scores
