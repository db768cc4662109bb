"""Regions, and the state that they set."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

from transformer_engine import chip, log
from transformer_engine.common.recipe import DelayedScaling


@dataclass(frozen=True)
class State:
    enabled: bool = False
    calibrating: bool = False
    recipe: Any = None
    group: Any = None


class FP8GlobalStateManager:
    state = State()
    depth = 0
    quantized_parameters = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.state.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.state.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return DelayedScaling() if cls.state.recipe is None else cls.state.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.state.group


class autocast:
    """Not re-entrant; the end of the outermost enabled region rolls every amax history."""

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None) -> None:
        self.wanted = State(enabled, calibrating, recipe, amax_reduction_group)
        self.before = None

    def __enter__(self) -> "autocast":
        if self.before is not None:
            raise RuntimeError("autocast cannot be entered more than once concurrently")
        self.before = FP8GlobalStateManager.state
        FP8GlobalStateManager.state = replace(self.wanted, recipe=self.wanted.recipe or DelayedScaling())
        FP8GlobalStateManager.depth += 1
        return self

    def __exit__(self, *error) -> None:
        FP8GlobalStateManager.state, self.before = self.before, None
        FP8GlobalStateManager.depth -= 1
        if self.wanted.enabled and FP8GlobalStateManager.depth == 0:
            log.append({"what": "reduce", "group": self.wanted.group})


class fp8_autocast(autocast):
    """As accelerate opens it."""

    def __init__(self, enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None) -> None:
        warnings.warn("fp8_autocast is deprecated, use autocast", DeprecationWarning, stacklevel=2)
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group)


class quantized_model_init:
    def __enter__(self) -> None:
        FP8GlobalStateManager.quantized_parameters = True

    def __exit__(self, *error) -> None:
        FP8GlobalStateManager.quantized_parameters = False


def is_fp8_available(return_reason=False):
    return chip["fp8"] if return_reason else chip["fp8"][0]


def is_mxfp8_available(return_reason=False):
    return chip["mxfp8"] if return_reason else chip["mxfp8"][0]


def is_fp8_block_scaling_available(return_reason=False):
    return chip["block"] if return_reason else chip["block"][0]
