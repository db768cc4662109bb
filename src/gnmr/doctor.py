"""What this machine and this environment can do with gnmr: ``gnmr doctor`` prints it.

A path is proved by a tiny run of it, forward and backward on both sides of its switch, with what it reads back: a
package that is there in the right version may still not work here.
"""

import difflib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gnmr._machine import cpu_flags, cpu_name
from gnmr.errors import PathError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnmr.paths.base import Paths

Status = Literal["ok", "doubt", "missing", "broken"]
"""Works; works, or should, and deserves a look; is not there or cannot be here; is there and does not work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of a package, a path or a setting.
        status: what came of it.
        detail: the version, the evidence or the reason.
    """

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Examination:
    """Everything that was looked at.

    Attributes:
        packages: what gnmr uses or works with, against the ranges in its own metadata.
        machine: facts about processor and accelerators, by name.
        paths: each packaged backend, run.
        settings: what slows a run down.
    """

    packages: tuple[Finding, ...]
    machine: dict[str, Any]
    paths: tuple[Finding, ...]
    settings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)

    def faults(self, asked: Sequence[str] = ()) -> tuple[Finding, ...]:
        """Return what is broken, and, of what is asked for, whatever is not in order.

        Args:
            asked: names of packages and paths, in any case.

        Raises:
            ValueError: none is called so.
        """
        known = {_key(finding.name): finding for finding in (*self.packages, *self.paths)}
        for name in asked:
            if _key(name) not in known:
                close = difflib.get_close_matches(_key(name), known, n=1)
                hint = f"; did you mean {known[close[0]].name!r}?" if close else ""
                raise ValueError(f"{name!r} is no package or path that gnmr knows{hint}")
        wanted = [known[_key(name)] for name in asked]
        found = [finding for finding in known.values() if finding.status == "broken"]
        return tuple(dict.fromkeys([*found, *(each for each in wanted if each.status != "ok")]))


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def examine() -> Examination:
    """Look at everything; takes seconds, and leaves nothing behind."""
    return Examination(packages(), machine(), paths(), settings())


WORKS_WITH = ("peft", "lightning", "torchao", "lm-eval", "transformer-engine")
"""Packages that gnmr works beside and whose range may not be in its metadata."""


def packages() -> tuple[Finding, ...]:
    """Compare what is installed with the ranges in gnmr's metadata, which are those that its tests passed with.

    Examples:
        >>> next(each for each in packages() if each.name == "numpy").status
        'ok'
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    ranges = dict.fromkeys(WORKS_WITH, SpecifierSet())
    for line in requires("gnmr") or ():
        requirement = Requirement(line)
        if requirement.name != "gnmr":
            ranges[_key(requirement.name)] = requirement.specifier
    return tuple(_package(name, allowed) for name, allowed in sorted(ranges.items()))


def _package(name: str, allowed: Any) -> Finding:
    tested = f"tested with {allowed}" if allowed else "no range was tested"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "missing", f"not installed; {tested}")
    if allowed and allowed.contains(found, prereleases=True):
        return Finding(name, "ok", found)
    return Finding(name, "doubt" if allowed else "ok", f"{found}, {tested}")


_CPU = {
    "int8": ("avx512_vnni", "avx_vnni", "asimddp"),
    "int8 matrices (AMX)": ("amx_int8",),
    "bf16": ("avx512_bf16", "avx_bf16", "bf16"),
    "bf16 matrices (AMX)": ("amx_bf16",),
}
"""Arithmetic, and the kernel's names of the instruction sets that have it."""


def machine() -> dict[str, Any]:
    """Return facts about the processor and the accelerators."""
    flags = cpu_flags()
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": _cores(),
        "cpu_has": {name: bool(flags.intersection(sets)) for name, sets in _CPU.items()} if flags else {},
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except ModuleNotFoundError:
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        nvidia = torch.version.hip is None
        found.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
                # What NVIDIA's libraries ask for; of AMD's chips the numbers say nothing of the kind.
                "fp8": capability >= (8, 9) if nvidia else None,
                "mxfp8": (10, 0) <= capability < (12, 0) if nvidia else None,
            }
        )
    return found


class Trial(NamedTuple):
    """A backend, and a model that it can run.

    Attributes:
        paths: the backend.
        model: with operators that are units by default.
        region: what the forward of the model stands in.
    """

    paths: "Paths"
    model: "nn.Module"
    region: Callable[[], AbstractContextManager[Any]] = nullcontext


def _saved_activations(device: "torch.device") -> Trial:
    import gnmr

    return Trial(gnmr.SavedActivations(), _layers(device))


def _simulated(device: "torch.device") -> Trial:
    import gnmr

    return Trial(gnmr.Simulated(), _layers(device))


def _float8(device: "torch.device") -> Trial:
    import gnmr

    return Trial(gnmr.Float8(), _layers(device))


def _int8(device: "torch.device") -> Trial:
    import gnmr

    return Trial(gnmr.Int8(), _layers(device))


def _custom(device: "torch.device") -> Trial:
    import torch

    import gnmr

    low = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
    return Trial(gnmr.CustomPaths(low_context=low), _layers(device))


