"""Where the full-precision weight of a frozen operator is while its INT8 codes do the work.

It is not trained, so it is only needed on recovery, in ``eval`` mode and in checkpoints:

- resident: nothing is done; INT8 and full precision lie side by side.
- :class:`HostWeight` (``offload``): in host memory, from where the few that are on recovery are brought ahead of time.
- :class:`DequantizedWeight` (``dequantize``): nowhere; the codes stand for it.
"""

import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gnmr.errors import GnmrWarning, PathError
from gnmr.numerics.int8 import Rows, quantize_rows


class HostWeight:
    """A frozen weight whose full precision is in host memory.

    On an accelerator it is in pinned memory, and copies to the device run on a stream of their own. On a CPU it is in a
    memory-mapped file without a name, which the system keeps in its page cache or not, as it likes. Either way the
    parameter stays what it is, and holds the real values: host ones, or while it is on recovery the device's.

    Args:
        param: the weight; its storage leaves the device.
        folder: where the mapped file is made on a CPU; None: where temporary files go.

    Raises:
        gnmr.PathError: the file cannot be written.
    """

    def __init__(self, param: nn.Parameter, folder: Path | None = None) -> None:
        self.param, self.device = param, param.device
        self.home = _on_host(param.detach(), folder)
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._version = param._version
        param.data = self.home

    @property
    def here(self) -> bool:
        """Whether a copy is on the device, or on its way."""
        return self._copy is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy on the device."""
        return 0 if self._copy is None else self._copy.untyped_storage().nbytes()

    def fetch(self) -> None:
        """Begin to bring the weight to the device; the parameter changes when it is used there."""
        if self._copy is not None:
            return
        if self.device.type != "cuda":
            self._copy = self.home.clone()
            return
        with torch.cuda.stream(_stream(self.device)):
            self._copy = self.home.to(self.device, non_blocking=True)
        self._arrived = _stream(self.device).record_event()

    def use(self) -> None:
        """Put the copy on the device into the parameter's place."""
        self.fetch()
        copy = self._copy
        if copy is None or self.param.data_ptr() == copy.data_ptr():
            return
        if self._arrived is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self._arrived)
            copy.record_stream(now)
        self.param.data = copy

    def drop(self) -> None:
        """Let go of the copy on the device."""
        if self._copy is not None and self.param._version != self._version:
            self.home.copy_(self.param)  # somebody has loaded other weights meanwhile
        self._version = self.param._version
        self.param.data = self.home
        self._copy = self._arrived = None

    def give_back(self) -> None:
        """Leave the weight on the device for good."""
        self.drop()
        self.param.data = self.home.to(self.device, copy=True)


