"""Float8 training by torchao: each operator as a ``Float8Linear``, and in high precision on recovery.

torchao would put a ``Float8Linear`` in the place of every ``nn.Linear``. Here the model keeps its modules (their
hooks, their names, their parameters), and a ``Float8Linear`` on the same parameters runs in place of a module's
forward: one for each path, with the config of that path.

**What proves it.** A backend that quantises nothing trains just as well, so nobody would notice. When the paths are
attached, all three products of a small operator are compared with those in high precision, for each setting; and at the
first eager forward of every operator on each path, some rows of what came out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import PathError, UnitError
from gnmr.paths.base import HIGH, LOW, OperatorPaths, is_guarded, tick
from gnmr.paths.errors import sampled
from gnmr.pytorch.units import Operator, Unit, block_of

GEMMS = ("fprop", "dgrad", "wgrad")
"""The products of a linear operator: y = x W^T, dx = dy W, dW = dy^T x."""


class Float8(OperatorPaths):
    """Float8 matrix products by torchao; on recovery some or all of them in high precision.

    An operator has three products: fprop (y = x W^T), dgrad (dx = dy W) and wgrad (dW = dy^T x). ``low`` says how they
    run in float8, ``recover`` which of them a unit runs in high precision on recovery. With all three, recovery is
    ``F.linear`` itself.

    Operators that torchao converted before stay converted: their own config is the low-cost path, and how they run in
    ``eval`` mode. Others run as ``nn.Linear`` in ``eval`` mode and after the guard is detached.

    ``torch.compile`` of the layers one by one: where a layer is one unit (``granularity="block"``), it compiles to one
    graph for each path. Where its operators are units, as many graphs as plans would walk into the recompile limit, so
    they run outside the graph, uncompiled, and ``fullgraph=True`` is an error.

    Args:
        low: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"`` (wgrad is always in high precision), or a
            ``torchao.float8.Float8LinearConfig``; None is the config of what was converted before, and torchao's
            default (tensorwise) elsewhere.
        recover: the products that are in high precision on recovery.
        emulate: compute the products in high precision from the float8 values, which needs no hardware; None: on a
            CPU only, or where the config says so.

    Raises:
        ImportError: no torchao, or one outside the tested range.
        ValueError: an unknown recipe or product; products that ``low`` has in high precision anyway; float8 all-gather.
        gnmr.UnitError: (when attached) an operator that torchao cannot convert, that was converted with another config,
            or that holds float8 weights (FSDP2's float8 all-gather); on a GPU, sizes that are no multiples of 16.
        gnmr.PathError: a path that quantises nothing, or recovery that is not in high precision.

    Examples:
        >>> import torch, gnmr
        >>> from torch import nn
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(16, 16)})])})
        >>> q_proj = model["layers"][0]["q_proj"]
        >>> x = torch.randn(4, 16)
        >>> exact = q_proj(x)
        >>> paths = gnmr.Float8(low="rowwise", recover=("fprop", "dgrad", "wgrad"))
        >>> paths.attach(gnmr.find_units(model))
        >>> torch.equal(q_proj(x), exact)
        False
        >>> paths.switch(0, recover=True)
        >>> torch.equal(q_proj(x), exact)
        True
        >>> paths.detach()
    """

    def __init__(
        self, low: Any = None, recover: Sequence[str] = ("fprop", "dgrad", "wgrad"), *, emulate: bool | None = None
    ) -> None:
        super().__init__()
        from gnmr.paths import _torchao

        if emulate is not None and not isinstance(emulate, bool):
            raise ValueError(f"emulate must be True, False or None (on a CPU only), got {emulate!r}")
        self._ao = _torchao
        self._low = low
        self._config = None if low is None else self._checked(low)
        self.emulate = emulate
        self.recover = _gemms(recover)
        if self._config is not None:
            self._check_recover(self._config)
        self._rungs: dict[Operator, _Rungs] = {}

    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator by torchao."""
        return self._rungs[operator].run(LOW, x)

    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator with the products of ``recover`` in high precision."""
        return self._rungs[operator].run(HIGH, x)

    def attach(self, units: Sequence[Unit]) -> None:
        """Prove both paths, and replace the forward of every operator of ``units``."""
        operators = [operator for unit in units for operator in unit.operators]
        blocks = Counter(block for unit in units for block in {block_of(op.fqn) for op in unit.operators})
        made = {op: self._make(op, alone=blocks[block_of(op.fqn)] == 1) for op in operators}
        proven = set()
        for operator, rungs in made.items():
            for path, config in enumerate(rungs.configs):
                key = (config, operator.weight.dtype, operator.device)
                if key not in proven and not operator.weight.is_meta:
                    rungs.prove_products(path)
                    proven.add(key)
        before, self._rungs = self._rungs, made
        try:
            super().attach(units)
        except (PathError, UnitError):
            self._rungs = before
            raise

    def forward_of(self, operator: Operator, route: Any) -> "partial[Tensor]":
        """Return what replaces an operator's forward, in a compiled graph or outside of it."""
        rungs = self._rungs[operator]
        return partial(_forward if rungs.alone else _uncompiled, rungs, route)

    def detach(self) -> None:
        """Give every operator its own forward back."""
        super().detach()
        self._rungs = {}

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes of the inputs last seen (by an eager forward): torchao keeps them in high precision."""
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for unit in self.units:
            held[:, unit.index] = np.sum([self._rungs[operator].held_bytes for operator in unit.operators], axis=0)
        return held

    def describe(self) -> dict[str, Any]:
        """Return all settings, and torchao's version."""
        return {
            **super().describe(),
            "low": self._low if self._low is None or isinstance(self._low, str) else repr(self._low),
            "recover": list(self.recover),
            "emulate": self.emulate,
            "torchao": self._ao.VERSION,
        }

    def _checked(self, low: Any) -> Any:
        if isinstance(low, str) and low in self._ao.RECIPES:
            return self._ao.from_recipe(low)
        if not self._ao.is_config(low):
            raise ValueError(f"low must be one of {', '.join(self._ao.RECIPES)}, or a Float8LinearConfig, got {low!r}")
        if low.enable_fsdp_float8_all_gather:
            raise ValueError(_ALL_GATHER.format("low has enable_fsdp_float8_all_gather=True"))
        return low

    def _check_recover(self, config: Any) -> None:
        runs = self._ao.quantised(config)
        if runs and not set(runs) & set(self.recover):
            raise ValueError(
                f"recover={self.recover!r} would change nothing: low runs only {', '.join(runs)} in float8"
            )

    def _make(self, operator: Operator, *, alone: bool) -> "_Rungs":
        module: Any = operator.module
        self._check_module(operator)
        low = self._config_for(operator)
        self._check_recover(low)
        if not self._ao.quantised(low):
            raise PathError(f"low would quantise nothing of {operator.fqn!r}: all its products are in high precision")
        high = self._ao.in_high_precision(low, self.recover)
        native = operator.device.type == "cuda" and not low.emulate
        if native and (module.in_features % 16 or module.out_features % 16):
            raise UnitError(
                f"{operator.fqn!r} is {module.in_features} -> {module.out_features}, and a GPU multiplies float8 in "
                "multiples of 16 only: leave it out with exclude=..., or pass emulate=True"
            )
        linears = (
            self._ao.float8_linear(module, low),
            self._ao.float8_linear(module, high) if self._ao.quantised(high) else None,
        )
        return _Rungs(self._ao, operator, (low, high), linears, alone=alone, native=native)

    def _check_module(self, operator: Operator) -> None:
        module = operator.module
        if self._ao.gathers_float8(module):
            raise UnitError(
                _ALL_GATHER.format(f"{operator.fqn!r} was converted with enable_fsdp_float8_all_gather=True")
            )
        own = "forward" in vars(module) and not is_guarded(operator)
        if own or not self._ao.forwards_as_linear(module) or "weight" not in module._parameters:
            what = "has a forward of its own" if own else f"is a {type(module).__name__}"
            raise UnitError(
                f"{operator.fqn!r} {what}, and torchao converts a plain nn.Linear with a weight of its own only: leave "
                "it out with exclude=..."
            )

    def _config_for(self, operator: Operator) -> Any:
        """Return the config of the low-cost path of an operator."""
        own = self._ao.config_of(operator.module)
        if own is None:
            config = self._config or self._ao.from_recipe("tensorwise")
            on_cpu = operator.device.type == "cpu"
            return replace(config, emulate=config.emulate or on_cpu if self.emulate is None else self.emulate)
        emulate = own.emulate if self.emulate is None else self.emulate
        wanted = replace(self._config or own, emulate=emulate)
        if wanted != own:
            raise UnitError(
                f"{operator.fqn!r} was converted by torchao with another config than Float8(low={self._low!r}, "
                f"emulate={self.emulate!r}) says: leave both out, and its own is the low-cost path"
            )
        return own


