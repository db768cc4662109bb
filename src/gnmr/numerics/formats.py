"""The number formats: one table, from which rounding and packing read everything."""

import difflib
import math
from dataclasses import dataclass
from typing import Literal

ScalingName = Literal["token", "group", "tile", "tensor", "mx"]
"""What shares a scale: a row of the last dimension, a group within it, a square tile of the last two, or the whole
tensor. ``"mx"`` is a group whose scale is a power of two."""

Kind = Literal["float", "int", "bfloat"]


@dataclass(frozen=True)
class Format:
    """A low-precision number format.

    Attributes:
        name: its name in recipes.
        bits: width of a code.
        kind: ``"float"`` and ``"int"`` need a scale; ``"bfloat"`` has the range of float32 and takes none.
        exponent: exponent bits, 0 for an integer.
        mantissa: explicit mantissa bits; for an integer, those below the sign.
        emin: exponent of the smallest normal number, 0 for an integer.
        max: largest finite magnitude.
    """

    name: str
    bits: int
    kind: Kind
    exponent: int
    mantissa: int
    emin: int
    max: float

    @property
    def smallest(self) -> float:
        """The smallest positive number: the lowest subnormal, or 1 for an integer."""
        return 1.0 if self.kind == "int" else 2.0 ** (self.emin - self.mantissa)

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two in the range."""
        return math.frexp(self.max)[1] - 1

    @property
    def scaled(self) -> bool:
        """Whether a tensor needs a scale to use the format's range."""
        return self.kind != "bfloat"


def _float(name: str, exponent: int, mantissa: int, largest: float) -> Format:
    emin = 2 - 2 ** (exponent - 1)
    return Format(name, 1 + exponent + mantissa, "float", exponent, mantissa, emin, largest)


def _int(bits: int) -> Format:
    # Symmetric: -2^(b-1) has no positive twin and is left out.
    return Format(f"int{bits}", bits, "int", 0, bits - 1, 0, 2.0 ** (bits - 1) - 1)


FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        # The OCP microscaling elements and the OCP 8-bit floats (E4M3 is the finite one, "fn").
        _float("e2m1", 2, 1, 6.0),
        _float("e2m3", 2, 3, 7.5),
        _float("e3m2", 3, 2, 28.0),
        _float("e4m3", 4, 3, 448.0),
        _float("e5m2", 5, 2, 57344.0),
        _int(2),
        _int(4),
        _int(6),
        _int(8),
        Format("bf16", 16, "bfloat", 8, 7, -126, (2 - 2.0**-7) * 2.0**127),
    )
}
"""Every format by its name."""


def get_format(name: str | Format) -> Format:
    """Return the format of a name; a :class:`Format` is returned as it is.

    Raises:
        ValueError: no such format; the message lists the names.

    Examples:
        >>> get_format("e4m3").max
        448.0
        >>> get_format("e3m2").smallest
        0.0625
    """
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        close = difflib.get_close_matches(str(name).lower(), FORMATS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown number format {name!r}{hint}; known formats: {', '.join(FORMATS)}")
    return FORMATS[name]
