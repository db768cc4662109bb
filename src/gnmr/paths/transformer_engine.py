"""NVIDIA TransformerEngine: its FP8 kernels on the low-cost path, and its operators in BF16 on the recovery path.

Not yet run on hardware by us: what is decided here is tested against a double of TransformerEngine's documented
interface (2.9 to 2.20), and the ``gpu`` tests are ready.

TransformerEngine casts within a region, ``te.autocast``, that stands around the forward of the whole model. gnmr opens
no region around a unit on its low-cost path, and closes the one that there is (``te.autocast(enabled=False)``) around
a unit on its recovery path. That is because of what a region does:

- *Delayed scaling rolls all amax histories, over all ranks, when the outermost region ends.* A region of its own for
  each unit would roll them once a unit.
- *Units on recovery keep their place in that reduction*, and with ``calibrating`` feed their amax into it, so that they
  come back to a fresh scale (of input and weight; the gradient's is not calibrated).
- *All ranks must agree* which units are quantised, or the collective does not fit. The guard decides once for all.
- *A changed field of a recipe does nothing* where its class stays the same. Nothing is changed here, and a change by
  somebody else is an error.
- *A recompute outside the region runs in high precision.* ``te.checkpoint`` enters it again,
  ``torch.utils.checkpoint`` does not: that is an error.

What ran is read from the modules, which note whether their last forward was quantised.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnmr.errors import GnmrWarning, PathError, UnitError
from gnmr.paths.base import HIGH, LOW, OperatorPaths
from gnmr.pytorch.units import Operator, Unit, is_te

RECIPES: Mapping[str, tuple[str, str]] = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
}
"""Each name's class in ``transformer_engine.common.recipe``, and what says whether the chip has it."""

GEMMS = ("fprop", "dgrad", "wgrad")
"""The products of a linear: the output, the gradient of the input, the gradient of the weight."""

_SCALE_BITS = {"Float8BlockScaling": 32 / 128, "MXFP8BlockScaling": 8 / 32}
"""Bits of scales beside the 8 of an element, where they are not one for the tensor."""