def _transformer_engine(device: "torch.device") -> Trial:
    import gnmr

    paths = gnmr.TransformerEngine("current")
    if device.type != "cuda":
        raise PathError("TransformerEngine needs a CUDA device")
    from transformer_engine.pytorch import Linear

    return Trial(paths, _layers(device, Linear), paths.autocast)


TRIALS: dict[str, Callable[["torch.device"], Trial]] = {
    "SavedActivations": _saved_activations,
    "Simulated": _simulated,
    "Float8": _float8,
    "Int8": _int8,
    "CustomPaths": _custom,
    "TransformerEngine": _transformer_engine,
}
"""Each packaged backend and what tries it, which raises ImportError or PathError where it cannot be tried."""

NOT_RUN_BY_US = frozenset(["TransformerEngine"])
"""Backends that no test of ours has run on the hardware that they need."""


def paths() -> tuple[Finding, ...]:
    """Run each packaged backend once on both paths, on the accelerator where there is one."""
    return tuple(_try(name, make) for name, make in TRIALS.items())


def _try(name: str, make: Callable[["torch.device"], Trial]) -> Finding:
    try:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            trial = make(device)
    except (ImportError, PathError) as error:
        return Finding(name, "missing", str(error) + _caveat(name))
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is what was looked for)
        return _broken(name, error)
    try:
        low, high = run(trial, device)
    except Exception as error:  # noqa: BLE001
        return _broken(name, error)
    detail = f"ran both paths on {device.type}; gradients off by {low:.1%}, on recovery by {high:.1%}"
    return Finding(name, "ok", detail + _caveat(name))


def _broken(name: str, error: Exception) -> Finding:
    return Finding(name, "broken", f"{type(error).__name__}: {error}" + _caveat(name))


def _caveat(name: str) -> str:
    return "; not yet run on hardware by us" if name in NOT_RUN_BY_US else ""


def run(trial: Trial, device: "torch.device") -> tuple[float, float]:
    """Run a backend's two paths and hold them against the plain model.

    Returns:
        Relative errors of the weight gradients: on the low-cost path, on recovery.

    Raises:
        gnmr.PathError: the switch does nothing, recovery is not closer to the plain model than the low-cost path, or
            the model is another after detaching.
    """
    import torch

    from gnmr.pytorch.units import find_units

    paths, model, region = trial
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, _WIDTH, generator=generator).to(device)
    units = find_units(model)
    plain = _gradients(model, x, nullcontext())
    paths.attach(units)
    try:
        errors = []
        for recover in (False, True):
            for unit in units:
                paths.switch(unit.index, recover)
            found = _gradients(model, x, region())
            planned, other = paths.ran()[[int(recover), 1 - int(recover)]]
            if other.any() or not planned.all():
                raise PathError(f"switched to {'recovery' if recover else 'low-cost'}, and ran on the other path")
            errors.append(max(_distance(a, b) for a, b in zip(found, plain, strict=True)))
    finally:
        paths.detach()
    low, high = errors
    if not high < low < 1:
        raise PathError(f"gradients are off by {low:.1%} on the low-cost path and by {high:.1%} on recovery")
    after = _gradients(model, x, nullcontext())
    if not all(torch.equal(a, b) for a, b in zip(after, plain, strict=True)):
        raise PathError("the model is not what it was after the paths were detached")
    return low, high


_WIDTH = 64


def _layers(device: "torch.device", linear: Any = None) -> "nn.Module":
    from torch import nn

    linear = nn.Linear if linear is None else linear
    pairs = [nn.ModuleDict({"fc1": linear(_WIDTH, 2 * _WIDTH), "fc2": linear(2 * _WIDTH, _WIDTH)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(pairs)}).to(device)


def _gradients(model: Any, x: "Tensor", region: AbstractContextManager[Any]) -> "list[Tensor]":
    model.zero_grad()
    with region:
        y = x
        for layer in model["layers"]:
            y = y + layer["fc2"](layer["fc1"](y).relu())
    y.square().mean().backward()
    return [param.grad.clone() for name, param in model.named_parameters() if name.endswith("weight")]


def _distance(found: "Tensor", wanted: "Tensor") -> float:
    return float((found - wanted).norm() / wanted.norm())


def settings() -> tuple[Finding, ...]:
    """Look for what slows a run down."""
    environment = os.environ
    found = [
        _setting(
            "OMP_WAIT_POLICY",
            environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or _cores() == 1,
            "idle threads spin, and two programs on the same cores slow each other many times over: set it to PASSIVE",
        ),
        _setting(
            "CUDA_LAUNCH_BLOCKING",
            environment.get("CUDA_LAUNCH_BLOCKING", "0") == "0",
            "every kernel is waited for: unset it, but to debug",
        ),
    ]
    threads = _threads()
    if threads is not None:
        why = f"torch computes with {threads} threads on {_cores()} cores: set OMP_NUM_THREADS"
        found.append(_setting("OMP_NUM_THREADS", threads <= _cores(), why))
    return tuple(found)


def _setting(name: str, fine: bool, why: str) -> Finding:
    value = os.environ.get(name, "not set")
    return Finding(name, "ok" if fine else "doubt", value if fine else f"{value}; {why}")


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads() -> int | None:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return int(torch.get_num_threads())
