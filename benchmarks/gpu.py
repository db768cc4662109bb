"""What the controller costs on a GPU: beside BF16 and static FP8, in one run.

    python benchmarks/gpu.py [--shape 1.3b 8b] [--steps 20]
    python benchmarks/gpu.py --device cpu --shape tiny --steps 2    # its logic, without a GPU

On a GPU each side trains the same LLaMA on the same random tokens in a process of its own, one after the other, since
two models of 8B do not fit; BF16 runs first and last, and the two tell how far the clock drifts. Under the controller
the whole budget is in use at every step, by the units that the paper ranks first, so plans change as often as they can.
The results go into gpu-CARD.md beside this file.

Not yet run on a GPU by us.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import gnmr
from common import machine
from gnmr.numerics.packing import pack, unpack
from gnmr.triggers import AlwaysTop

MAX_NORM = 1.0


class Shape(NamedTuple):
    """A model and what it trains on."""

    config: dict[str, int]
    batch: int
    length: int
    checkpointing: bool


NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def config(*values: int) -> dict[str, int]:
    return dict(zip(NAMES, values, strict=True))


SHAPES = {
    "tiny": Shape(config(64, 32, 64, 2, 2, 2), batch=2, length=16, checkpointing=False),
    # The paper's.
    "1.3b": Shape(config(32000, 2048, 5504, 24, 32, 32), batch=8, length=2048, checkpointing=False),
    # Llama 3's; in BF16 the weights, gradients and states of AdamW are 64 GB.
    "8b": Shape(config(128256, 4096, 14336, 32, 32, 8), batch=1, length=4096, checkpointing=True),
}


def float8() -> gnmr.Paths:
    if not hasattr(gnmr, "Float8"):
        raise ImportError("this gnmr has no Float8")
    return gnmr.Float8(low="rowwise")


GUARDED: dict[str, Callable[[], gnmr.Paths]] = {
    "FP8 under the controller": float8,
    "4-bit saved activations under the controller": gnmr.SavedActivations,
    "TransformerEngine FP8 under the controller": lambda: gnmr.TransformerEngine("current"),
}
SIDES = ("BF16", "static FP8", *GUARDED, "BF16 again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--shape", nargs="+", default=["1.3b", "8b"], choices=SHAPES)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after a quarter as many to warm up")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="layer by layer; default: on a GPU")
    parser.add_argument("--out", type=Path, help="the file to write; default: gpu-CARD.md beside this one")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # this is the process of one side
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu --shape tiny is a dry run")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    if args.side:
        print(json.dumps(measure(args.side, SHAPES[args.shape[0]], args)))
        return
    if args.out is None and args.device == "cpu":
        sys.exit("a dry run has no place beside the results: give it --out FILE")
    out = args.out or Path(__file__).with_name(f"gpu-{slug(card(args.device))}.md")
    section = "\n".join([*head(args), *(line for name in args.shape for line in table(name, args)), *bandwidth(args)])
    print(section)
    out.write_text(section + "\n")


def table(name: str, args: argparse.Namespace) -> list[str]:
    """Measure all sides of one shape."""
    lines = [
        f"## {name}",
        "",
        "| side | step (ms) | of BF16 | peak memory (GiB) | guard's own (ms) | clipping alone (ms) | host syncs: guard "
        "| host syncs: step | units on recovery |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = None
    for side in SIDES:
        found = separately(side, name, args) if args.device == "cuda" else measure(side, SHAPES[name], args)
        if "reason" in found:
            print(f"{name}: {side} is left out: {found['reason']}", flush=True)
            lines.append(f"| {side} | left out: {found['reason']} | | | | | | | |")
            continue
        base = found["step"] if side == "BF16" else base
        ratio = "-" if base is None else f"{found['step'] / base:.3f}"
        cells = (found[key] for key in ("peak", "guard", "clip", "guard_syncs", "step_syncs", "recovered"))
        lines.append(
            f"| {side} | {found['step']:.2f} ± {found['spread']:.2f} | {ratio} | {' | '.join(map(cell, cells))} |"
        )
    return [*lines, ""]


def separately(side: str, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a side in a process of its own: its memory is all its own, and its failure too."""
    compiled = "--compile" if args.compile else "--no-compile"
    options = ["--device", args.device, "--shape", shape, "--steps", str(args.steps), compiled, "--side", side]
    done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"reason": f"its process ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def measure(side: str, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Train one side; returns milliseconds, GiB and counts, or the reason why it cannot be."""
    device = torch.device(args.device)
    try:
        return Trainer(side, shape, device, compiled=args.compile).measure(args.steps)
    except (ImportError, gnmr.GnmrError) as error:
        return {"reason": f"{error}".replace("|", "/").replace("\n", " ")}
    except torch.OutOfMemoryError:
        return {"reason": "out of memory"}


