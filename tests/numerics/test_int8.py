"""INT8 codes against NumPy and against the rounding that they share, products against int64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr.numerics import fake_quantize, int8
from gnmr.numerics.int8 import Rows, int8_matmul, quantize_rows

SIZES = st.integers(0, 20)


@settings(max_examples=50, deadline=None)
@given(rows=SIZES, width=SIZES, seed=st.integers(0, 99), exponent=st.integers(-40, 35))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_those_of_fake_quantize(dtype, rows, width, seed, exponent):
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent).to(dtype)
    found = quantize_rows(x)

    assert found.codes.dtype == torch.int8
    assert found.scale.shape == (rows, 1)
    assert torch.equal(found.dequantize(dtype), fake_quantize(x, "int8"))
    if x.numel():
        reference = np.rint(x.float().numpy() / found.scale.numpy())
        assert np.array_equal(found.codes.numpy(), reference)
        assert np.abs(reference).max() <= 127


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 8), width=st.integers(1, 40))
def test_no_element_is_off_by_more_than_half_a_step(seed, rows, width):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = quantize_rows(x)
    step = found.scale.double()

    assert ((found.codes.double() * step - x).abs() <= step * (0.5 + 1e-5)).all()
    assert torch.equal(found.codes.abs().amax(1), torch.full((rows,), 127, dtype=torch.int8))


def test_a_row_of_zeros_is_zeros_and_one_with_inf_or_nan_is_nan():
    x = torch.tensor([[0.0, 0.0], [1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0], [1e-42, 0.0]])
    found = quantize_rows(x)

    assert found.dequantize(torch.float32).isnan().all(1).tolist() == [False, True, True, False, False]
    assert found.codes[0].tolist() == [0, 0]
    assert found.scale[0] == 1


@settings(max_examples=50, deadline=None)
@given(m=SIZES, k=SIZES, n=SIZES, turned=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 99))
def test_products_are_exact_in_every_shape_and_layout(m, k, n, turned, seed):
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-127, 128, size, dtype=torch.int8, generator=draw) for size in ((m, k), (k, n)))
    if turned[0]:
        a = a.t().contiguous().t()
    if turned[1]:
        b = b.t().contiguous().t()
    expected = torch.einsum("mk,kn->mn", a.long(), b.long())

    assert torch.equal(int8_matmul(a, b).long(), expected)
    assert torch.equal(int8._fitted_matmul(a, b).long(), expected), "the padding that other devices need"


def test_sums_beyond_int32_do_not_wrap():
    k = int8.LONGEST + 1
    a = torch.full((1, k), 127, dtype=torch.int8)

    assert int8_matmul(a, a.t()).item() == k * 127**2 > 2**31 - 1
    assert int8_matmul(a[:, 1:], a[:, 1:].t()).dtype == torch.int32


def test_bytes():
    assert Rows(torch.zeros(3, 5, dtype=torch.int8), torch.ones(3, 1)).nbytes == 15 + 12
