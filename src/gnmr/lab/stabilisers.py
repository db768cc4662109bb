"""The field's remedies for loss spikes, as additions to an arm: ``low+zclip``, ``gnmr+stable-spam``.

They act between the guard and the weights: the trigger decides on the gradients as they came. Their settings are the
papers' own, and stand in a run's ``environment.json``.

- ``clip``: global L2 norm at most 1.0, by the guard itself, as with ``optimizer.max_grad_norm``.
- ``zclip`` (arXiv 2504.02507): the global norm is bounded where its z-score is high; :class:`gnmr.lab.zclip.ZClip`.
- ``adagc`` (arXiv 2502.11034): each tensor's norm is bounded by its own average; ``pytorch_optimizer.AdaGC``.
- ``spam`` (arXiv 2501.06842): elements are bounded by their second moment, which is reset now and then, as the first
  is; ``pytorch_optimizer.SPAM``.
- ``stable-spam`` (arXiv 2502.17055): likewise, with adaptive bounds and norms; ``pytorch_optimizer.StableSPAM``.

The last three are Adams, and stand in for the recipe's AdamW with its ``lr``, betas, ``eps`` and ``weight_decay``.
SPAM bounds an element that has never had a gradient by zero (so does the paper's formula): a token that first appears
after the 20 steps that it spares is not learnt before the next reset.
"""

import difflib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gnmr.errors import RecipeError

if TYPE_CHECKING:
    from gnmr.lab.sections import Optimizer  # which parses arms, and so imports this module

SETTINGS: dict[str, dict[str, float]] = {
    "clip": {"max_grad_norm": 1.0},
    "zclip": {"alpha": 0.97, "z_threshold": 2.5, "warmup_steps": 25},
    "adagc": {"lambda_abs": 1.0, "lambda_rel": 1.05, "beta": 0.98, "warmup_steps": 100},
    "spam": {"threshold": 5000, "update_proj_gap": 500, "warmup_epoch": 150, "grad_accu_steps": 20, "density": 1.0},
    "stable-spam": {"gamma1": 0.7, "gamma2": 0.9, "theta": 0.999, "update_proj_gap": 1000},
}
"""What each is set to, under the names of what computes it; ``warmup_epoch`` is in steps, and ``theta`` is γ3."""

SOURCES = {
    "clip": "global L2 clipping",
    "zclip": "ZClip, arXiv 2504.02507",
    "adagc": "AdaGC, arXiv 2502.11034",
    "spam": "SPAM, arXiv 2501.06842",
    "stable-spam": "Stable-SPAM, arXiv 2502.17055",
}
"""What each is called, and where it is from."""

NORM_CLIPPERS = ("clip", "zclip", "adagc")
"""Those that read gradient norms, of which the second would read what the first left."""

OPTIMIZERS = {"adagc": "AdaGC", "spam": "SPAM", "stable-spam": "StableSPAM"}
"""Those that take the optimiser's place, and their classes in ``pytorch_optimizer``."""


def parse_stabilisers(arm: str, names: Sequence[str]) -> tuple[str, ...]:
    """Check what follows the first ``+`` of an arm.

    Args:
        arm: as it was written, for the messages.
        names: the parts.

    Raises:
        gnmr.RecipeError: one is unknown (the message suggests the right one) or given twice, or two of them would do
            the same work.

    Examples:
        >>> parse_stabilisers("low+zclip", ["zclip"])
        ('zclip',)
        >>> parse_stabilisers("low+zlcip", ["zlcip"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        gnmr.errors.RecipeError: arm 'low+zlcip': unknown stabiliser 'zlcip'; did you mean 'zclip'? Known are clip, ...
    """
    for place, name in enumerate(names):
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise RecipeError(f"arm {arm!r}: unknown stabiliser {name!r}{hint} Known are {', '.join(SETTINGS)}")
        if name in names[:place]:
            raise RecipeError(f"arm {arm!r} gives the stabiliser {name!r} twice: once is enough")
    for group, work in ((NORM_CLIPPERS, "bound gradient norms"), (tuple(OPTIMIZERS), "take the optimiser's place")):
        both = [name for name in names if name in group]
        if len(both) > 1:
            raise RecipeError(f"arm {arm!r}: {both[0]!r} and {both[1]!r} both {work}: keep one of {', '.join(group)}")
    return tuple(names)


def check_fits(arm: str, names: Sequence[str], optimizer: "Optimizer") -> None:
    """Check that an arm's stabilisers can stand beside the recipe's own clipping, and are installed.

    Raises:
        gnmr.RecipeError: the recipe clips already, and one of them reads norms; or a package is missing.
    """
    for name in names:
        if name in OPTIMIZERS and find_spec("pytorch_optimizer") is None:
            raise RecipeError(f"arm {arm!r}: {name!r} needs pytorch-optimizer: pip install 'gnmr[lab]'")
        if name in NORM_CLIPPERS and optimizer.max_grad_norm:
            raise RecipeError(
                f"arm {arm!r}: the recipe clips already (optimizer.max_grad_norm = {optimizer.max_grad_norm}), and "
                f"{name!r} would read what that leaves: set optimizer.max_grad_norm=0"
            )


def max_grad_norm(names: Sequence[str], optimizer: "Optimizer") -> float:
    """Return the bound of the global norm: the stabiliser's or the recipe's, 0 for none."""
    return SETTINGS["clip"]["max_grad_norm"] if "clip" in names else optimizer.max_grad_norm


def make_optimizer(names: Sequence[str], optimizer: "Optimizer") -> tuple[type[Any], dict[str, Any]] | None:
    """Return the class and the arguments of the optimiser that takes AdamW's place, or None where none does."""
    for name in names:
        if name in OPTIMIZERS:
            import pytorch_optimizer

            kind = getattr(pytorch_optimizer, OPTIMIZERS[name])
            betas = (optimizer.beta1, optimizer.beta2)
            shared = {"lr": optimizer.lr, "betas": betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
            return kind, shared | SETTINGS[name]
    return None


def describe(names: Iterable[str]) -> list[str]:
    """Say what each of the stabilisers is, and its settings, once.

    Examples:
        >>> describe(["clip", "clip"])
        ['clip: global L2 clipping (max_grad_norm = 1.0)']
    """
    return [
        f"{name}: {SOURCES[name]} ({', '.join(f'{key} = {value}' for key, value in SETTINGS[name].items())})"
        for name in dict.fromkeys(names)
    ]
