"""Experts that live in one stacked parameter: each product of each expert as a linear operator of its own.

transformers keeps the E experts of a layer as parameters (E, out, in), and runs them by one kernel. While a backend is
attached, those that got tokens run one by one in training mode, each through its two operators, since every expert may
be on another path. The mathematics, the parameters and their names are what they were; the gradient of a slice of a
stacked parameter is the expert's, zeros where it had no token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnmr.errors import UnitError

_SIGNS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
"""What ``transformers.integrations.use_experts_implementation`` gives a module, and this module relies on."""


def is_stacked(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer as transformers does."""
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3 and all(hasattr(module, sign) for sign in _SIGNS)


class ExpertLinear(nn.Linear):
    """One product of one expert: its weight and bias are slices of the stacked parameters.

    It is no submodule of the model, so that no name changes.

    Args:
        host: the module of the experts.
        projection: name of the stacked weight (E, out, in), or (E, in, out) where the host says so.
        row: the expert's place in it.
    """

    host: Any

    def __init__(self, host: nn.Module, projection: str, row: int) -> None:
        nn.Module.__init__(self)
        self.__dict__["host"] = host
        self.projection, self.row = projection, row
        self._held: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias while the experts run."""
        out_in = self.stacked.shape[1:]
        self.out_features, self.in_features = reversed(out_in) if self._transposed else out_in

    @property
    def stacked(self) -> nn.Parameter:
        """The parameter that holds all experts' weights."""
        return cast("nn.Parameter", getattr(self.host, self.projection))

    @property
    def stacked_bias(self) -> nn.Parameter | None:
        """The parameter (E, out) that holds all experts' biases, or None."""
        return getattr(self.host, f"{self.projection}_bias") if self.host.has_bias else None

    @property
    def training(self) -> bool:
        """That of the host."""
        return bool(self.host.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: ``nn.Module`` sets it when it is made."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in)."""
        weight = self.stacked[self.row] if self._held is None else self._held[0]
        return weight.t() if self._transposed else weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """(out,), or None."""
        if self._held is not None:
            return self._held[1]
        return None if self.stacked_bias is None else self.stacked_bias[self.row]

    @property
    def _transposed(self) -> bool:
        return bool(self.host.is_transposed)


def experts_of(host: nn.Module) -> list[tuple[ExpertLinear, ...]]:
    """Return the operators of each expert, in the order in which they run; the same ones at every call."""
    known: list[tuple[ExpertLinear, ...]] | None = host.__dict__.get("_gnmr_experts")
    if known is None:
        names = ("gate_up_proj" if host.has_gate else "up_proj", "down_proj")
        known = [tuple(ExpertLinear(host, name, row) for name in names) for row in range(int(host.num_experts))]  # type: ignore[arg-type]
        host.__dict__["_gnmr_experts"] = known
    return known


def take_over(expert: ExpertLinear) -> None:
    """Make the experts of a layer run one by one, through their operators.

    Raises:
        gnmr.UnitError: the module has a forward of its own, or only a part of the experts.
    """
    host = expert.host
    if _forward_of(host) is forward_:
        return
    parallel = getattr(host, "_is_expert_parallel", False)
    if parallel or "forward" in host.__dict__:
        what = "is split over ranks (expert parallel)" if parallel else "has a forward of its own"
        raise UnitError(
            f"the experts {type(host).__name__} cannot be run one by one, since their module {what}: leave them out "
            "with exclude='*.experts.*'"
        )
    host.forward = MethodType(forward_, host)


def give_back(expert: ExpertLinear) -> None:
    """Give the experts' module the forward of its class."""
    # Of a pickled copy it is the class's already, but in the wrong place.
    if _forward_of(expert.host) in {forward_, type(expert.host).forward}:
        del expert.host.forward


def _forward_of(host: nn.Module) -> Any:
    """Return the function of a forward of the module's own, or None."""
    return getattr(host.__dict__.get("forward"), "__func__", None)


@torch.compiler.disable  # which experts run depends on the data
def _run(host: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts = experts_of(host)
    out = torch.zeros_like(hidden_states)
    with _held(experts):
        for row in torch.unique(top_k_index).tolist():
            if row >= len(experts):  # a token without an expert
                continue
            up, down = experts[row]
            token, place = torch.where(top_k_index == row)
            x = up(hidden_states[token])
            y = down(host._apply_gate(x) if host.has_gate else host.act_fn(x))
            if getattr(host, "has_post_expert_norm", False):
                y = host.post_expert_norm(y)
            out = out.index_add(0, token, (y * top_k_weights[token, place, None]).to(out.dtype))
    return out


@contextmanager
def _held(experts: list[tuple[ExpertLinear, ...]]) -> Iterator[None]:
    """Take the stacked parameters apart once: the backward of a slice alone is as large as all experts."""
    for of_one_kind in zip(*experts, strict=True):
        weights, biases = of_one_kind[0].stacked.unbind(0), of_one_kind[0].stacked_bias
        rows = [None] * len(weights) if biases is None else biases.unbind(0)
        for expert, weight, bias in zip(of_one_kind, weights, rows, strict=True):
            expert._held = (weight, bias)
    try:
        yield
    finally:
        for expert in (each for pair in experts for each in pair):
            expert._held = None


def forward_(host: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts one by one in training mode, and as their class does in ``eval`` mode."""
    if not host.training:
        return cast("Tensor", type(host).forward(host, hidden_states, top_k_index, top_k_weights))
    return cast("Tensor", _run(host, hidden_states, top_k_index, top_k_weights))


# A bound method is pickled by its name, and looked up on the copy: there it is the class's own.
forward_.__name__ = "forward"
