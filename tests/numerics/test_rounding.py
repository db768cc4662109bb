"""Rounding against ml_dtypes (floats) and numpy's rint (integers), bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr.numerics import FORMATS, absmax, fake_quantize, round_to, scale_of

DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}
INTS = ["int2", "int4", "int6", "int8"]
SCALED = [*(name for name in DTYPES if name != "bf16"), *INTS]


def values_of(name):
    """All finite numbers of a float format, ascending, as float64."""
    dtype = DTYPES[name]
    bits = FORMATS[name].bits
    codes = np.arange(2**bits, dtype=np.uint16 if bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def same_bits(result, expected):
    np.testing.assert_array_equal(result.numpy().view(np.int32), np.asarray(expected, np.float32).view(np.int32))


def reference(x, name):
    """Round float32 by an implementation that is not ours; saturating, NaN for NaN and Inf."""
    x = np.asarray(x, np.float32)
    largest = np.float32(FORMATS[name].max)
    if name in INTS:
        out = np.clip(np.rint(x), -largest, largest)
    else:
        out = np.clip(x, -largest, largest).astype(DTYPES[name]).astype(np.float32)
    return np.where(np.isfinite(x), out, np.float32(np.nan))


@pytest.mark.parametrize("name", DTYPES)
def test_every_value_of_a_format_is_kept(name):
    values = np.concatenate([values_of(name), [-0.0]]).astype(np.float32)

    same_bits(round_to(torch.from_numpy(values), name), values)


@pytest.mark.parametrize("name", DTYPES)
def test_halfway_points_and_their_neighbours(name):
    values = values_of(name)
    halfway = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([halfway, *near])

    same_bits(round_to(torch.from_numpy(x), name), x.astype(DTYPES[name]).astype(np.float32))


@pytest.mark.parametrize("name", SCALED)
def test_random_values_in_all_binades(name):
    rng = np.random.default_rng(0)
    top = np.log2(FORMATS[name].max) + 2
    exponents = rng.uniform(np.log2(FORMATS[name].smallest) - 4, top, 100_000)
    x = (rng.choice([-1, 1], exponents.shape) * 2**exponents).astype(np.float32)

    same_bits(round_to(torch.from_numpy(x), name), reference(x, name))


@pytest.mark.parametrize("name", DTYPES)
def test_below_the_smallest_number(name):
    smallest = np.float32(FORMATS[name].smallest)
    x = smallest * np.float32([0.25, 0.5, 0.75, 1.5, 2.5, -0.5, -0.25])

    same_bits(round_to(torch.from_numpy(x), name), x.astype(DTYPES[name]).astype(np.float32))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(SCALED),
    x=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
)
def test_any_float32_rounds_as_the_reference_or_shows(name, x):
    x = np.float32(x)
    out = round_to(torch.from_numpy(x), name).numpy()

    np.testing.assert_array_equal(out, reference(x, name))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("seed", [0, 1])
def test_out_of_range_saturates_and_nonfinite_shows(name, seed):
    largest = FORMATS[name].max
    generator = torch.Generator().manual_seed(seed) if seed else None
    x = torch.tensor([largest * 3, -largest * 3, 3e38, torch.inf, -torch.inf, torch.nan])
    out = round_to(x, name, generator)

    assert out[:3].tolist() == [largest, -largest, largest]
    assert out[3:].isnan().all()


@pytest.mark.parametrize("name", [*DTYPES, *INTS])
def test_stochastic_rounding_is_unbiased_seeded_and_keeps_exact_numbers(name):
    grid = values_of(name) if name in DTYPES else np.arange(FORMATS[name].max + 1)
    grid = np.float32(grid[np.abs(grid) <= 4])
    low, high = (1.0, 2.0) if name in INTS else sorted(grid[grid >= 1])[:2]
    if name == "int2":
        low, high = 0.0, 1.0
    share = 0.3
    x = torch.full((40_000,), float(low + share * (high - low)))

    def draw(seed):
        return round_to(x, name, torch.Generator().manual_seed(seed))

    out = draw(7)
    up = (out == float(high)).double().mean().item()
    assert set(out.unique().tolist()) == {float(low), float(high)}
    assert up == pytest.approx(share, abs=5 * (share * (1 - share) / len(x)) ** 0.5 + 2e-3)
    assert torch.equal(out, draw(7))
    assert not torch.equal(out, draw(8))
    kept = torch.from_numpy(np.repeat(grid[grid <= FORMATS[name].max], 50))
    assert torch.equal(round_to(kept, name, torch.Generator().manual_seed(1)), kept)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scaling", ["token", "group", "tensor"])
def test_fake_quantize_against_the_reference(name, scaling):
    x = np.random.default_rng(1).standard_normal((3, 5, 37)).astype(np.float32)
    x[0, 0] = 0
    x *= np.float32(10.0) ** np.arange(-7, 8).reshape(3, 5, 1).astype(np.float32)
    out = fake_quantize(torch.from_numpy(x), name, scaling=scaling, group_size=16).numpy()
    expected = np.empty_like(x)
    spans = {"token": [slice(None)], "group": [slice(0, 16), slice(16, 32), slice(32, 37)]}
    for row in np.ndindex(3, 5):
        for span in spans.get(scaling, [slice(None)]):
            part = x if scaling == "tensor" else x[row][span]
            amax = np.abs(part).max()
            scale = amax / np.float32(FORMATS[name].max) if amax > 0 else np.float32(1)
            expected[row][span] = reference(x[row][span] / scale, name) * scale

    same_bits(torch.from_numpy(out), expected)


@pytest.mark.parametrize("name", [*SCALED, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_input_are_kept(name, dtype):
    x = torch.randn(4, 6, dtype=dtype).t()  # not contiguous
    before = x.clone()
    out = fake_quantize(x, name)

    assert out.dtype == dtype
    assert torch.equal(x, before)
    assert torch.equal(out, fake_quantize(x.float().contiguous(), name).to(dtype))


@pytest.mark.parametrize("scaling", ["token", "group", "tensor"])
@pytest.mark.parametrize("name", SCALED)
def test_zeros_stay_zeros_with_a_finite_scale(name, scaling):
    x = torch.zeros(3, 10)
    scale = scale_of(x, name, scaling, group_size=4)

    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(fake_quantize(x, name, scaling=scaling, group_size=4), x)
    x[1] = 1e-45  # a subnormal: its own scale would be zero
    assert fake_quantize(x, name, scaling=scaling, group_size=4).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", SCALED)
def test_nonfinite_shows_in_its_own_row_only(name, bad):
    x = torch.randn(3, 8)
    x[1, 2] = bad
    out = fake_quantize(x, name)

    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], fake_quantize(x[[0, 2]], name))
    given = fake_quantize(x, name, scale=torch.tensor(0.1))
    assert given[1, 2].isnan()
    assert given.isnan().sum() == 1


def test_bf16_has_no_scale_and_keeps_infinities():
    x = torch.tensor([1.00390625, -3.3, torch.inf, torch.nan])

    assert torch.equal(fake_quantize(x, "bf16")[:3], x.bfloat16().float()[:3])
    assert fake_quantize(x, "bf16")[3].isnan()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 4)])
@pytest.mark.parametrize("scaling", ["token", "group", "tensor"])
def test_empty(shape, scaling):
    x = torch.empty(shape)
    counts = torch.zeros(3, dtype=torch.int64)

    assert fake_quantize(x, "e2m1", scaling=scaling, counts=counts).shape == shape
    assert counts.tolist() == [0, 0, 0]


def test_groups_have_their_own_scale_and_the_last_may_be_short():
    x = torch.tensor([[6.0, 3.0, 60.0, 30.0, 0.6]])

    assert absmax(x, "group", 2).tolist() == [[6.0, 60.0, pytest.approx(0.6)]]
    assert torch.allclose(fake_quantize(x, "e2m1", scaling="group", group_size=2), x)


@pytest.mark.parametrize("name", SCALED)
def test_counts(name):
    fmt = FORMATS[name]
    x = torch.tensor([0.0, fmt.smallest * 0.3, -fmt.smallest * 0.4, fmt.max, fmt.max * 2, torch.nan])
    counts = torch.zeros(3, dtype=torch.int64)
    for _ in range(2):
        fake_quantize(x, fmt, scale=torch.tensor(1.0), counts=counts)

    assert counts.tolist() == [2, 4, 12]


def test_nothing_saturates_under_its_own_scale():
    counts = torch.zeros(3, dtype=torch.int64)
    fake_quantize(torch.randn(50, 64), "e4m3", counts=counts)

    assert counts[0] == 0


def spread(shape, seed=0, dtype=torch.float32):
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_mx_blocks_are_those_of_the_specification(name, dtype):
    """X = 2 ** (floor(log2(max)) - emax) for each 32, P = saturated rounding of V / X (MX 1.0, section 6.3)."""
    x = spread((16, 96), dtype=dtype)
    x[0] = 0.0
    x[1, :32] *= 1e-38
    blocks = x.double().numpy().reshape(16, 3, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    emax = np.floor(np.log2(FORMATS[name].max))
    with np.errstate(divide="ignore"):
        scale = np.exp2(np.maximum(np.floor(np.log2(largest)) - emax, -126))
    expected = torch.from_numpy(reference(blocks / scale, name) * scale).to(dtype).reshape(16, 96)

    found = fake_quantize(x, name, scaling="mx", group_size=32)

    assert torch.equal(found, expected)
    scales = scale_of(x, name, "mx", 32).numpy()
    assert scales.shape == (16, 3)
    assert np.array_equal(scales, scales.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_what_an_mx_scale_leaves_beyond_the_range_saturates():
    counts = torch.zeros(3, dtype=torch.int64)
    found = fake_quantize(torch.tensor([[7.9, 4.0, 0.1]]), "e2m1", scaling="mx", group_size=32, counts=counts)

    assert found.tolist() == [[6.0, 4.0, 0.0]]
    assert counts.tolist() == [1, 1, 3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_spoils_its_mx_block(bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    found = fake_quantize(x, "e4m3", scaling="mx", group_size=32)

    assert found[0, :32].isnan().all()
    assert (found[0, 32:] == 1).all()


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (2, 3, 9, 4), (1, 1), (0, 4), (6,)])
def test_tiles_have_a_scale_each(shape):
    x = spread(shape)
    found, largest = fake_quantize(x, "e4m3", scaling="tile", group_size=4), absmax(x, "tile", 4)

    assert found.shape == x.shape
    if len(shape) == 1:
        assert torch.equal(found, fake_quantize(x, "e4m3", scaling="group", group_size=4))
        return
    assert largest.shape == (*shape[:-2], -(-shape[-2] // 4), -(-shape[-1] // 4))
    for i, j in np.ndindex(largest.shape[-2:]):
        rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        tiles = x[..., rows, columns].reshape(-1, *x[..., rows, columns].shape[-2:])
        for tile, mine, amax in zip(
            tiles, found[..., rows, columns].reshape(tiles.shape), largest[..., i, j].reshape(-1), strict=True
        ):
            assert torch.equal(mine, fake_quantize(tile, "e4m3", scaling="tensor"))
            assert amax == tile.abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling": "row"}, "unknown scaling 'row': it must be one of token, group, tile, tensor, mx"),
        ({"scaling": "group", "group_size": 0}, "group_size must be an int >= 1, got 0"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(2), "e2m1", **arguments)
