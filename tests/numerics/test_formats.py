"""The table of formats against ml_dtypes' own."""

import ml_dtypes
import pytest

from gnmr.numerics import FORMATS, get_format

DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("name", DTYPES)
def test_float_formats_are_those_of_ml_dtypes(name):
    fmt, info = FORMATS[name], ml_dtypes.finfo(DTYPES[name])

    assert (fmt.bits, fmt.max) == (info.bits, float(info.max))
    assert fmt.mantissa == info.nmant
    assert fmt.smallest == float(info.smallest_subnormal)
    assert 2.0**fmt.emin == float(info.smallest_normal)


@pytest.mark.parametrize(("name", "largest"), [("int2", 1), ("int4", 7), ("int6", 31), ("int8", 127)])
def test_integers_are_symmetric(name, largest):
    assert FORMATS[name].max == largest
    assert FORMATS[name].smallest == 1


def test_unknown_format_lists_the_names_and_the_nearest():
    with pytest.raises(ValueError, match=r"'e4m4'; did you mean 'e4m3'\?; known formats: e2m1, .*bf16"):
        get_format("e4m4")
