"""Number formats: one table, rounding to them, and packing them into bytes."""

from gnmr.numerics.formats import FORMATS as FORMATS
from gnmr.numerics.formats import Format as Format
from gnmr.numerics.formats import get_format as get_format
from gnmr.numerics.rounding import absmax as absmax
from gnmr.numerics.rounding import fake_quantize as fake_quantize
from gnmr.numerics.rounding import round_to as round_to
from gnmr.numerics.rounding import scale_of as scale_of
