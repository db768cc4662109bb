"""What a trigger reads beside the gradient norms: one number a unit a step, made by the guard.

============  ==============================================  =================================================
signal        what                                            cost
============  ==============================================  =================================================
``error``     relative error of the low-cost path's casts     two norms of a sample of rows for each cast
``noise``     noise-to-signal ratio of micro-batch gradients  one more copy of the gradients
``jacobian``  spectral norm of the weights                    a few products of each weight with a vector
``measured``  the measured perturbation of the gradient       N + 1 forwards and backwards (for study)
============  ==============================================  =================================================
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.errors import GnmrWarning, GuardError, PathError
from gnmr.paths.base import Paths
from gnmr.pytorch.monitor import Reading
from gnmr.pytorch.units import Unit

Floats = NDArray[np.float64]

_NO_ERROR = (
    "no error of any cast has been measured in the last steps, so the trigger promotes nothing: {} casts nothing on "
    "its low-cost path, or does not measure it there"
)

WEIGHT_GRADIENT = ("x", "dy", "dw")
"""The casts that a unit's own weight gradient is made of."""


class Signal(ABC):
    """Makes (N,) numbers a step, until it is closed."""

    @abstractmethod
    def read(self, reading: Reading) -> Floats:
        """Return (N,) float64 of the step whose gradients were just read; NaN where it is not known."""

    def close(self) -> None:
        """Leave the model as it was."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON-able values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""


class CastError(Signal):
    """The relative error of a unit's weight gradient that comes from the casts of its low-cost path.

    With independent errors of the factors, ``e² = e_x² + e_dy²``, and ``e_dw²`` where dw itself is cast.

    Args:
        paths: a backend that measures its errors, attached.
        every: steps between two estimates for a unit on its recovery path.

    Raises:
        gnmr.PathError: the backend measures none.

    Warns:
        gnmr.GnmrWarning: it says that it does, and has told no error in ``2 * every`` steps.
    """

    def __init__(self, paths: Paths, every: int = 4) -> None:
        self._paths, self._left = paths, 2 * every
        self.last: dict[str, Floats] = {}
        """What the paths said at the last reading: (N,) by role."""
        paths.watch_errors(every)

    def read(self, reading: Reading) -> Floats:
        """Return e of each unit."""
        self.last = errors = self._paths.errors()
        parts = [errors[role] ** 2 for role in WEIGHT_GRADIENT if role in errors]
        if not parts:
            raise PathError(
                f"the trigger needs the errors of the casts of {', '.join(WEIGHT_GRADIENT)}, and "
                f"{type(self._paths).__name__} measures {', '.join(errors) or 'none'}"
            )
        error = np.sqrt(np.sum(parts, axis=0))
        silent = bool(np.isnan(error).all())
        if silent and self._left == 1:
            warnings.warn(_NO_ERROR.format(type(self._paths).__name__), GnmrWarning, stacklevel=2)
        self._left = self._left - 1 if silent and self._left else 0
        return np.asarray(error)


class MicroBatchNoise(Signal):
    """The noise-to-signal ratio of the gradients of a step's K micro-batches, the inverse of the GSNR.

    With ``c_k`` the share of micro-batch k in the gradient ``g``, ``(K sum_k ||c_k||² - ||g||²) / ||g||²``: variance
    over squared mean (Liu et al., arXiv 2001.07384, for a unit in place of a parameter).

    Args:
        units: N units.

    Raises:
        ValueError: units that are watched at their outputs, which have no parameters to take gradients of.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        if any(unit.outputs for unit in units):
            raise ValueError("the trigger 'gsnr' compares gradients of parameters: watch='output_grad' has none")
        self._units = units
        self._before: dict[nn.Parameter, Tensor] = {}
        self._squares: dict[nn.Parameter, list[Tensor]] = {}
        params = dict.fromkeys(param for unit in units for param in unit.params)
        self._stacked = {piece.param for unit in units for piece in unit.pieces if piece.row is not None}
        self._hooks = [param.register_post_accumulate_grad_hook(self._see) for param in params]

    def _see(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)  # noqa: S101 (the hook is registered on parameters)
        assert param.grad is not None  # noqa: S101 (the hook runs after accumulation)
        grad = param.grad.detach()
        share = grad - self._before[param] if param in self._before else grad
        # Of stacked experts one number a row, else one of the whole.
        rows = share.float().flatten(1 if param in self._stacked else 0)
        self._squares.setdefault(param, []).append(torch.linalg.vector_norm(rows, dim=-1) ** 2)
        self._before[param] = grad.clone()

    def read(self, reading: Reading) -> Floats:
        """Return the ratio; NaN for a unit without a gradient.

        Raises:
            gnmr.GuardError: there is but one micro-batch.
        """
        found = np.full(len(self._units), np.nan)
        sums = self._sums()
        for unit in self._units:
            seen = [piece for piece in unit.pieces if piece.param in sums]
            if not seen:
                continue
            k = max(len(self._squares[piece.param]) for piece in seen)
            if k < 2:
                raise GuardError(
                    "the trigger 'gsnr' compares the gradients of micro-batches, and this step had one: accumulate "
                    "over at least two (gradient_accumulation_steps=2)"
                )
            size = reading.norms[unit.index] ** 2
            whole = sum(float(sums[piece.param][piece.row or 0]) for piece in seen)
            found[unit.index] = (k * whole - size) / size if size > 0 else np.nan
        self._before.clear()
        self._squares.clear()
        return found

    def _sums(self) -> dict[nn.Parameter, Floats]:
        """Return the sums over the micro-batches, (rows,) or (1,) for each parameter."""
        totals = [torch.stack(squares).sum(0).reshape(-1) for squares in self._squares.values()]
        if not totals:
            return {}
        parts = torch.cat(totals).double().cpu().numpy()
        return dict(zip(self._squares, np.split(parts, np.cumsum([len(each) for each in totals])[:-1]), strict=True))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Jacobian(Signal):
    """The spectral norm of a unit's weights, the largest of its operators', by power iteration.

    A linear operator's Jacobian is its weight W; ``v <- W^T W v / ||W^T W v||`` from a fixed start, so that a resumed
    run finds the same. For a unit of several operators it is a proxy: what lies between them is left out.

    Args:
        units: N units.
        iterations: of the power method, >= 1; more come closer from below.
    """

    def __init__(self, units: Sequence[Unit], iterations: int = 3) -> None:
        if iterations < 1:
            raise ValueError(f"iterations must be >= 1, got {iterations!r}")
        self._units, self._iterations = units, iterations

    @torch.no_grad()
    def read(self, reading: Reading) -> Floats:
        """Return the norms."""
        found = [torch.stack([self._norm(op.weight) for op in unit.operators]).amax() for unit in self._units]
        return torch.stack([each.cpu() for each in found]).double().numpy()

    def _norm(self, weight: Tensor) -> Tensor:
        weight = weight.detach().float()
        v = torch.linspace(1.0, 2.0, weight.shape[1], device=weight.device)
        for _ in range(self._iterations):
            v = torch.nn.functional.normalize(weight.t() @ (weight @ v), dim=0)
        return torch.linalg.vector_norm(weight @ v)


def make_signal(needs: str, units: Sequence[Unit], paths: Paths | None) -> Signal:
    """Return what makes a signal by its name.

    Raises:
        ValueError: one that cannot be made from units and paths alone.
    """
    if needs == "error" and paths is None:
        raise ValueError("the trigger needs the errors of the low-cost path's casts, and paths=None has none")
    makers: dict[str, Callable[[], Signal]] = {
        "error": lambda: CastError(paths),  # type: ignore[arg-type]
        "noise": lambda: MicroBatchNoise(units),
        "jacobian": lambda: Jacobian(units),
    }
    if needs not in makers:
        raise ValueError(
            f"the signal {needs!r} must be given, as Guard(..., signal=...): it runs the model, and so needs a "
            "micro-batch; see gnmr.pytorch.gaps.MeasuredGap"
        )
    return makers[needs]()