class DequantizedWeight(Tensor):
    """A frozen weight of which only the INT8 codes are there; whoever reads it gets codes times scales.

    It can be copied, pickled, moved, loaded into (which quantises anew) and computed with, but not changed in place.

    Args:
        codes: (out, in) int8.
        scale: (out, 1) float32.
        dtype: the weight's.
        transposed: whether the weight is (in, out).

    Examples:
        >>> weight = DequantizedWeight(*quantize_rows(torch.tensor([[1.27, 0.5]])), torch.float32)
        >>> torch.nn.functional.linear(torch.tensor([[1.0, 1.0]]), weight)
        tensor([[1.7700]])
    """

    codes: Tensor
    scale: Tensor
    transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool = False) -> "DequantizedWeight":
        """Make a tensor of the weight's shape, with no values of its own."""
        shape = codes.shape[::-1] if transposed else codes.shape
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool = False) -> None:
        self.codes, self.scale, self.transposed = codes, scale, transposed

    @property
    def rows(self) -> Rows:
        """Codes and scales, one row an output channel."""
        return Rows(self.codes, self.scale)

    def plain(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        weight = self.rows.dequantize(self.dtype)
        return weight.t() if self.transposed else weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DequantizedWeight({self.plain()!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], how: Any, size: Any, stride: Any) -> "DequantizedWeight":
        return DequantizedWeight(inner["codes"], inner["scale"], *how)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in _KEEP:
                return _KEEP[func](first, **kwargs)
            if func is torch.ops.aten.copy_.default:
                return first._load(args[1])
            if func._schema.is_mutable:
                raise PathError(
                    f"{func} would change a frozen weight of which only INT8 codes are there: detach the guard first, "
                    "or use frozen='resident' or 'offload'"
                )
        args, kwargs = tree_map_only(cls, cls.plain, (args, kwargs))
        return func(*args, **kwargs)

    def _same(self, *, clone: bool = False, turn: bool = False, **to: Any) -> "DequantizedWeight":
        """Return the same weight with its codes shared or cloned, transposed, of another dtype, elsewhere."""
        codes, scale = (part.clone() if clone else part.to(to.get("device") or part.device) for part in self.rows)
        return DequantizedWeight(codes, scale, to.get("dtype") or self.dtype, self.transposed != turn)

    def _load(self, values: Tensor) -> "DequantizedWeight":
        values = values.plain() if isinstance(values, DequantizedWeight) else values
        rows = quantize_rows((values.t() if self.transposed else values).to(self.codes.device))
        self.codes.copy_(rows.codes)
        self.scale.copy_(rows.scale)
        return self


_KEEP: dict[Any, Callable[..., DequantizedWeight]] = {
    torch.ops.aten.detach.default: DequantizedWeight._same,
    torch.ops.aten.alias.default: DequantizedWeight._same,
    torch.ops.aten.t.default: partial(DequantizedWeight._same, turn=True),
    torch.ops.aten.clone.default: partial(DequantizedWeight._same, clone=True),
    torch.ops.aten._to_copy.default: DequantizedWeight._same,
}
"""What makes another weight of codes, so that nothing in full precision is kept for backward."""


def keep_codes(param: nn.Parameter, rows: Rows, *, transposed: bool) -> None:
    """Take a frozen weight's full precision away: the same parameter, with the codes in place of it.

    Raises:
        gnmr.PathError: something else holds on to the parameter.
    """
    weight = DequantizedWeight(*rows, param.dtype, transposed)
    try:
        torch.utils.swap_tensors(param, nn.Parameter(weight, requires_grad=False))
    except RuntimeError as error:
        raise PathError(
            f"frozen='dequantize' cannot take a weight's full precision away, for something holds on to it ({error}): "
            "attach the guard before torch.compile, or use frozen='resident'"
        ) from error


def give_values(param: nn.Parameter) -> None:
    """Make a parameter of codes an ordinary one again, with the dequantised values."""
    if isinstance(param, DequantizedWeight):
        torch.utils.swap_tensors(param, nn.Parameter(param.plain().contiguous(), requires_grad=False))


class PlainState:
    """A ``state_dict`` hook: puts ordinary tensors, in host memory, in place of weights of codes, and warns once."""

    def __init__(self) -> None:
        self.warned = False

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Change the entries of one module."""
        key = f"{prefix}weight"
        weight = state_dict.get(key)
        if not isinstance(weight, DequantizedWeight):
            return
        state_dict[key] = weight.plain().contiguous().cpu()
        if not self.warned:
            self.warned = True
            warnings.warn(_ONLY_CODES.format("this state_dict holds"), GnmrWarning, stacklevel=2)


_ONLY_CODES = (
    "under frozen='dequantize' the full precision of frozen weights is gone: {} their dequantised values. Keep the "
    "checkpoint that the model was loaded from"
)


def warn_restored() -> None:
    """Say what a detached model has."""
    warnings.warn(_ONLY_CODES.format("the model now has"), GnmrWarning, stacklevel=3)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _on_host(weight: Tensor, folder: Path | None) -> Tensor:
    if weight.device.type != "cpu":
        return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)
    values = weight.contiguous()
    try:
        # The name goes at once, and the file with the last tensor that maps it. Written, not mapped and filled: a full
        # disk is an error then, and a crash otherwise.
        with tempfile.NamedTemporaryFile(prefix="gnmr-frozen-", dir=folder) as file:
            file.write(values.view(torch.uint8).numpy().data)
            file.flush()
            flat = torch.from_file(file.name, shared=True, size=values.numel(), dtype=values.dtype)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise PathError(
            f"the weights of frozen layers cannot be put into {where} ({error}): give Int8(offload_dir=...) a folder "
            "with room for them"
        ) from error
    return flat.view(weight.shape)
