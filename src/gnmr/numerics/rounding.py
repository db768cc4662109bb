"""Rounding to a number format, with the scale that brings a tensor into its range.

A tensor is quantised as ``Q(x) = round(x / s) * s`` with one scale ``s`` for each row of the last dimension
(``"token"``), for each group within it (``"group"``), for each square tile of the last two dimensions (``"tile"``, as
DeepSeek-V3 has it for weights, arXiv 2412.19437, section 3.3.2) or for the whole tensor (``"tensor"``), so that the
largest magnitude meets the largest number of the format (paper, setting B). Arithmetic is float32 whatever the input;
results have the input's dtype.

``"mx"`` are the groups of the OCP microscaling formats (MX specification 1.0, section 6.3). Their scale is a power of
two (E8M0): that of the largest magnitude over that of the format's largest, so that the upper end of the largest
magnitude's binade may saturate.

What the hardware casts hide stays visible here: an Inf or a NaN comes out as NaN (with a scale taken from the
data, with all that shares the scale), never as the largest finite number.
"""

from typing import get_args

import torch
from torch import Tensor

from gnmr.numerics.formats import Format, ScalingName, get_format

SATURATED, UNDERFLOWED, TOTAL = 0, 1, 2
"""Places in a (3,) int64 tensor of counts."""

_EXPONENT_BITS = 0x7F80_0000
_TINY = 2.0**-126  # smallest normal float32: dividing by less loses the mantissa or overflows


def round_to(x: Tensor, fmt: str | Format, generator: torch.Generator | None = None) -> Tensor:
    """Round scaled values to the nearest number of a format, ties to even.

    Args:
        x: any shape, any floating dtype, already divided by its scale.
        fmt: a format or its name.
        generator: round stochastically instead, up with the probability that keeps the mean.

    Returns:
        float32 of the same shape: beyond the range ±max of the format, NaN and ±Inf as NaN. ``bf16`` rounds as
        torch's own cast does, which has infinities.

    Examples:
        >>> round_to(torch.tensor([0.3, 2.5, -5.1, 100.0, torch.inf]), "e2m1")
        tensor([ 0.5000,  2.0000, -6.0000,  6.0000,     nan])
    """
    fmt = get_format(fmt)
    return _clamp(_round(x.float(), fmt, generator), fmt)


def absmax(x: Tensor, scaling: ScalingName = "token", group_size: int = 128) -> Tensor:
    """Return the largest magnitude of all that shares a scale.

    Args:
        x: (..., n).
        scaling: what shares a scale, a name of :data:`gnmr.numerics.formats.ScalingName`.
        group_size: elements in a group, or in a row and in a column of a tile; the last ones may be smaller.

    Returns:
        (..., 1), (..., ceil(n / group_size)), (..., ceil(m / group_size), ceil(n / group_size)) for tiles of (..., m,
        n), or (), in the dtype of ``x``. NaN and Inf propagate; nothing at all gives 0.

    Raises:
        ValueError: unknown scaling, or a group size below 1.

    Examples:
        >>> absmax(torch.tensor([[1.0, -2.0, 3.0]]), "group", group_size=2)
        tensor([[2., 3.]])
    """
    check_scaling(scaling, group_size)
    if scaling == "tensor":
        return _absmax_all(x)
    parts = _absmax_rows(_split(x, scaling, group_size))
    return parts if scaling == "token" else parts.squeeze(-1)


def scale_of(x: Tensor, fmt: str | Format, scaling: ScalingName = "token", group_size: int = 128) -> Tensor:
    """Return the scale that brings the largest magnitude to the largest number of a format.

    Args:
        x: (..., n).
        fmt: a format or its name.
        scaling: see :func:`absmax`, which also gives the shape.
        group_size: see :func:`absmax`.

    Returns:
        float32 scales, finite and > 0 where ``x`` is finite: 1 where all is zero. For ``bf16``, ones.

    Examples:
        >>> scale_of(torch.tensor([[0.0, 0.0], [3.0, -12.0]]), "e2m1")
        tensor([[1.],
                [2.]])
    """
    return scale_from(absmax(x, scaling, group_size), fmt, power_of_two=scaling == "mx")


