"""Everything that gnmr raises or warns with, and when.

Each class also is the builtin that a caller would already catch: a bad value is a
:class:`ValueError`, a run that cannot go on is a :class:`RuntimeError`.
"""


class GnmrError(Exception):
    """The root of gnmr's own exceptions."""


class UnitError(GnmrError, ValueError):
    """The model offers no unit that fits what was asked for."""


class PathError(GnmrError, RuntimeError):
    """A path did not run as planned: a switch did nothing, or a forward bypassed it."""


class GuardError(GnmrError, RuntimeError):
    """The guard was called at a place of the training loop where it cannot work."""


class StateError(GnmrError, ValueError):
    """A saved state does not fit: another schema, another policy, or it is not one at all."""


class TraceError(GnmrError, ValueError):
    """A trace file is missing, damaged, or not a trace."""


class RecipeError(GnmrError, ValueError):
    """A recipe holds an unknown key, a wrong value, or contradicts itself."""


class RunError(GnmrError, RuntimeError):
    """A run cannot start, go on, or be read: its folder is in use, damaged, or full."""


class GnmrWarning(UserWarning):
    """The user's wish is not carried out as it stands, and training goes on."""
