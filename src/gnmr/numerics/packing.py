"""Packing: a tensor as codes of a low-precision format, really that many bits each.

A code is a sign bit and a magnitude. For a float format the magnitude is the format's own bit pattern, so that
an ``e2m1`` code is the code of the standard; integers are stored as sign and magnitude too, which keeps the sign
of a zero and leaves no code unused. Codes lie in logical (row-major) order, the first in the lowest bits:

====== ===================== =========
bits   codes                 bytes
====== ===================== =========
2      four                  one
4      two                   one
6      four                  three
8      one                   one
====== ===================== =========

Beside the codes stands the largest magnitude of each row or group, in the dtype of the input, where it is exact;
both ends make the float32 scale from it. ``unpack(pack(x, f))`` is ``fake_quantize(x, f)``, bit for bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from gnmr.numerics.formats import Format, get_format
from gnmr.numerics.rounding import (
    _EXPONENT_BITS,
    _grouped,
    _to_integer,
    absmax,
    check_scaling,
    round_to,
    scale_from,
)

PackScaling = Literal["token", "group"]

_CHUNK = 1 << 15
"""Elements that are encoded at a time on a CPU."""

_CODES_OF_BYTES = {2: (4, 1), 4: (2, 1), 6: (4, 3), 8: (1, 1)}  # bits: (codes, bytes)


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed tensor.

    Attributes:
        data: (bytes,) uint8 codes; for ``bf16``, the values in bfloat16 in the tensor's own shape.
        absmax: largest magnitude of each row (..., 1) or group (..., ceil(n / group_size)) in ``dtype``;
            empty for ``bf16``.
        shape: of the tensor.
        dtype: of the tensor.
        format: of the codes.
        scaling: ``"token"`` or ``"group"``.
        group_size: elements in a group.
    """

    data: Tensor
    absmax: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format
    scaling: PackScaling = "token"
    group_size: int = 128

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of what the scales are made from."""
        return self.data.nbytes + self.absmax.nbytes


def pack(
    x: Tensor,
    fmt: str | Format,
    scaling: PackScaling = "token",
    group_size: int = 128,
    generator: torch.Generator | None = None,
) -> Packed:
    """Round a tensor to a format and keep the codes.

    Args:
        x: (..., n), any floating dtype, any strides.
        fmt: a format or its name. ``bf16`` of a bfloat16 tensor is the tensor itself, not a copy.
        scaling: one scale for each row (``"token"``) or each group of a row (``"group"``).
        group_size: elements in a group; the last group of a row may be shorter.
        generator: round stochastically with it.

    Returns:
        The packed tensor. A row (or group) that holds a NaN or an Inf unpacks to NaN.

    Raises:
        ValueError: unknown format or scaling, or a group size below 1.

    Examples:
        >>> packed = pack(torch.tensor([[1.0, -0.5, 6.0], [0.0, 0.0, 0.0]]), "e2m1")
        >>> packed.data  # six codes of four bits, the first in the lowest
        tensor([146,   7,   0], dtype=torch.uint8)
        >>> unpack(packed)
        tensor([[ 1.0000, -0.5000,  6.0000],
                [ 0.0000,  0.0000,  0.0000]])
    """
    fmt = get_format(fmt)
    _check(scaling, group_size)
    x = x.detach()
    if not fmt.scaled:
        data = x if generator is None else round_to(x, fmt, generator)
        empty = x.new_empty(0)
        return Packed(data.to(torch.bfloat16), empty, tuple(x.shape), x.dtype, fmt, scaling, group_size)
    amax = absmax(x, scaling, group_size)
    scale = scale_from(amax, fmt)
    if scaling == "group":
        codes = _encode(_grouped(x, group_size), scale.unsqueeze(-1), fmt, generator)
        codes = codes.flatten(-2)[..., : x.shape[-1]]
    else:
        codes = _encode(x, scale, fmt, generator)
    data = _to_bytes(codes.reshape(-1), fmt.bits)
    return Packed(data, amax, tuple(x.shape), x.dtype, fmt, scaling, group_size)


def unpack(packed: Packed) -> Tensor:
    """Return the rounded tensor, in its own shape and dtype.

    Examples:
        >>> unpack(pack(torch.tensor([3.1, 0.2, -9.0]), "int4"))
        tensor([ 2.5714,  0.0000, -9.0000])
    """
    fmt, shape = packed.format, packed.shape
    if not fmt.scaled:
        return packed.data.to(packed.dtype)
    count = prod(shape)
    values = _decode(packed.data, fmt)[:count].reshape(shape)
    scale = scale_from(packed.absmax, fmt)
    scale = scale.add_(scale, alpha=0.0)  # Inf becomes NaN, as when the row is rounded
    if packed.scaling == "token":
        return values.mul_(scale).to(packed.dtype)
    if shape[-1] % packed.group_size == 0 and count:
        grouped = values.unflatten(-1, (-1, packed.group_size))
        return grouped.mul_(scale.unsqueeze(-1)).flatten(-2).to(packed.dtype)
    wide = scale.repeat_interleave(packed.group_size, dim=-1)[..., : shape[-1]]
    return values.mul_(wide).to(packed.dtype)


def packed_bytes(
    shape: tuple[int, ...],
    itemsize: int,
    fmt: str | Format,
    scaling: PackScaling = "token",
    group_size: int = 128,
) -> int:
    """Return :attr:`Packed.nbytes` of a tensor without packing it.

    Args:
        shape: of the tensor.
        itemsize: bytes of one of its elements.
        fmt: a format or its name.
        scaling: see :func:`pack`.
        group_size: see :func:`pack`.

    Examples:
        >>> packed_bytes((32, 128), 2, "e2m1")  # 2048 bytes of codes, 64 of scales
        2112
    """
    fmt = get_format(fmt)
    _check(scaling, group_size)
    count = prod(shape)
    if not fmt.scaled:
        return 2 * count
    codes, width = _CODES_OF_BYTES[fmt.bits]
    rows = prod(shape[:-1])
    scales = rows if scaling == "token" else rows * max(-(-shape[-1] // group_size), 1)
    return -(-count // codes) * width + scales * itemsize


def _check(scaling: str, group_size: int) -> None:
    check_scaling(scaling, group_size)
    if scaling not in get_args(PackScaling):
        raise ValueError(f"scaling={scaling!r} cannot be packed: it must be 'token' or 'group'")


def _encode(x: Tensor, scale: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    """Return the uint8 codes of (..., n) values with (..., 1) scales.

    On a CPU a few rows at a time, which stay in its cache for all passes. Noise is drawn in one piece: its order
    is part of the result.
    """
    if generator is not None or x.device.type != "cpu" or x.numel() <= 2 * _CHUNK:
        return _encode_at_once(x.float() / scale, fmt, generator)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    rows, scales, out = x.flatten(0, -2), scale.view(-1, 1), codes.view(-1, x.shape[-1])
    step = max(_CHUNK // x.shape[-1], 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        out[part] = _encode_at_once(rows[part].float() / scales[part], fmt, None)
    return codes


def _encode_at_once(y: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    """Return the uint8 codes of scaled float32 values.

    The code of a float is ``(exponent index << mantissa) + r``, with ``|y|`` rounded to ``r`` quanta: an r that
    reaches the next power of two carries into the exponent by itself, and subnormals have index 0.
    """
    if fmt.kind == "int":
        steps = _to_integer(y, generator)
        magnitude = steps.abs().to(torch.int32)
    else:
        quantum = (y.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        quantum = quantum.clamp_(min=2.0**fmt.emin).mul_(2.0**-fmt.mantissa)
        steps = _to_integer(y / quantum, generator)
        # A quantum is a power of two: its bits are its exponent, moved up to where the code has it.
        magnitude = quantum.view(torch.int32) >> (23 - fmt.mantissa)
        magnitude -= (127 + fmt.emin - fmt.mantissa) << fmt.mantissa
        magnitude += steps.abs().to(torch.int32)
    # The upper end is reached from beyond by stochastic rounding only; the lower is for what a NaN becomes.
    magnitude.clamp_(0, _largest_code(fmt))
    # The sign is that of the rounded value: a negative number may round up to +0.
    sign = (steps.view(torch.int32) >> 31) & (1 << (fmt.bits - 1))
    return (magnitude | sign).to(torch.uint8)


def _largest_code(fmt: Format) -> int:
    if fmt.kind == "int":
        return int(fmt.max)
    exponent, fraction = 0, fmt.max
    while fraction >= 2:
        exponent, fraction = exponent + 1, fraction / 2
    return (exponent - fmt.emin << fmt.mantissa) + int(fraction * 2**fmt.mantissa)


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack (n,) uint8 codes. Whole words are shifted, so that each pass is contiguous (little-endian)."""
    if bits == 8:
        return codes.contiguous()
    group, width = _CODES_OF_BYTES[bits]
    short = -codes.numel() % group
    codes = torch.nn.functional.pad(codes, (0, short)) if short else codes.contiguous()
    if bits == 4:
        pair = codes.view(torch.int16)
        return ((pair >> 4) | pair).to(torch.uint8)
    four = codes.view(torch.int32)
    if bits == 2:
        four = (four >> 6) | four
        return ((four >> 12) | four).to(torch.uint8)
    four = (four & 0x3F) | (four >> 2 & 0xFC0) | (four >> 4 & 0x3F000) | (four >> 6 & 0xFC0000)
    return four.view(torch.uint8).view(-1, 4)[:, :width].reshape(-1)