def scale_from(amax: Tensor, fmt: str | Format, *, power_of_two: bool = False) -> Tensor:
    """Return the float32 scale of a largest magnitude: see :func:`scale_of`; a power of two for ``"mx"``."""
    fmt = get_format(fmt)
    if not fmt.scaled:
        return torch.ones_like(amax, dtype=torch.float32)
    amax = amax.float()
    if power_of_two:
        # Its exponent bits alone; those of NaN and Inf are Inf, which spoils what shares the scale.
        power = (amax.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        return (power * 2.0**-fmt.emax).clamp_(min=_TINY).masked_fill_(amax == 0, 1.0)
    return (amax / fmt.max).clamp_(min=_TINY).masked_fill_(amax == 0, 1.0)


def fake_quantize(
    x: Tensor,
    fmt: str | Format,
    *,
    scaling: ScalingName = "token",
    group_size: int = 128,
    scale: Tensor | None = None,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Round a tensor to a format and scale it back.

    Args:
        x: (..., n), any floating dtype.
        fmt: a format or its name. ``bf16`` takes no scale.
        scaling: what shares a scale, see :func:`absmax`.
        group_size: see :func:`absmax`.
        scale: a float32 scale that broadcasts to ``x``, in place of the one from the data.
        generator: round stochastically with it.
        counts: (3,) int64, to which saturated, underflowed (a number that became zero) and all elements are
            added in place. With a scale from the data nothing can saturate, but under ``"mx"``.

    Returns:
        The dtype and shape of ``x``.

    Raises:
        ValueError: unknown format or scaling, or a group size below 1.

    Examples:
        >>> x = torch.tensor([[0.1, 1.0, 3.0], [0.0, 0.0, 0.0]])
        >>> fake_quantize(x, "e2m1")
        tensor([[0., 1., 3.],
                [0., 0., 0.]])
        >>> counts = torch.zeros(3, dtype=torch.int64)
        >>> fake_quantize(x, "int4", scale=torch.tensor(0.25), counts=counts)
        tensor([[0.0000, 1.0000, 1.7500],
                [0.0000, 0.0000, 0.0000]])
        >>> counts  # 3.0 saturated, 0.1 became zero
        tensor([1, 1, 6])
    """
    fmt = get_format(fmt)
    check_scaling(scaling, group_size)
    if not fmt.scaled:
        out = round_to(x, fmt, generator).to(x.dtype)
        if counts is not None:
            _count(counts, x, out, None, fmt)
        return out
    values = x.float()
    saturates = scale is not None or scaling == "mx"
    split = scale is None and scaling != "tensor"
    if split:
        values = _split(values, scaling, group_size)
    if scale is None:
        largest = _absmax_rows(values) if split else _absmax_all(values)
        scale = scale_from(largest, fmt, power_of_two=scaling == "mx")
    rounded = _round(values / scale, fmt, generator)
    if counts is not None:
        # Before the clamp, which then works in place: another scale from the data leaves nothing beyond the range.
        beyond = _beyond(rounded, fmt.max) if saturates else None
    out = _clamp(rounded, fmt).mul_(scale)
    if split:
        out = _join(out, x, scaling, group_size)
    if counts is not None:
        _count(counts, x, out, beyond, fmt)
    return out.to(x.dtype)


def check_scaling(scaling: str, group_size: int = 128) -> None:
    """Raise ValueError for a scaling that does not exist or a group size below 1."""
    if scaling not in get_args(ScalingName):
        raise ValueError(f"unknown scaling {scaling!r}: it must be one of {', '.join(get_args(ScalingName))}")
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be an int >= 1, got {group_size!r}")


def _round(x: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    """Round float32 to the format's grid without its upper end; a new tensor. Inf becomes NaN."""
    if fmt.kind == "int":
        # Inf - Inf: an integer grid goes on for ever, and the clamp would hide the Inf.
        return _to_integer(x, generator).add_(x, alpha=0.0)
    if fmt.kind == "bfloat" and generator is None:
        return x.to(torch.bfloat16).float()
    # The power of two at or below |x|: its exponent bits alone. Division by it turns Inf into NaN.
    quantum = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    quantum = quantum.clamp_(min=2.0**fmt.emin).mul_(2.0**-fmt.mantissa)
    return _to_integer(x / quantum, generator).mul_(quantum)


def _to_integer(x: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.round(x)
    below = torch.floor(x)
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    # Compared, not added: x + noise would round, and move numbers that the format holds exactly.
    return below.add_(noise < x - below)


def _clamp(rounded: Tensor, fmt: Format) -> Tensor:
    return rounded.clamp_(-fmt.max, fmt.max) if fmt.scaled else rounded


def _beyond(rounded: Tensor, largest: float) -> Tensor | None:
    """Count the magnitudes above ``largest``; None for none."""
    # On a CPU a look at the extremes, which costs no sync, saves the count nearly always.
    if rounded.device.type == "cpu" and rounded.numel() and float(_absmax_all(rounded)) <= largest:
        return None
    return rounded.abs().gt_(largest).count_nonzero()


def _count(counts: Tensor, x: Tensor, out: Tensor, beyond: Tensor | None, fmt: Format) -> None:
    if beyond is not None:
        counts[SATURATED].add_(beyond)
    # Numbers that became zero; two reductions are faster than comparing element by element.
    counts[UNDERFLOWED].add_(x.count_nonzero()).sub_(out.count_nonzero())
    counts[TOTAL].add_(x.numel())


def _absmax_rows(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(dim=-1, keepdim=True)  # aminmax over one dimension takes ten times as long


def _absmax_all(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(())
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _split(x: Tensor, scaling: ScalingName, group_size: int) -> Tensor:
    """Bring what shares a scale into the last dimension, zeros at the end where a group or tile is short."""
    if scaling == "token" or x.ndim == 0:
        return x
    if scaling != "tile" or x.ndim == 1:
        return _grouped(x, group_size)
    short = [-size % group_size for size in x.shape[-2:]]
    padded = torch.nn.functional.pad(x, (0, short[1], 0, short[0])) if any(short) else x
    rows, columns = (size // group_size for size in padded.shape[-2:])
    tiles = padded.reshape(*x.shape[:-2], rows, group_size, columns, group_size)
    return tiles.transpose(-3, -2).flatten(-2)


def _join(parts: Tensor, x: Tensor, scaling: ScalingName, group_size: int) -> Tensor:
    """Undo :func:`_split` of x."""
    if scaling == "token" or x.ndim == 0:
        return parts
    if scaling != "tile" or x.ndim == 1:
        return parts.flatten(-2)[..., : x.shape[-1]]
    rows, columns = (parts.shape[i] * group_size for i in (-3, -2))
    tiles = parts.unflatten(-1, (group_size, group_size)).transpose(-3, -2)
    return tiles.reshape(*x.shape[:-2], rows, columns)[..., : x.shape[-2], : x.shape[-1]]


def _grouped(x: Tensor, group_size: int) -> Tensor:
    """Split the last dimension: (..., n) to (..., ceil(n / group_size), group_size), zeros at the end."""
    short = -x.shape[-1] % group_size
    padded = torch.nn.functional.pad(x, (0, short)) if short else x
    return padded.unflatten(-1, (-1, group_size)) if padded.shape[-1] else padded.unsqueeze(-2)
