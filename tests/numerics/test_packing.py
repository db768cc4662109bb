"""Packing against ml_dtypes and against the rounding that it must reproduce."""

import ml_dtypes
import numpy as np
import pytest
import torch

from gnmr.numerics.formats import FORMATS
from gnmr.numerics.packing import pack, packed_bytes, unpack
from gnmr.numerics.rounding import fake_quantize

NAMES = list(FORMATS)
STANDARD = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
SHAPES = [(5, 7), (2, 3, 64), (1, 1), (9,), (4, 300), (0, 8), (3, 0), (2, 0, 5)]


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaling", ["token", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_unpack_is_fake_quantize_bit_for_bit(name, scaling, dtype):
    for shape in SHAPES:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
        packed = pack(x, name, scaling, 16)
        expected = fake_quantize(x, name, scaling=scaling, group_size=16)
        assert torch.equal(bits(unpack(packed)), bits(expected)), shape
        assert packed.nbytes == packed_bytes(shape, x.element_size(), name, scaling, 16)


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_draws_the_noise_of_fake_quantize(name):
    x = torch.randn(16, 33)
    packed = pack(x, name, generator=torch.Generator().manual_seed(5))
    expected = fake_quantize(x, name, generator=torch.Generator().manual_seed(5))
    assert torch.equal(bits(unpack(packed)), bits(expected))


@pytest.mark.parametrize("name", STANDARD)
def test_codes_are_those_of_the_standard(name):
    width = FORMATS[name].bits
    codes = np.arange(2**width, dtype=np.uint8)
    values = codes.view(STANDARD[name]).astype(np.float32)
    finite = np.isfinite(values)
    codes, x = codes[finite], torch.from_numpy(values[finite])  # absmax = max, so the scale is 1
    packed = pack(x, name)
    assert torch.equal(unpack(packed), x)
    stream = "".join(f"{byte:08b}"[::-1] for byte in packed.data.tolist())
    found = [int(stream[i * width : (i + 1) * width][::-1], 2) for i in range(len(codes))]
    assert found == codes.tolist()


@pytest.mark.parametrize("name", STANDARD)
def test_random_and_halfway_values_round_as_ml_dtypes(name):
    largest = FORMATS[name].max
    codes = np.arange(2 ** FORMATS[name].bits, dtype=np.uint8)
    grid = torch.from_numpy(codes.view(STANDARD[name]).astype(np.float32))
    grid = grid[grid.isfinite()].sort().values
    x = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, (torch.rand(999) * 2 - 1) * largest])
    expected = torch.from_numpy(x.numpy().astype(STANDARD[name]).astype(np.float32))
    assert torch.equal(unpack(pack(x, name)), expected)


def test_the_stated_number_of_bytes():
    x = torch.randn(4, 64)
    sizes = {name: pack(x, name).data.nbytes for name in NAMES}
    assert sizes == {
        "e2m1": 128, "int4": 128, "e2m3": 192, "e3m2": 192, "int6": 192, "e4m3": 256, "e5m2": 256,
        "int8": 256, "int2": 64, "bf16": 512,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaling", ["token", "group"])
def test_a_fault_stays_visible_and_zeros_stay_zeros(name, scaling):
    x = torch.randn(4, 10)
    x[0, 3], x[1, 9], x[2] = torch.nan, -torch.inf, 0.0
    out = unpack(pack(x, name, scaling, 4))
    expected = fake_quantize(x, name, scaling=scaling, group_size=4)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert not out[0, 3].isfinite()
    assert not out[1, 9].isfinite()
    assert (out[2] == 0).all()
    assert out[3].isfinite().all()
    if name != "bf16" and scaling == "token":
        assert out[:2].isnan().all()


def test_strides_do_not_matter():
    x = torch.randn(6, 8, 5)
    for view in (x.transpose(0, 1), x[:, ::2], x.permute(2, 0, 1), x[:1].expand(3, 8, 5)):
        assert torch.equal(unpack(pack(view, "e2m1")), unpack(pack(view.contiguous(), "e2m1")))


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="'tensor' cannot be packed"):
        pack(torch.ones(2), "e2m1", "tensor")
    with pytest.raises(ValueError, match="group_size must be an int >= 1, got 0"):
        pack(torch.ones(2), "e2m1", "group", 0)
    with pytest.raises(ValueError, match="did you mean 'e2m1'"):
        pack(torch.ones(2), "E2M1")