@dataclass(eq=False)
class _Rungs:
    """One operator on both paths.

    Attributes:
        ao: :mod:`gnmr.paths._torchao`.
        operator: whose parameters they use.
        configs: of the low-cost and of the recovery path.
        linears: a ``Float8Linear`` for each path, or None for ``F.linear``.
        alone: whether its block has no second unit.
        native: whether a GPU multiplies float8 itself.
        proven: whether what ran was looked at, by path.
        held_bytes: kept for backward by the last forward, by path.
    """

    ao: Any
    operator: Operator
    configs: tuple[Any, Any]
    linears: tuple[nn.Module, nn.Module | None]
    alone: bool
    native: bool
    proven: list[bool] = field(default_factory=lambda: [False, False])
    held_bytes: tuple[int, int] = (0, 0)

    def run(self, path: int, x: Tensor) -> Tensor:
        """Run the operator on one path."""
        linear = self.linears[path]
        return self.operator.linear(x) if linear is None else linear.forward(x)

    def run_and_look(self, path: int, x: Tensor) -> Tensor:
        """Run the operator on one path, outside of a compiled graph."""
        if self.native:
            self._check_tokens(path, x)
        y = self.run(path, x)
        if torch.is_grad_enabled():
            self.held_bytes = tuple(self._kept(x, linear) for linear in self.linears)  # type: ignore[assignment]
        if not self.proven[path]:
            self.proven[path] = self._prove_rows(path, x, y)
        return y

    def prove_products(self, path: int) -> None:
        """Compare the three products of a small operator with those in high precision.

        Raises:
            gnmr.PathError: other products are in float8 than the config says.
        """
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(16, 16, generator=generator).to(self.operator.weight)
        wanted, found = self.ao.quantised(self.configs[path]), _products_in_float8(self._on(path, weight), weight)
        if found != wanted:
            raise self._fault(path, f"runs {_names(found)} in float8, where its config says {_names(wanted)}")

    def _on(self, path: int, weight: Tensor) -> nn.Module:
        """Return a module as the path's on a weight without a bias."""
        linear = self.linears[path]
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = nn.Parameter(weight.detach())
        return module if linear is None else self.ao.float8_linear(module, self.ao.config_of(linear))

    def _prove_rows(self, path: int, x: Tensor, y: Tensor) -> bool:
        """Compare some rows of what ran with high precision; return False where they say nothing.

        Raises:
            gnmr.PathError: fprop is in float8 and its result exact, or the other way round.
        """
        weight, bias = self.operator.weight, self.operator.bias
        if type(y) is not Tensor or not y.numel():  # split over ranks, or without a token
            return False
        with torch.no_grad():
            product = F.linear(sampled(x), weight)
            offset = torch.zeros_like(product) if bias is None else bias.to(product.dtype).expand_as(product)
            inexact = _differ(sampled(y), product + offset, product.abs() + offset.abs())
        if inexact is None:
            return False
        if "fprop" not in self.ao.quantised(self.configs[path]):
            if inexact:
                raise self._fault(path, "should multiply in high precision, and its output is another")
            return True
        # Exact values may well be exact in float8 too, and a large bias hides an error: then other inputs tell.
        if inexact or not weight.any():
            return inexact
        if "fprop" not in _products_in_float8(self._on(path, weight), weight):
            raise self._fault(path, "should multiply in float8, and its output is that of high precision")
        return True

    def _fault(self, path: int, what: str) -> PathError:
        return PathError(
            f"the {('low-cost', 'recovery')[path]} path of {self.operator.fqn!r} {what} (torchao {self.ao.VERSION}): "
            "training on it would prove nothing"
        )

    def _check_tokens(self, path: int, x: Tensor) -> None:
        """Refuse what a GPU would refuse in the backward."""
        tokens = x.numel() // x.shape[-1]
        config = self.configs[path]
        if tokens % 16 and "wgrad" in self.ao.quantised(config) and not config.pad_inner_dim:
            raise PathError(
                f"{self.operator.fqn!r} got {tokens} tokens, and the float8 product for its weight's gradient needs a "
                "multiple of 16: pad the batch, or pass low=Float8LinearConfig(pad_inner_dim=True, ...)"
            )

    def _kept(self, x: Tensor, linear: nn.Module | None) -> int:
        if linear is None and not self.operator.weight.requires_grad:
            return 0
        # Under autocast F.linear keeps a cast; torchao casts on a GPU only.
        cast = torch.is_autocast_enabled(x.device.type) and (linear is None or x.is_cuda)
        size = torch.get_autocast_dtype(x.device.type).itemsize if cast else x.element_size()
        return x.numel() * size


