"""A linear operator whose forward multiplies INT8 by INT8, as one function to autograd.

With codes ``c`` and scales ``s`` (a token's for x, an output channel's for W), and what is kept of x in high precision
(outlier columns, in which the codes are zeros)::

    y     = (c_x c_w^T) s_x s_w + kept W_kept^T + b
    dL/dx = dL/dy (c_w s_w)              dL/dW = dL/dy^T (c_x s_x)

It is the gradient of what was computed, rounding taken as the identity. In an INT8 backward the scales of the kept
operand go into the gradient before that is quantised, since they lie along the sum; so one set of codes serves both.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnmr.numerics.int8 import Rows, int8_matmul, quantize_rows
from gnmr.paths.base import first_order
from gnmr.paths.errors import sampled
from gnmr.paths.inputs import Entry

Measure = Callable[[Tensor, Tensor], None]
"""Takes rows of a gradient, and what its cast made of them."""


@dataclass(frozen=True)
class Operand:
    """An input in INT8, with its outlier columns in high precision.

    Attributes:
        rows: codes (m, k), zeros in the outlier columns, and scales.
        columns: (c,) int64, ascending, or None where nothing is kept.
        kept: (m, c) in the dtype that the operator computes in, or None.
    """

    rows: Rows
    columns: Tensor | None = None
    kept: Tensor | None = None

    def sample(self) -> Tensor:
        """Return (m', k) float32: what the rows that are looked at for errors have become."""
        found = Rows(sampled(self.rows.codes), sampled(self.rows.scale)).dequantize(torch.float32)
        if self.columns is not None and self.kept is not None:
            found[:, self.columns] = sampled(self.kept).float()
        return found


def quantize_input(x: Tensor, outliers: float | None, dtype: torch.dtype) -> Operand:
    """Quantise an input by tokens.

    Args:
        x: (m, k).
        outliers: columns with a magnitude at or above it are kept in high precision; None keeps none.
        dtype: that of what is kept.

    Examples:
        >>> operand = quantize_input(torch.tensor([[1.0, 50.0], [0.5, 2.0]]), 6.0, torch.bfloat16)
        >>> operand.rows.codes.tolist(), operand.columns.tolist(), operand.kept.tolist()
        ([[127, 0], [127, 0]], [1], [[50.0], [2.0]])
    """
    if outliers is None or not x.numel():
        return Operand(quantize_rows(x))
    columns = (x.abs().amax(0) >= outliers).nonzero().squeeze(1)
    if not len(columns):
        return Operand(quantize_rows(x))
    return Operand(quantize_rows(x.index_fill(1, columns, 0)), columns, x[:, columns].to(dtype))


class Int8Linear(torch.autograd.Function):
    """``x W^T + b`` in INT8; ``weight`` is there for its gradient (None: frozen), ``rows`` are its codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        operand: Operand,
        rows: Rows,
        kept_weight: Tensor | None,
        dtype: torch.dtype,
        backward: str,
        measure: Measure | None,
        entry: "weakref.ref[Entry]",
    ) -> Tensor:
        """Return y (..., n) in ``dtype``; ``kept_weight`` is (n, c), the weight of what is kept of x."""
        # The codes of the weight are kept as they are: they stay anyway, and belong to no saved-tensor hook.
        ctx.weight = rows
        ctx.how = (backward, measure, entry)
        ctx.like = (x.shape, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
        input_side = (*operand.rows, operand.columns, operand.kept) if ctx.needs_input_grad[1] else (None,) * 4
        if ctx.needs_input_grad[0] and kept_weight is not None:
            ctx.save_for_backward(*input_side, operand.columns, kept_weight)
        else:
            ctx.save_for_backward(*input_side, None, None)
        y = _scaled(int8_matmul(operand.rows.codes, rows.codes.t()), dtype).mul_(operand.rows.scale)
        y = y.mul_(rows.scale.t())
        if operand.kept is not None and kept_weight is not None:
            y.add_(operand.kept @ kept_weight.t())
        if bias is not None:
            y.add_(bias)
        return y.to(dtype).view(*x.shape[:-1], rows.codes.shape[0])

    @staticmethod
    @first_order
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b."""
        codes, scale, columns, kept, outliers, kept_weight = ctx.saved_tensors
        how, measure, entry = ctx.how
        x_shape, x_dtype, weight_dtype, bias_dtype = ctx.like
        if (made := entry()) is not None:
            # After a backward the input may be filled anew behind its version counter, as NumPy does.
            made.made.clear()
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            of_input = measure if codes is None else None
            dx = _times(rows, ctx.weight, how, of_input)
            if kept_weight is not None:
                dx[:, outliers] = rows @ kept_weight
            dx = dx.to(x_dtype).view(x_shape)
        if ctx.needs_input_grad[1]:
            dw = _times(rows.t(), Rows(codes, scale), how, measure)
            if kept is not None:
                dw[:, columns] = rows.t() @ kept
            dw = dw.to(weight_dtype)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0).to(bias_dtype)
        return dx, dw, db, None, None, None, None, None, None, None


def _times(grad: Tensor, operand: Rows, backward: str, measure: Measure | None) -> Tensor:
    """Return (m, k) ``grad @ operand`` in grad's dtype, of (m, n) and (n, k)."""
    if backward == "high":
        return grad @ operand.dequantize(grad.dtype)
    grad, dtype = scaled_gradient(grad, operand.scale), grad.dtype
    cast = quantize_rows(grad)
    if measure is not None:
        measure(sampled(grad), Operand(cast).sample())
    return _scaled(int8_matmul(cast.codes, operand.codes), dtype).mul_(cast.scale).to(dtype)


def scaled_gradient(grad: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient (m, n) with the scales (n, 1) that lie along the sum, as an INT8 backward casts it."""
    return grad * scale.t()


def _scaled(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an integer product as the floats in which it is scaled."""
    return product.to(torch.float64 if dtype == torch.float64 else torch.float32)
