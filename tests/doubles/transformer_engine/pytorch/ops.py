"""Operations that are fused with their neighbours."""

from torch import nn


class Linear(nn.Linear):
    """A module, but not a TransformerEngineBaseModule."""