def _forward(rungs: _Rungs, route: Any, x: Tensor) -> Tensor:
    if not rungs.operator.module.training:
        return rungs.operator.plain(x)
    path = HIGH if route.recover else LOW
    if torch.compiler.is_compiling():
        tick(route.calls, path)
        return rungs.run(path, x)
    route.tick(path)
    return rungs.run_and_look(path, x)


_uncompiled = torch.compiler.disable(
    _forward,
    reason="the units of this layer change paths one by one: gnmr.Guard(granularity='block') makes it one unit, which "
    "compiles whole, to one graph for each path",
)


def _products_in_float8(linear: nn.Module, weight: Tensor) -> tuple[str, ...]:
    """Return which of a module's products of random numbers are not those of ``F.linear`` on its weight."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(16, size, generator=generator).to(weight) for size in reversed(weight.shape))
    param, x = cast("Tensor", linear.weight), x.requires_grad_()
    with torch.enable_grad(), torch.autocast(weight.device.type, enabled=False):
        outputs = (linear.forward(x), F.linear(x, param))
        products = [(y, *torch.autograd.grad(y, (x, param), dy)) for y in outputs]
    with torch.no_grad():
        pairs = zip(GEMMS, *products, strict=True)
        return tuple(gemm for gemm, found, exact in pairs if _differ(found, exact, exact))


def _differ(found: Tensor, exact: Tensor, size: Tensor) -> bool | None:
    """Whether the error is beyond high precision's own rounding, relative to ``size``; None if that is not finite.

    Float8 has three bits of mantissa or two, an error of percents; the rounding of bfloat16 is below its eps.
    """
    error, scale = (torch.linalg.vector_norm(each.float()) for each in (found - exact, size))
    if not (torch.isfinite(error) and torch.isfinite(scale)):
        return None
    return bool(error > max(1e-3, torch.finfo(exact.dtype).eps) * scale)


def _gemms(recover: Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(recover, Sequence) and not isinstance(recover, str)
    if not listed or not recover or any(gemm not in GEMMS for gemm in recover):
        raise ValueError(f"recover must be a list of products among {', '.join(GEMMS)}, got {recover!r}")
    return tuple(gemm for gemm in GEMMS if gemm in recover)


def _names(gemms: Sequence[str]) -> str:
    return ", ".join(gemms) or "nothing"


_ALL_GATHER = (
    "{}: FSDP2's float8 all-gather gives an operator its weight in float8, so there is no high precision to recover "
    "to. Convert with enable_fsdp_float8_all_gather=False"
)
