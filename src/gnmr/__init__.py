"""gnmr: a runtime stability controller for low-precision training (arXiv 2606.00539).

The names below are the whole public surface of the package's top level. ``import gnmr`` imports neither
torch nor pyarrow; what needs them is imported when it is first asked for.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from gnmr import controller as controller
from gnmr.controller import Controller as Controller
from gnmr.controller import Decision as Decision
from gnmr.controller import State as State
from gnmr.errors import GnmrError as GnmrError
from gnmr.errors import GnmrWarning as GnmrWarning
from gnmr.errors import GuardError as GuardError
from gnmr.errors import PathError as PathError
from gnmr.errors import RecipeError as RecipeError
from gnmr.errors import RunError as RunError
from gnmr.errors import StateError as StateError
from gnmr.errors import TraceError as TraceError
from gnmr.errors import UnitError as UnitError
from gnmr.policy import Ema as Ema
from gnmr.policy import Policy as Policy
from gnmr.policy import Window as Window

if TYPE_CHECKING:
    from gnmr.paths.base import Paths as Paths
    from gnmr.paths.custom import CustomPaths as CustomPaths
    from gnmr.paths.float8 import Float8 as Float8
    from gnmr.paths.int8 import Int8 as Int8
    from gnmr.paths.saved_activations import SavedActivations as SavedActivations
    from gnmr.paths.simulated import Simulated as Simulated
    from gnmr.paths.transformer_engine import TransformerEngine as TransformerEngine
    from gnmr.pytorch.guard import Guard as Guard
    from gnmr.pytorch.units import find_units as find_units

__version__ = version("gnmr")

_LAZY = {
    "CustomPaths": "gnmr.paths.custom",
    "Float8": "gnmr.paths.float8",
    "Guard": "gnmr.pytorch.guard",
    "Int8": "gnmr.paths.int8",
    "Paths": "gnmr.paths.base",
    "SavedActivations": "gnmr.paths.saved_activations",
    "Simulated": "gnmr.paths.simulated",
    "TransformerEngine": "gnmr.paths.transformer_engine",
    "find_units": "gnmr.pytorch.units",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gnmr' has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"gnmr.{name} needs PyTorch: pip install 'gnmr[torch]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