def _decode(data: Tensor, fmt: Format) -> Tensor:
    """Return float32 values of all codes, those that only fill the last byte included."""
    if fmt.bits == 6:
        three = data.view(-1, 3).to(torch.int32)
        word = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
        codes = torch.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], dim=-1)
        return _table(fmt, data.device)[codes].view(-1)
    return _table(fmt, data.device)[data.to(torch.int32)].view(torch.float32)


@lru_cache(maxsize=64)
def _table(fmt: Format, device: torch.device) -> Tensor:
    """What a byte holds: its two or four values lie in one wide element, which one look-up fetches."""
    top = 1 << (fmt.bits - 1)
    codes = torch.arange(2 * top)
    magnitude = codes & (top - 1)
    if fmt.kind == "int":
        values = magnitude.float()
    else:
        index = magnitude >> fmt.mantissa
        fraction = (magnitude & ((1 << fmt.mantissa) - 1)) + ((index > 0).int() << fmt.mantissa)
        values = torch.ldexp(fraction.float(), (index - 1).clamp(min=0) + fmt.emin - fmt.mantissa)
    values = torch.where(codes >= top, -values, values).float()
    if fmt.bits in {6, 8}:
        return values.to(device)
    byte = torch.arange(256)
    parts = [values[byte >> shift & (2 * top - 1)] for shift in range(0, 8, fmt.bits)]
    wide = torch.stack(parts, dim=-1)
    return wide.view(torch.float64 if fmt.bits == 4 else torch.complex128).view(-1).to(device)
