"""Which parts of a model are units: an operator, an expert, a block, or a group of the user's own."""

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import GnmrWarning, UnitError
from gnmr.pytorch.experts import ExpertLinear, experts_of, give_back, is_stacked, take_over

PROJECTIONS = frozenset(
    # LLaMA, Mistral, Qwen, Gemma; Phi-3 (fused); OPT, Phi; GPT-NeoX; GPT-2; torchtitan
    [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("qkv_proj", "gate_up_proj"),
        *("out_proj", "fc1", "fc2", "dense"),
        *("query_key_value", "dense_h_to_4h", "dense_4h_to_h"),
        *("c_attn", "c_proj", "c_fc"),
        *("wq", "wk", "wv", "wo", "w1", "w2", "w3"),
    ]
)
"""Last names of the attention and MLP projections in the common decoder families."""

_TE_LINEARS = frozenset(["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
"""Modules of TransformerEngine that multiply by weights of their own; those that hold them have no products."""

_TE_PROJECTIONS = frozenset(
    # TransformerEngine's own layers; Megatron-Core's
    [
        *("qkv", "layernorm_qkv", "query", "layernorm_query", "key_value", "proj", "layernorm_mlp"),
        *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    ]
)

_WRAPPERS = frozenset(["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"])

FilterFn = Callable[[nn.Module, str], bool]
Granularity = Literal["operator", "expert", "block"] | Callable[[str], str] | Mapping[str, Sequence[str]]
Watch = Literal["weight", "adapter", "output_grad"]
"""Whose gradient is a unit's: its weights', its adapters', or that of its output."""


class Piece(NamedTuple):
    """What a unit has of a parameter: all of it, or, of experts that are stacked in one, a row.

    Attributes:
        param: the trainable parameter.
        row: of its first dimension, or None.
    """

    param: nn.Parameter
    row: int | None

    def of(self, grad: Tensor) -> Tensor:
        """Return the piece's part of a gradient of the parameter."""
        return grad if self.row is None else grad[self.row]


@dataclass(frozen=True, eq=False)
class Operator:
    """A linear operator ``y = x W^T + b`` of a unit.

    Attributes:
        fqn: the name in the model, free of what wrappers add.
        module: ``nn.Linear``, GPT-2's ``Conv1D``, one product of an expert that is stacked with others, or a module of
            TransformerEngine, which may have several products, a norm before them and more arguments than the input.
    """

    fqn: str
    module: nn.Module
    _own_forward: Any = field(default=None, repr=False)
    _tuner: nn.Module | None = field(default=None, repr=False)
    """PEFT's layer around the module, which holds its adapters."""

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as (in, out)."""
        return not isinstance(self.module, nn.Linear) and not is_te(self.module)

    @property
    def weight(self) -> Tensor:
        """(out, in) weight; a view where the module stores its transpose."""
        weight = cast("Tensor", self.module.weight)
        return weight.t() if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        """(out,) bias, or None."""
        return cast("Tensor | None", self.module.bias)

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        if is_te(self.module):
            return next(self.module.parameters()).device
        held = self.module.stacked if isinstance(self.module, ExpertLinear) else self.module.weight
        return cast("Tensor", held).device

    def pieces(self) -> list[Piece]:
        """Return what is trainable of the operator."""
        if isinstance(self.module, ExpertLinear):
            stacked = (self.module.stacked, self.module.stacked_bias)
            found = [Piece(param, self.module.row) for param in stacked if param is not None]
        elif is_te(self.module):  # without the norm that it may begin with
            named = self.module.named_parameters()
            found = [Piece(param, None) for name, param in named if not name.startswith("layer_norm_")]
        else:
            found = [Piece(param, None) for param in self.module.parameters()]
        return [piece for piece in found if piece.param.requires_grad]

    def adapters(self) -> list[Piece]:
        """Return what is trainable of the adapters that PEFT has put around the operator."""
        if self._tuner is None:
            return []
        own = set(self.module.parameters())
        return [Piece(param, None) for param in self._tuner.parameters() if param.requires_grad and param not in own]

    def take_over(self) -> None:
        """Make the model run the operator by its module, where it does not anyway: stacked experts.

        Raises:
            gnmr.UnitError: they cannot be run one by one.
        """
        if isinstance(self.module, ExpertLinear):
            take_over(self.module)

    def plain(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the operator as the model would without gnmr; a module of TransformerEngine may take more than x."""
        if self._own_forward is not None:
            return self._own_forward(x, *args, **kwargs)
        return type(self.module).forward(self.module, x, *args, **kwargs)

    def linear(self, x: Tensor) -> Tensor:
        """Run ``F.linear`` on the operator's weight and bias."""
        return F.linear(x, self.weight, self.bias)

    def restore(self) -> None:
        """Give the module the forward that it had before gnmr."""
        self.module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self.module.forward = self._own_forward
        if isinstance(self.module, ExpertLinear):
            give_back(self.module)


@dataclass(frozen=True, eq=False)
class Unit:
    """One entry of the controller: operators that share a decision.

    Attributes:
        name: unique in the model.
        index: its place in forward order, and in every (N,) array.
        operators: at least one.
        pieces: the trainable parameters, or rows of them, whose gradient is the unit's, each once.
        outputs: the modules whose output's gradient is the unit's, in place of that of parameters.
    """

    name: str
    index: int
    operators: tuple[Operator, ...]
    pieces: tuple[Piece, ...]
    outputs: tuple[nn.Module, ...] = ()

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the pieces, each once."""
        return tuple(dict.fromkeys(piece.param for piece in self.pieces))


def find_units(
    model: nn.Module,
    *,
    filter_fn: FilterFn | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    granularity: Granularity = "operator",
    watch: Watch = "weight",
) -> tuple[Unit, ...]:
    """Find the units of a model.

    By default these are the attention and MLP projections inside the decoder layers (paper, setting A),
    never embeddings, norms or the head.

    Args:
        model: the model, before or after wrapping.
        filter_fn: ``filter_fn(module, fqn) -> bool`` in place of the default rule; only linear operators
            are asked about.
        include: FQN globs in place of the default rule (``"*.mlp.*"``); with ``filter_fn``, both must hold.
        exclude: FQN globs to leave out.
        granularity: ``"operator"``: each linear is a unit; ``"expert"``: an expert of a mixture is one, with its
            linears, and every other linear too; ``"block"``: a decoder layer is one, with all its eligible linears; a
            function from FQN to group name; or a mapping from group name to FQN globs.
        watch: whose gradient norm is a unit's: ``"weight"``, of its operators' trainable parameters; ``"adapter"``, of
            the trainable parameters that PEFT put around its operators (LoRA's A and B), for frozen ones;
            ``"output_grad"``, of the loss with respect to its output: a block's, or else its operators'.

    Returns:
        Units in the order of the model's modules.

    Raises:
        gnmr.UnitError: nothing matches (the message lists the linears that there are), a unit has no
            trainable parameter or no adapter, or one that belongs to other experts too, or a group of the mapping
            matches nothing or overlaps another.
        ValueError: an unknown ``granularity`` or ``watch``.

    Warns:
        gnmr.GnmrWarning: eligible weights are in no linear operator, as of experts that are stacked in a way that
            cannot be run one by one, and are left out.

    Examples:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
        >>> [unit.name for unit in find_units(model)]
        ['layers.0.q_proj']
    """
    linears = _linears(model)
    wanted, unwanted = _globs(include), _globs(exclude) or ()
    chosen = [
        operator
        for operator in linears
        if _eligible(operator, filter_fn, wanted) and not _matches(operator.fqn, unwanted)
    ]
    left_out = _left_out(model, filter_fn, wanted, unwanted)
    if left_out:
        warnings.warn(_LEFT_OUT.format(left_out[0], len(left_out)), GnmrWarning, stacklevel=2)
    if not chosen:
        raise UnitError(_nothing_matches(linears, filter_fn, wanted, unwanted))
    groups = _group(chosen, granularity)
    of_unit = _watched(model, watch)
    units = tuple(
        Unit(name, index, tuple(operators), *of_unit(name, operators))
        for index, (name, operators) in enumerate(groups.items())
    )
    silent = [unit.name for unit in units if not unit.pieces and not unit.outputs]
    if silent:
        raise UnitError(_NO_GRADIENT[watch].format(silent[0], len(silent), len(units)) + _other_watch(chosen, watch))
    if watch == "adapter":
        _check_shared_adapters(units)
    return units


_LEFT_OUT = (
    "{!r} is a weight outside any linear operator, as of experts that are stacked in another way than transformers' "
    "experts implementation has them ({} such weights): it is no unit and stays as it is. Name it in exclude=... if "
    "that is meant"
)


def _left_out(
    model: nn.Module, filter_fn: FilterFn | None, include: tuple[str, ...] | None, exclude: tuple[str, ...]
) -> list[str]:
    """Return the weights of products that would be eligible, and that are in no operator."""
    if filter_fn is not None:
        return []  # which is asked about linear operators only
    held = [
        canonical_fqn(name if key == "weight" else f"{name}.{key}")
        for name, module in model.named_modules()
        if not is_linear(module) and not is_stacked(module)
        for key, param in module._parameters.items()
        if param is not None and _is_projection(name, module, key, param)
    ]
    wanted = [fqn for fqn in held if (block_of(fqn) is not None if include is None else _matches(fqn, include))]
    return [fqn for fqn in wanted if not _matches(fqn, exclude)]


def _is_projection(name: str, module: nn.Module, key: str, param: nn.Parameter) -> bool:
    """Whether a parameter has the name of a projection, or is a stack of matrices in what calls itself experts."""
    stacked = param.ndim == 3 and "expert" in f"{name}.{type(module).__name__}".lower()
    return stacked or (param.ndim >= 2 and key in PROJECTIONS)


def canonical_fqn(name: str) -> str:
    """Return a module's name without what compile, checkpoint, FSDP and PEFT wrappers add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def is_te(module: nn.Module) -> bool:
    """Whether a module is one of TransformerEngine's that multiply by weights of their own, or a subclass of one."""
    # Told by name, so that TransformerEngine is not needed.
    return any(
        kind.__name__ in _TE_LINEARS and kind.__module__.startswith("transformer_engine.")
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``x W^T + b``: ``nn.Linear``, GPT-2's transposed ``Conv1D``, TransformerEngine's."""
    # transformers.pytorch_utils.Conv1D is told by its name, so that transformers is not needed.
    conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return isinstance(module, nn.Linear) or conv1d or is_te(module)


def block_of(fqn: str) -> str | None:
    """Return the decoder layer that a module is in: its name up to the first list index, or None."""
    match = re.match(r"(.*?\.\d+)\.", f".{fqn}")
    return match.group(1).removeprefix(".") if match else None


def expert_of(fqn: str) -> str | None:
    """Return the expert that a module is in: its name up to the number after ``experts``, or None."""
    match = re.match(r"(?:.*\.)?experts\.\d+(?=\.)", fqn)
    return match.group() if match else None


def _linears(model: nn.Module) -> list[Operator]:
    found = []
    modules = dict(model.named_modules())
    factors = _factors(modules.values())
    for name, module in modules.items():
        tuner = _tuner(name, modules)
        if module in factors:
            continue
        if is_linear(module):
            members = [("", module)]
        elif is_stacked(module):
            members = [(f".{each.row}.{each.projection}", each) for pair in experts_of(module) for each in pair]
        else:
            continue
        for suffix, member in members:
            _sweep(member)
            found.append(Operator(canonical_fqn(name) + suffix, member, member.__dict__.get("forward"), tuner))
    return found


def _factors(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linears that nobody runs: PEFT's adapter of a parameter keeps its two factors in such."""
    # peft.tuners.lora.layer.ParamWrapper is told by its name, so that peft is not needed.
    wrappers = [module for module in modules if type(module).__name__ == "ParamWrapper"]
    return {factor for wrapper in wrappers for pair in (wrapper.lora_A, wrapper.lora_B) for factor in pair.children()}  # type: ignore[union-attr]


def _tuner(name: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return PEFT's outermost layer around a module, or None."""
    found = None
    while name.rpartition(".")[2] == "base_layer":
        name = name.rpartition(".")[0]
        found = modules[name]
    return found


def _sweep(module: nn.Module) -> None:
    """Take away what a copy of a guarded module has of the guard: a seat in which nothing runs, and its forward."""
    seat: Any = module.__dict__.get("_gnmr_seat")
    if seat is not None and seat.vacant:
        del module._gnmr_seat
        module.__dict__.pop("forward", None)
        if isinstance(module, ExpertLinear):
            give_back(module)


def _eligible(operator: Operator, filter_fn: FilterFn | None, include: tuple[str, ...] | None) -> bool:
    if filter_fn is None and include is None:
        known = PROJECTIONS | _TE_PROJECTIONS if is_te(operator.module) else PROJECTIONS
        return block_of(operator.fqn) is not None and operator.fqn.split(".")[-1] in known
    if filter_fn is not None and not filter_fn(operator.module, operator.fqn):
        return False
    return include is None or _matches(operator.fqn, include)


def _matches(fqn: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, glob) for glob in globs)


def _globs(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def _group(operators: list[Operator], granularity: Granularity) -> dict[str, list[Operator]]:
    if granularity == "operator":
        return {operator.fqn: [operator] for operator in operators}
    if isinstance(granularity, Mapping):
        return _by_globs(operators, granularity)
    if granularity == "expert":
        if not any(expert_of(operator.fqn) for operator in operators):
            raise UnitError(f"granularity='expert', and no operator is in experts.N: {', '.join(_names(operators))}")
        name_of: Callable[[str], str | None] = lambda fqn: expert_of(fqn) or fqn  # noqa: E731
    elif granularity == "block":
        name_of = block_of
    elif callable(granularity):
        name_of = granularity
    else:
        raise ValueError(
            "granularity must be 'operator', 'expert', 'block', a function from FQN to group name, or a "
            f"mapping from group name to FQN globs, got {granularity!r}"
        )
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        name = name_of(operator.fqn)
        if name is None:
            raise UnitError(f"{operator.fqn!r} is in no block: leave it out, or name its group")
        groups.setdefault(name, []).append(operator)
    return groups


def _by_globs(operators: list[Operator], groups: Mapping[str, Sequence[str]]) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = {}
    taken: dict[str, str] = {}
    for name, patterns in groups.items():
        globs = _globs(patterns) or ()
        members = [op for op in operators if _matches(op.fqn, globs)]
        if not members:
            raise UnitError(f"group {name!r} matches no eligible operator: {list(globs)!r}")
        for operator in members:
            other = taken.setdefault(operator.fqn, name)
            if other != name:
                raise UnitError(f"{operator.fqn!r} is in two groups, {other!r} and {name!r}")
        found[name] = members
    first = {op.fqn: i for i, op in enumerate(operators)}
    return dict(sorted(found.items(), key=lambda item: first[item[1][0].fqn]))


def _watched(
    model: nn.Module, watch: Watch
) -> Callable[[str, list[Operator]], tuple[tuple[Piece, ...], tuple[nn.Module, ...]]]:
    """Return what gives a unit's pieces and outputs by its name and operators."""
    if watch == "output_grad":
        modules: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            modules.setdefault(canonical_fqn(name), module)  # the outermost, with its wrappers
        return lambda name, operators: (
            (),
            (modules[name],) if name in modules else tuple(modules.get(op.fqn, op.module) for op in operators),
        )
    if watch not in ("weight", "adapter"):
        raise ValueError(f"watch must be 'weight', 'adapter' or 'output_grad', got {watch!r}")
    of = Operator.pieces if watch == "weight" else Operator.adapters
    return lambda _, operators: (tuple(dict.fromkeys(piece for op in operators for piece in of(op))), ())


_NO_GRADIENT: dict[str, str] = {
    "weight": "unit {!r} has no trainable parameter ({} of {} units), so it has no gradient to watch: leave it out "
    "with exclude=..., or unfreeze it",
    "adapter": "unit {!r} has no trainable adapter ({} of {} units), so it has no gradient to watch: leave it out with "
    "exclude=..., give it one (target_modules of peft), or pass watch='output_grad'",
}


def _check_shared_adapters(units: Sequence[Unit]) -> None:
    """Refuse units that have a part of the experts of one adapter: PEFT keeps one for all that are stacked."""
    for unit in units:
        rows: dict[tuple[nn.Module, str], set[int]] = {}
        for operator in unit.operators:
            expert = operator.module
            if isinstance(expert, ExpertLinear):
                rows.setdefault((expert.host, expert.projection), set()).add(expert.row)
        if any(len(found) < len(experts_of(host)) for (host, _), found in rows.items()):
            raise UnitError(
                f"the adapter of unit {unit.name!r} is one with that of all experts of its layer, so it says nothing "
                "of this expert: pass granularity='block', or watch='output_grad'"
            )


def _other_watch(operators: list[Operator], watch: Watch) -> str:
    """Say how frozen operators with adapters are watched."""
    if watch != "weight" or not any(op.adapters() for op in operators):
        return ""
    return "; to watch the adapters that PEFT put around it, pass watch='adapter'"


def _names(linears: list[Operator]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", op.fqn) for op in linears))


def _nothing_matches(
    linears: list[Operator],
    filter_fn: FilterFn | None,
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
) -> str:
    if not linears:
        return "the model has no nn.Linear (nor Conv1D, nor a linear of TransformerEngine), so it has no unit"
    asked = f"include={include!r}" if include is not None else "the default projections"
    if filter_fn is not None:
        asked = "filter_fn"
    if exclude:
        asked += f" without exclude={exclude!r}"
    names = _names(linears)
    close = difflib.get_close_matches(include[0], names, n=1) if include else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"no linear operator matches {asked}{hint}. The model's linears are: {', '.join(names[:20])}. "
        "Name the ones to watch with include=[...] or filter_fn."
    )
