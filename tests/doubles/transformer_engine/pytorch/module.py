"""Modules: they quantise as the region says that their forward runs in."""

import sys
from itertools import count

import torch
from torch import nn
from torch.nn import functional as F

from transformer_engine import log
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

_numbers = count(1)
GEMMS = ("fprop", "dgrad", "wgrad")


class Product(torch.autograd.Function):
    """``x W^T``, each product rounded to E4M3 or not."""

    @staticmethod
    def forward(ctx, x, weight, casts):
        ctx.save_for_backward(x, weight)
        ctx.casts = casts
        return cast(x, casts["fprop"]) @ cast(weight, casts["fprop"]).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dgrad, wgrad = ctx.casts["dgrad"], ctx.casts["wgrad"]
        dw = cast(dy, wgrad).flatten(0, -2).t() @ cast(x, wgrad).flatten(0, -2)
        return cast(dy, dgrad) @ cast(weight, dgrad), dw, None


def cast(tensor, quantized):
    scale = 448 / torch.linalg.vector_norm(tensor, torch.inf).clamp_min(1e-30) if tensor.numel() else 1.0
    return (tensor * scale).to(torch.float8_e4m3fn).to(tensor.dtype) / scale if quantized else tensor


class TransformerEngineBaseModule(nn.Module):
    def __init__(self, name=None) -> None:
        super().__init__()
        self.name = name or f"Layer_{next(_numbers)}"
        self.fp8 = False
        self.fp8_calibration = False
        self.primary_weights_in_fp8 = FP8GlobalStateManager.quantized_parameters

    def prepare_forward(self, **arguments) -> None:
        manager = FP8GlobalStateManager
        self.fp8, self.fp8_calibration = manager.is_fp8_enabled(), manager.is_fp8_calibration()
        log.append(
            {"what": type(self).__name__, "fp8": self.fp8, "calibrating": self.fp8_calibration}
            | {"recipe": manager.get_fp8_recipe(), "group": manager.get_fp8_group(), "arguments": arguments}
        )

    def product(self, x, weight, bias=None, suffix=""):
        y = Product.apply(x, weight, {gemm: self.fp8 and self._asked(gemm, suffix) for gemm in GEMMS})
        return y if bias is None else y + bias

    def _asked(self, gemm, suffix) -> bool:
        api = sys.modules.get("nvdlfw_inspect.api")
        if api is None or api.DEBUG_MANAGER is None:
            return True
        return api.DEBUG_MANAGER.ask(self.name + suffix, gemm)


class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, bias=True, name=None) -> None:
        super().__init__(name)
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else torch.Tensor()
        self.use_bias = bias

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self.prepare_forward(is_first_microbatch=is_first_microbatch)
        return self.product(inp, self.weight, self.bias if self.use_bias else None)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, bias=True, name=None) -> None:
        super().__init__(in_features, out_features, bias, name)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        normed = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)
        return super().forward(normed, is_first_microbatch)


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(self, hidden_size, ffn_hidden_size, name=None) -> None:
        super().__init__(name)
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden_size))
        self.fc1_weight = nn.Parameter(torch.randn(ffn_hidden_size, hidden_size) / hidden_size**0.5)
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size) / ffn_hidden_size**0.5)

    def forward(self, inp, is_first_microbatch=None):
        self.prepare_forward(is_first_microbatch=is_first_microbatch)
        normed = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)
        hidden = F.gelu(self.product(normed, self.fc1_weight, suffix=".fc1"))
        return self.product(hidden, self.fc2_weight, suffix=".fc2")


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(self, num_gemms, in_features, out_features, name=None) -> None:
        super().__init__(name)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        self.prepare_forward(m_splits=m_splits, is_first_microbatch=is_first_microbatch)
        parts = zip(range(self.num_gemms), inp.split(m_splits), strict=True)
        return torch.cat([self.product(x, getattr(self, f"weight{i}"), suffix=f".gemm_{i}") for i, x in parts])
