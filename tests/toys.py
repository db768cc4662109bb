"""Tiny models and backends that the tests share."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.paths.base import OperatorPaths


class Block(nn.Module):
    """A decoder layer in miniature: two projections by the names that the default rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


class Toy(nn.Module):
    """Blocks between an embedding and a head, neither of which is a unit."""

    def __init__(self, width: int = 8, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ToyPaths(OperatorPaths):
    """Both paths are plain, but for what a test puts on the low one.

    ``poison`` is a map of the output for units by name; ``bytes`` stand for what a backend would measure.
    """

    def __init__(self, poison: dict[str, Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.poison = {} if poison is None else poison
        self.log: list[tuple[str, str]] = []

    def low(self, operator, x):
        self.log.append((operator.fqn, "low"))
        y = operator.plain(x)
        return self.poison[operator.fqn](y) if operator.fqn in self.poison else y

    def high(self, operator, x):
        self.log.append((operator.fqn, "high"))
        return operator.plain(x)

    def held_bytes(self):
        n = len(self.units)
        return np.array([[1] * n, [3] * n], dtype=np.int64)


class Quiet(ToyPaths):
    """Plain on both paths, with nothing that a compiler would trip over."""

    def low(self, operator, x):
        return operator.plain(x)

    def high(self, operator, x):
        return operator.plain(x) + 0.0


def batch(rows: int = 4, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, x: Tensor, scale: float = 1.0) -> None:
    (model(x).square().mean() * scale).backward()


def spike(model: nn.Module, name: str, factor: float) -> None:
    """Scale the gradient of one operator's weight, as a fault of its low path would."""
    model.get_submodule(name).weight.grad.mul_(factor)
