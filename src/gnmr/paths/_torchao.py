"""Everything of torchao that :class:`gnmr.Float8` uses, its private names among them, in one place.

``Float8Linear`` and its ``config`` are not public in torchao, so a release may change them: :data:`VERSIONS` is the
range that the tests passed with at both ends.
"""

from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from torch import nn

VERSIONS = ((0, 17), (0, 19))
"""Lowest version, and the first that is too new."""


def _check_version() -> str:
    try:
        found = version("torchao")
    except PackageNotFoundError:
        raise ImportError("gnmr.Float8 needs torchao: pip install 'gnmr[float8]'") from None
    major, minor = (int(part) for part in found.split(".")[:2])
    lowest, beyond = VERSIONS
    if not lowest <= (major, minor) < beyond:
        raise ImportError(
            f"gnmr.Float8 uses private names of torchao and is tested with versions >= {lowest[0]}.{lowest[1]}, < "
            f"{beyond[0]}.{beyond[1]}; installed is {found}: pip install 'gnmr[float8]'"
        )
    return found


VERSION = _check_version()

from torchao.float8 import (  # noqa: E402 (a version that is out of range gets our message, not an error in here)
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
)
from torchao.float8.float8_linear import Float8Linear  # noqa: E402
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor  # noqa: E402

RECIPES: tuple[str, ...] = tuple(name.value for name in Float8LinearRecipeName)

_CASTS: dict[str, tuple[str, str]] = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"),
}
"""The two operands of each product."""


def is_config(value: Any) -> bool:
    """Whether this is a ``Float8LinearConfig``."""
    return isinstance(value, Float8LinearConfig)


def from_recipe(name: str) -> Any:
    """Return the config of one of :data:`RECIPES`."""
    return Float8LinearConfig.from_recipe_name(name)


def quantised(config: Any) -> tuple[str, ...]:
    """Return the products that a config runs in float8."""
    return tuple(gemm for gemm, casts in _CASTS.items() if all(_is_on(getattr(config, name)) for name in casts))


def in_high_precision(config: Any, gemms: Iterable[str]) -> Any:
    """Return the config with some of its products in high precision."""
    names = [name for gemm in gemms for name in _CASTS[gemm]]
    return replace(config, **{name: _off(getattr(config, name)) for name in names})


def float8_linear(module: nn.Linear, config: Any) -> nn.Linear:
    """Return a ``Float8Linear`` on the parameters of a module, whatever they are replaced by later.

    FSDP2 puts whole and sharded parameters into the module in turn, so the two share the dictionary that holds them.
    """
    made = cast("nn.Linear", convert_to_float8_training(module, config=config))
    made._parameters = module._parameters
    return made


def config_of(module: nn.Module) -> Any:
    """Return the config of a module that was converted before, or None."""
    return module.config if isinstance(module, Float8Linear) else None


def gathers_float8(module: nn.Module) -> bool:
    """Whether a module's weight is what FSDP2 gathers in float8, sharded or not."""
    weight = module._parameters.get("weight")
    return isinstance(getattr(weight, "_local_tensor", weight), WeightWithDynamicFloat8CastTensor)


def forwards_as_linear(module: nn.Module) -> bool:
    """Whether a module's class computes what ``nn.Linear`` or ``Float8Linear`` do."""
    return type(module).forward in {nn.Linear.forward, Float8Linear.forward}


def _is_on(cast_config: Any) -> bool:
    return cast_config.scaling_type is not ScalingType.DISABLED


def _off(cast_config: Any) -> Any:
    return CastConfig(ScalingType.DISABLED, ScalingGranularity.TENSORWISE, cast_config.target_dtype)
