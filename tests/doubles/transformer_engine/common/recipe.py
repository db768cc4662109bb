"""Recipes: which scales FP8 tensors get."""

from dataclasses import dataclass


class Recipe:
    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    reduce_amax: bool = True


@dataclass
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    x_block_scaling_dim: int = 1


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