class Trainer:
    """One side: a model, its optimiser and, under the controller, its guard."""

    def __init__(self, side: str, shape: Shape, device: torch.device, *, compiled: bool) -> None:
        self.device, self.shape = device, shape
        torch.manual_seed(0)
        llama = LlamaConfig(**shape.config, tie_word_embeddings=False, use_cache=False)
        with device:
            self.model = AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)
        if shape.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.guard: gnmr.Guard | None = None
        self.region: Callable[[], AbstractContextManager[Any]] = nullcontext
        if side == "static FP8":
            to_float8(self.model)
        elif side in GUARDED:
            if side.startswith("TransformerEngine"):
                to_te(self.model)
            paths = GUARDED[side]()
            self.region = getattr(paths, "autocast", nullcontext)
            units = len(gnmr.find_units(self.model))
            self.guard = gnmr.Guard(self.model, paths, gnmr.Policy(max_active=max(1, units // 14)), trigger=AlwaysTop)
        if compiled:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.recovered: list[int] = []

    def backward(self, step: int) -> None:
        """Run one micro-batch of the step's own tokens."""
        generator = torch.Generator().manual_seed(step)
        size = (self.shape.batch, self.shape.length)
        tokens = torch.randint(self.shape.config["vocab_size"], size, generator=generator).to(self.device)
        with self.region():
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    def look(self) -> None:
        """What the controller does in a step, or the clipping that it stands in for."""
        if self.guard is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            return
        self.guard.step()
        self.guard.clip_grad_norm_(MAX_NORM)
        self.recovered.append(len(self.guard.active))

    def step(self, step: int) -> None:
        """Train a step."""
        self.backward(step)
        self.look()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, steps: int) -> dict[str, Any]:
        """Return milliseconds, GiB and counts; None where there is no such thing."""
        for step in range(max(2, steps // 4)):
            self.step(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.recovered.clear()
        times = [timed(lambda step=step: self.step(step), self.device) for step in range(steps)]
        found = {
            "step": statistics.median(times),
            "spread": statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else 0.0,
            "peak": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None,
            "recovered": statistics.mean(self.recovered) if self.guard else None,
            "step_syncs": host_syncs(lambda: self.step(0), self.device),
        }
        looks, clips = [], []
        for step in range(max(2, steps // 2)):  # with nothing else in flight
            self.backward(step)
            looks.append(timed(self.look, self.device))
            params = self.model.parameters()
            clips.append(timed(lambda params=params: torch.nn.utils.clip_grad_norm_(params, MAX_NORM), self.device))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.backward(0)
        found["guard_syncs"] = host_syncs(self.look, self.device) if self.guard else None
        return found | {"guard": statistics.median(looks) if self.guard else None, "clip": statistics.median(clips)}


def to_float8(model: nn.Module) -> None:
    """Make the units' linears static FP8 by torchao, all the time."""
    if find_spec("torchao") is None:
        raise ImportError("torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = {unit.name for unit in gnmr.find_units(model)}
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn in names, config=config)


def to_te(model: nn.Module) -> None:
    """Put te.Linear in the place of the units' linears, with their weights."""
    if find_spec("transformer_engine") is None:
        raise ImportError("TransformerEngine is not installed")
    from transformer_engine.pytorch import Linear

    for unit in gnmr.find_units(model):
        parent, _, name = unit.name.rpartition(".")
        old = model.get_submodule(unit.name)
        new = Linear(old.in_features, old.out_features, bias=False, params_dtype=old.weight.dtype)
        new.weight.data.copy_(old.weight.data)
        setattr(model.get_submodule(parent), name, new)


def bandwidth(args: argparse.Namespace) -> list[str]:
    """Pack and unpack an activation, beside a copy of it on the device."""
    device = torch.device(args.device)
    rows, width = (64, 256) if args.device == "cpu" else (16384, 4096)
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    rates = {"copy on the device": rate(x.clone, 2 * x.nbytes, device, args.steps)}
    for fmt in ("e2m1", "int4", "e4m3", "int8"):
        packed = pack(x, fmt)
        moved = x.nbytes + packed.nbytes
        rates[f"pack {fmt}"] = rate(lambda fmt=fmt: pack(x, fmt), moved, device, args.steps)
        rates[f"unpack {fmt}"] = rate(lambda packed=packed: unpack(packed), moved, device, args.steps)
    copy = rates["copy on the device"]
    return [
        f"## Packing {rows} x {width} bfloat16",
        "",
        "Bytes read and written by the best kernel that there could be, over the time that ours take.",
        "",
        "| | GB/s | of a copy |",
        "|---|---:|---:|",
        *(f"| {name} | {found:.2f} | {found / copy:.1%} |" for name, found in rates.items()),
    ]


def rate(work: Callable[[], object], moved: int, device: torch.device, repeats: int) -> float:
    """Return GB/s."""
    for _ in range(3):
        work()
    return moved / 1e6 / statistics.median(timed(work, device) for _ in range(max(3, repeats)))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def host_syncs(work: Callable[[], object], device: torch.device) -> int | None:
    """Count how often the host waits for the device, as torch warns of it; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else machine()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def head(args: argparse.Namespace) -> list[str]:
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, gnmr {gnmr.__version__}"
    dry = [] if args.device == "cuda" else ["**A dry run on a CPU: these figures say nothing.**", ""]
    return [
        f"# {card(args.device)}",
        "",
        *dry,
        f"`benchmarks/gpu.py`; {versions}; layers {'compiled' if args.compile else 'not compiled'}, BF16 weights, "
        f"fused AdamW. Medians over {args.steps} steps with the standard error of the mean.",
        "",
        "The guard's own time is `guard.step()` with `guard.clip_grad_norm_` while nothing else runs, beside "
        "`torch.nn.utils.clip_grad_norm_` on the same gradients. The whole budget is in use at every step.",
        "",
    ]


if __name__ == "__main__":
    main()
