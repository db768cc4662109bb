"""INT8 as it is computed with: codes with a scale for each row, and the exact integer product of two of them.

The codes are those of ``fake_quantize(x, "int8")``: ``round(x / s)``, ties to even, where ``s`` is the row's absmax
over 127. A row with a NaN or an Inf has the scale NaN, so that everything made of it is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.numerics.rounding import absmax, scale_from

LONGEST = (2**31 - 1) // 127**2
"""The longest sum of products of codes that int32 holds whatever they are: 133 144."""


class Rows(NamedTuple):
    """A matrix in INT8 with a scale for each row.

    Attributes:
        codes: (m, k) int8, from -127 to 127.
        scale: (m, 1) float32; NaN for a row that has a NaN or an Inf, 1 for a row of zeros.
    """

    codes: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return (m, k): codes times scales, multiplied in float32 and rounded once."""
        return (self.codes * self.scale).to(dtype)


def quantize_rows(x: Tensor) -> Rows:
    """Quantise each row to INT8, symmetrically.

    Args:
        x: (m, k), any floating dtype and layout.

    Examples:
        >>> codes, scale = quantize_rows(torch.tensor([[0.5, -1.27, 0.004], [0.0, 0.0, 0.0]]))
        >>> codes
        tensor([[  50, -127,    0],
                [   0,    0,    0]], dtype=torch.int8)
        >>> scale
        tensor([[0.0100],
                [1.0000]])
    """
    x = x.float() if x.dtype == torch.float64 else x
    scale = scale_from(absmax(x, "token"), "int8")
    scale.add_(scale, alpha=0.0)  # Inf becomes NaN
    return Rows(torch.div(x, scale).round_().to(torch.int8), scale)


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of two matrices of codes, by ``torch._int_mm``.

    Off the CPU the operands are laid out as the kernels of cuBLASLt want them (a by rows, b by columns), and padded
    with zeros to more than 16 rows and multiples of 8 columns, which cuts nothing and adds nothing.

    Args:
        a: (m, k) int8, none below -127.
        b: (k, n) int8, likewise.

    Returns:
        (m, n) int32; int64 where k is above :data:`LONGEST`, beyond which int32 might wrap.

    Examples:
        >>> a = torch.full((1, 3), 127, dtype=torch.int8)
        >>> int8_matmul(a, -a.t())
        tensor([[-48387]], dtype=torch.int32)
    """
    k = a.shape[1]
    if k > LONGEST:
        parts = [slice(i, i + LONGEST) for i in range(0, k, LONGEST)]
        return torch.stack([int8_matmul(a[:, part], b[part]).long() for part in parts]).sum(0)
    return torch._int_mm(a, b) if a.device.type == "cpu" else _fitted_matmul(a, b)


def _fitted_matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    a = F.pad(a, (0, -k % 8, 0, max(17 - m, 0))).contiguous()
    b = F.pad(b.t(), (0, -k % 8, 0, -n % 8)).contiguous().t()
    return torch._int_mm(a, b)[:m, :n]
