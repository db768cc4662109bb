"""What ``import transformer_engine.pytorch as te`` gives."""

from contextlib import nullcontext

from torch.utils.checkpoint import checkpoint as _checkpoint

from transformer_engine.pytorch import ops as ops
from transformer_engine.pytorch.module import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module import LayerNormMLP as LayerNormMLP
from transformer_engine.pytorch.module import Linear as Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as _Manager
from transformer_engine.pytorch.quantization import autocast as autocast
from transformer_engine.pytorch.quantization import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.quantization import is_fp8_available as is_fp8_available
from transformer_engine.pytorch.quantization import is_fp8_block_scaling_available as is_fp8_block_scaling_available
from transformer_engine.pytorch.quantization import is_mxfp8_available as is_mxfp8_available
from transformer_engine.pytorch.quantization import quantized_model_init as quantized_model_init


def checkpoint(function, *args):
    """Recompute in the region of the forward."""
    enabled, recipe = _Manager.is_fp8_enabled(), _Manager.get_fp8_recipe()
    contexts = lambda: (nullcontext(), autocast(enabled=enabled, recipe=recipe))  # noqa: E731
    return _checkpoint(function, *args, use_reentrant=False, context_fn=contexts, early_stop=False)