class TransformerEngine(OperatorPaths):
    """TransformerEngine's modules in FP8 on the low-cost path, in the model's own precision on recovery.

    Units are ``te.Linear``, ``te.LayerNormLinear``, ``te.LayerNormMLP`` (both products at once), ``te.GroupedLinear``
    (all its experts at once) and subclasses; their norms count for no unit's gradient. The forward of the model runs
    in a region, :meth:`autocast` or the host's own (accelerate's wrapper around ``forward``, Megatron's)::

        paths = gnmr.TransformerEngine("current")
        guard = gnmr.Guard(model, paths, policy)
        with paths.autocast():
            loss = model(**batch).loss
        loss.backward()  # outside

    Checkpoint activations with ``te.checkpoint``. Over several ranks the guard decides once for all of them, as delayed
    scaling needs it: give the guard every rank that shares an ``amax_reduction_group``.

    Args:
        recipe: ``"delayed"`` or ``"current"`` (per-tensor scales, E4M3 forward and E5M2 backward), ``"block"``,
            ``"mxfp8"``, or an object of ``transformer_engine.common.recipe``; None: what the host's region says.
        gemms: which of ``"fprop"``, ``"dgrad"`` and ``"wgrad"`` are in high precision on recovery; None is all of them,
            without the debug feature that a choice needs: see :func:`register_feature`.
        amax_reduction_group: the ranks that share their amax, for :meth:`autocast`.

    Raises:
        ImportError: TransformerEngine is not installed, or its library cannot be loaded.
        ValueError: an unknown recipe or product.
        gnmr.PathError: TransformerEngine is older than 2.9, or this chip does not have the recipe.
    """

    takes_te = True

    def __init__(
        self,
        recipe: Any = None,
        *,
        gemms: Sequence[str] | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        super().__init__()
        self._te = _load()
        self._manager = import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
        self.recipe = None if recipe is None else _recipe(self._te, recipe)
        self.gemms = None if gemms is None else _gemms(gemms)
        self._group = amax_reduction_group
        self._recipes: dict[Operator, str] = {}
        self._region: set[Operator] | None = None
        """The operators that ran in the region that is open, where gnmr opened it."""
        self._kept: dict[Operator, tuple[int, int]] = {}

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Open TransformerEngine's region around the forward of the whole model; the backward stays outside.

        Raises:
            ValueError: these paths have no recipe of their own.
        """
        if self.recipe is None:
            raise ValueError("autocast() needs a recipe: gnmr.TransformerEngine('current'), or use the host's region")
        self._region = set()
        try:
            with self._te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self._group):
                yield
        finally:
            self._region = None

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``.

        Raises:
            gnmr.UnitError: an operator is no module of TransformerEngine, or one of its fused operations.
            gnmr.PathError: attached already, the model has another guard, or ``gemms`` is chosen and the debug feature
                is not registered, or cannot tell the layers apart.

        Warns:
            gnmr.GnmrWarning: weights are kept in FP8 (``te.quantized_model_init``), so that recovery is not exact.
        """
        operators = [operator for unit in units for operator in unit.operators]
        for operator in operators:
            _check_module(operator)
        if self.gemms is not None:
            _check_debug([_layer(operator) for operator in operators])
        quantized = [op.fqn for op in operators if getattr(op.module, "primary_weights_in_fp8", False)]
        if quantized:
            warnings.warn(
                f"the weights of {len(quantized)} operators are kept in FP8 ({quantized[0]!r}): their recovery path "
                "runs on the dequantised weights, which is not exact. Build the model outside te.quantized_model_init",
                GnmrWarning,
                stacklevel=3,
            )
        super().attach(units)
        self._recipes, self._kept = {}, {}

    def detach(self) -> None:
        """Give every operator its own forward back."""
        if self.gemms is not None:
            for operator in self.operators:
                SWITCHBOARD.close(_layer(operator))
        super().detach()

    def switch(self, unit: int, recover: bool) -> None:
        """Move one unit to its recovery path, or back."""
        super().switch(unit, recover)
        if self.gemms is None:
            return
        for operator in self.units[unit].operators:
            if recover:
                SWITCHBOARD.open(_layer(operator), self.gemms)
            else:
                SWITCHBOARD.close(_layer(operator))

    def forward_of(self, operator: Operator, route: Any) -> "partial[Tensor]":
        """Return what replaces an operator's forward; it counts what the module says it did."""
        return partial(_forward, self, operator, route)

    def low(self, operator: Operator, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the operator as the region around it says."""
        self._check_region(operator)
        return operator.plain(x, *args, **kwargs)

    def high(self, operator: Operator, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the operator without casts, or with those of the products that stay."""
        if self.gemms is not None:  # the debug feature answers from the switchboard
            return self.low(operator, x, *args, **kwargs)
        with self._closed():
            return operator.plain(x, *args, **kwargs)

    def ran_on(self, operator: Operator) -> int:
        """Return the path that the last forward of an operator took, as TransformerEngine has it."""
        quantized = bool(operator.module.fp8)
        if self.gemms is None:
            return LOW if quantized else HIGH
        return HIGH if SWITCHBOARD.answered(_layer(operator)) or not quantized else LOW

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes of the inputs of the products, for the shapes last seen.

        FP8 with its scales on the low-cost path, the input's own dtype on recovery; FP8 on both where ``wgrad``
        stays in it. What else a module keeps (a norm's input, an activation's) is the same on both and not counted.
        """
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        wgrad_recovers = self.gemms is None or "wgrad" in self.gemms
        for unit in self.units:
            for operator in unit.operators:
                elements, own_bits = self._kept.get(operator, (0, 0))
                low = 8 + _SCALE_BITS.get(self._recipes.get(operator, "").partition(":")[0], 0)
                for path, bits in ((LOW, low), (HIGH, own_bits if wgrad_recovers else low)):
                    held[path, unit.index] += round(elements * bits / 8)
        return held

    def describe(self) -> dict[str, Any]:
        """Return the recipe, as TransformerEngine prints it, and what recovers."""
        return {
            **super().describe(),
            "recipe": None if self.recipe is None else _text(self.recipe),
            "gemms": None if self.gemms is None else list(self.gemms),
        }

    def see(self, operator: Operator, x: Tensor) -> None:
        """Note what the products of an operator read."""
        rows = x.numel() // x.shape[-1]
        second = getattr(operator.module, "fc2_weight", None)  # of a LayerNormMLP
        width = x.shape[-1] + (0 if second is None else second.shape[-1])
        self._kept[operator] = (rows * width, 8 * x.element_size())

    def _closed(self) -> AbstractContextManager[Any]:
        """Close the region that there is; delayed scaling goes on to see the amax of input and weight."""
        closed: AbstractContextManager[Any]
        if not self._manager.is_fp8_enabled():
            closed = self._te.autocast(enabled=False)
            return closed
        recipe, group = self._manager.get_fp8_recipe(), self._manager.get_fp8_group()
        closed = self._te.autocast(
            enabled=False, calibrating=recipe.delayed(), recipe=recipe, amax_reduction_group=group
        )
        return closed

    def _check_region(self, operator: Operator) -> None:
        if not self._manager.is_fp8_enabled():
            raise PathError(
                f"{operator.fqn!r} is on its low-cost path, and no te.autocast is open, so it would run in high "
                "precision. Put paths.autocast() (or te.autocast) around the forward; to checkpoint activations use "
                "te.checkpoint, since torch's recomputes outside it"
            )
        recipe = self._manager.get_fp8_recipe()
        found = _text(recipe)
        first = self._recipes.setdefault(operator, found if self.recipe is None else _text(self.recipe))
        if found != first:
            raise PathError(
                f"the recipe of {operator.fqn!r} is {found}, and was to be {first}: TransformerEngine ignores most "
                "changes of a recipe that it knows. Keep one recipe for a run, or attach a new guard for another"
            )
        if self._region is None or not (recipe.delayed() and recipe.reduce_amax):
            return
        if operator in self._region:
            raise PathError(
                f"{operator.fqn!r} ran twice in one region, which delayed scaling does not support: its second amax "
                "overwrites the first before they are reduced. Open a region for each forward, leave the backward "
                "outside, or use recipe='current'"
            )
        self._region.add(operator)


class Switchboard:
    """Which products of which layers are in high precision; TransformerEngine's debug feature asks it for each.

    A layer goes by the ``name`` of its module; a module of several products appends theirs (``name.fc1``).

    Examples:
        >>> board = Switchboard()
        >>> board.open("layers.0.mlp", ("wgrad",))
        >>> board.quantized("layers.0.mlp.fc1", "fprop"), board.quantized("layers.0.mlp.fc1", "wgrad")
        (True, False)
        >>> board.answered("layers.0.mlp")  # and is asked again in the next forward
        True
        >>> board.answered("layers.0.mlp")
        False
    """

    def __init__(self) -> None:
        self._high: dict[str, tuple[str, ...]] = {}
        self._answered: set[str] = set()

    def open(self, layer: str, gemms: tuple[str, ...]) -> None:
        """Put products of a layer in high precision."""
        self._high[layer] = gemms

    def close(self, layer: str) -> None:
        """Put all products of a layer back."""
        self._high.pop(layer, None)
        self._answered.discard(layer)

    def quantized(self, layer: str, gemm: str) -> bool:
        """Whether a product is to be quantised."""
        owner = layer if layer in self._high else layer.rpartition(".")[0]
        high = gemm in self._high.get(owner, ())
        if high:
            self._answered.add(owner)
        return not high

    def answered(self, layer: str) -> bool:
        """Return whether a product of a layer was told to stay in high precision since the last call."""
        found = layer in self._answered
        self._answered.discard(layer)
        return found


SWITCHBOARD = Switchboard()
"""The one that the debug feature asks: TransformerEngine has one debug manager a process, too."""

FEATURE = "GnmrRecovery"


def register_feature() -> None:
    """Register gnmr's feature with TransformerEngine's debug tool, for recovery of single products.

    Call it before ``debug_api.initialize``, which itself comes before the model is built::

        import nvdlfw_inspect.api as debug_api

        register_feature()
        debug_api.initialize("recovery.yaml", feature_dirs=[".../transformer_engine/debug/features"])
        model = ...
        debug_api.infer_and_assign_layer_names(model)
        guard = gnmr.Guard(model, gnmr.TransformerEngine("current", gemms=("dgrad", "wgrad")), policy)

    where ``recovery.yaml`` gives the feature every layer::

        gnmr:
          enabled: True
          layers: {layer_name_regex_pattern: .*}
          transformer_engine:
            GnmrRecovery: {enabled: True, gemms: [fprop, dgrad, wgrad]}

    and ``debug_api.step()`` is called once a step. TransformerEngine's debug path is slower than its own.

    Raises:
        ImportError: TransformerEngine, or ``nvdlfw_inspect``, is not installed.
    """
    try:
        registry = import_module("nvdlfw_inspect.registry")
        mapper = import_module("transformer_engine.debug.features.api").TEConfigAPIMapper
    except ImportError as error:
        raise ImportError(
            "recovery of single products needs TransformerEngine and its debug tool: pip install nvdlfw-inspect"
        ) from error

    def fp8_gemm_enabled(self: Any, config: Any, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int]:
        return SWITCHBOARD.quantized(layer_name, gemm), iteration + 1  # and ask again in the next step

    feature = type(FEATURE, (mapper,), {"fp8_gemm_enabled": registry.api_method(fp8_gemm_enabled)})
    registry.Registry.register_feature(namespace="transformer_engine")(feature)


@torch.compiler.disable  # what a module did is known once it ran
def _forward(
    paths: TransformerEngine, operator: Operator, route: Any, inp: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    if not operator.module.training:
        return operator.plain(inp, *args, **kwargs)
    paths.see(operator, inp)
    run = paths.high if route.recover else paths.low
    y = run(operator, inp, *args, **kwargs)
    route.tick(paths.ran_on(operator))
    return y


def _load() -> Any:
    try:
        te = import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # its library may be there and not load
        raise ImportError(
            f"gnmr.TransformerEngine needs NVIDIA TransformerEngine ({error}): "
            "pip install --no-build-isolation 'transformer_engine[pytorch]'"
        ) from error
    if not hasattr(te, "autocast"):
        raise PathError("this TransformerEngine has no te.autocast: gnmr.TransformerEngine needs 2.9 or newer")
    return te


def _recipe(te: Any, recipe: Any) -> Any:
    """Return the recipe object of a name, if the chip has it, or the object itself."""
    known = import_module("transformer_engine.common.recipe")
    if isinstance(recipe, known.Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)}, or an object of transformer_engine.common.recipe, "
            f"got {recipe!r}"
        )
    kind, asked = RECIPES[recipe]
    available, reason = getattr(te, asked)(return_reason=True)
    if not available:
        raise PathError(f"recipe={recipe!r} cannot run here: {reason}")
    return getattr(known, kind)()


def _gemms(gemms: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in gemms if name not in GEMMS]
    if isinstance(gemms, str) or unknown or not gemms:
        raise ValueError(f"gemms must name some of {', '.join(GEMMS)}, got {gemms!r}; None is all of them")
    return tuple(name for name in GEMMS if name in gemms)


def _text(recipe: Any) -> str:
    return f"{type(recipe).__name__}: {recipe}"


def _layer(operator: Operator) -> str:
    return str(operator.module.name)


def _check_module(operator: Operator) -> None:
    module = operator.module
    if not is_te(module):
        raise UnitError(
            f"{operator.fqn!r} is {type(module).__name__}, which te.autocast does not change: make it te.Linear "
            "(accelerate's convert_model does), or leave it out with exclude=..."
        )
    if not hasattr(module, "fp8"):
        raise UnitError(
            f"{operator.fqn!r} is {type(module).__module__}.{type(module).__name__}, which says nothing of what it "
            "ran: gnmr knows te.Linear, te.LayerNormLinear, te.LayerNormMLP and te.GroupedLinear. Leave it out with "
            "exclude=..."
        )


def _check_debug(layers: Sequence[str]) -> None:
    api = sys.modules.get("nvdlfw_inspect.api")
    registry = sys.modules.get("nvdlfw_inspect.registry")
    known = () if registry is None else registry.Registry.data.get("transformer_engine")
    if api is None or api.DEBUG_MANAGER is None or FEATURE not in getattr(known, "features", ()):
        raise PathError(
            "gemms=... needs TransformerEngine's debug tool with gnmr's feature: call "
            "gnmr.paths.transformer_engine.register_feature() and debug_api.initialize(...) before the model is built"
        )
    twice = sorted({name for name in layers if layers.count(name) > 1})
    if twice:
        raise PathError(
            f"{twice[0]!r} is the name of several layers, so the debug tool cannot tell them apart: call "
            "debug_api.infer_and_assign_layer_names(model)"
        )
