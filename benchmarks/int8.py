"""What real INT8 gains over BF16 on the linears of the paper's 1.3B shape, and what is left of it under a controller.

    python benchmarks/int8.py [--rounds 15] [--layers 14] [--tokens 256]

The forward of the seven linears of a decoder layer (hidden and intermediate size of recipes/paper/parts/1.3b.toml), one
layer after the other, without what lies between them. BF16, static INT8 and INT8 under a guard run in turn in this
process on one core; the guard has one unit of 98 on recovery at every step, another one each time. Frozen weights are
then put into the three stores, each in a process of its own that reads its memory from /proc. Times are CPU time. The
table goes into benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor, nn

import gnmr
from common import KEEP_MEMORY, machine, run, timed, write
from gnmr.pytorch.units import Operator, Unit
from gnmr.triggers import Random

SHAPE = tomllib.loads(files("gnmr.lab").joinpath("recipes/paper/parts/1.3b.toml").read_text())
HIDDEN, INNER = SHAPE["model"]["hidden_size"], SHAPE["model"]["intermediate_size"]
STEP_TOKENS = SHAPE["run"]["batch_size"] * SHAPE["run"]["gradient_accumulation"] * 256
ATTENTION, GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj")
RECOVERED = 2
STORE_LAYERS = 8
"""In the table of the stores: layers on recovery, and all."""


class Layer(nn.Module):
    """The linears of a decoder layer, in BF16 with random weights."""

    def __init__(self) -> None:
        super().__init__()
        for name in ATTENTION:
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16))
        for name in GATED:
            setattr(self, name, nn.Linear(HIDDEN, INNER, bias=False, dtype=torch.bfloat16))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, HIDDEN)."""
        y = self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))
        # The factor keeps the size of what passes; no norm, no attention, no activation function.
        return self.down_proj(self.gate_proj(y) + self.up_proj(y)) * 4


class Model(nn.Module):
    """As many layers as memory holds."""

    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, HIDDEN)."""
        for layer in self.layers:
            x = layer(x)
        return x


def sharing(model: Model) -> Model:
    """Another model on the same parameters."""
    with torch.device("meta"):
        twin = Model(len(model.layers))
    for mine, its in zip(twin.modules(), model.modules(), strict=True):
        mine._parameters = dict(its._parameters)
    return twin


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forwards(layers: int, n_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round: three forwards, and what a guard costs beside its forwards."""
    plain = Model(layers)
    static, guarded = sharing(plain), sharing(plain)
    paths = gnmr.Int8()
    paths.attach(gnmr.find_units(static))
    trigger = partial(Random, counts=[1] * rounds, seed=0)
    guard = gnmr.Guard(guarded, gnmr.Int8(), gnmr.Policy(max_active=1), trigger=trigger)
    x, two = tokens(n_tokens), tokens(2)
    times: dict[str, list[float]] = {name: [] for name in ("bf16", "int8", "guarded", "step", "quantise")}

    def forward(model: Model) -> Callable[[], object]:
        return lambda: model(x)

    for turn in range(rounds):
        guarded(two).sum().backward()
        step = timed(guard.step)
        guarded.zero_grad()
        # The step made the codes void: they are made anew here, not in the forwards below.
        paths.end_step(turn)
        with torch.no_grad():
            guarded(two)
            quantise = timed(lambda: static(two))
            again = timed(lambda: static(two))
        found = {"step": step, "quantise": quantise - again}
        sides = {"bf16": plain, "int8": static, "guarded": guarded}
        for name in list(sides)[turn % 3 :] + list(sides)[: turn % 3]:
            found[name] = timed(forward(sides[name]))
        for name, seconds in found.items():
            times[name].append(seconds)
        assert len(guard.active) == 1
    guard.detach()
    return times


def anonymous() -> int:
    """Bytes of this process's memory that the system cannot drop: no file has them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def blocks(model: Model) -> list[Unit]:
    """Layers as units."""
    return [
        Unit(
            f"layers.{i}", i, tuple(Operator(f"layers.{i}.{name}", child) for name, child in layer.named_children()), ()
        )
        for i, layer in enumerate(model.layers)
    ]


def store(frozen: str, layers: int, n_tokens: int) -> dict[str, float]:
    """Return bytes and seconds of one store of frozen weights, with two of the layers on recovery."""
    torch.set_num_threads(1)
    empty = anonymous()
    model = Model(layers).requires_grad_(False)
    found: dict[str, float] = {"bf16": anonymous() - empty}
    paths = gnmr.Int8(frozen=frozen)  # type: ignore[arg-type]
    found["attach"] = timed(lambda: paths.attach(blocks(model)))
    found["low"] = anonymous() - empty
    for unit in range(RECOVERED):
        paths.switch(unit, recover=True)
    found["fill"] = timed(lambda: paths.end_step(1)) / RECOVERED
    found["recovered"] = anonymous() - empty
    found["counted"] = sum(paths.weight_bytes()[key] for key in ("int8", "full"))
    x, plain = tokens(n_tokens).requires_grad_(), Layer().requires_grad_(False)
    both = [
        [timed(lambda layer=layer: layer(x).sum().backward()) for layer in (model.layers[0], plain)] for _ in range(9)
    ]
    found["slower"] = statistics.median(mine / its for mine, its in both)
    return found


def in_a_process(frozen: str, layers: int, n_tokens: int) -> dict[str, float]:
    """Run :func:`store` where memory that is freed goes back to the system, so that it can be measured."""
    environment = {key: value for key, value in os.environ.items() if key not in KEEP_MEMORY}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, __file__, "--store", frozen, "--layers", str(layers), "--tokens", str(n_tokens)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def speed_rows(times: dict[str, list[float]], n_tokens: int) -> tuple[list[str], list[str]]:
    """Return the table of the forwards, and what follows from it."""
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    rounds = list(zip(times["bf16"], times["int8"], times["guarded"], strict=True))
    names = {"bf16": "BF16", "int8": "static INT8", "guarded": "INT8 under a guard, 1.0 % promoted"}
    rows = []
    for name, what in names.items():
        ratios = [alone / mine for alone, mine in zip(times["bf16"], times[name], strict=True)]
        error = 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5
        rows.append(f"| {what} | {ms[name]:.0f} | {statistics.median(ratios):.3f} ± {error:.3f} |")
    kept = [(a - c) / (a - b) for a, b, c in rounds]
    error = 1.2533 * statistics.stdev(kept) / len(kept) ** 0.5
    per_step = STEP_TOKENS // n_tokens
    share = (ms["step"] + ms["quantise"]) / per_step
    low = ms["int8"] + ms["quantise"] / per_step
    of_step = (ms["bf16"] - ms["guarded"] - share) / (ms["bf16"] - low)
    return rows, [
        f"Of what static INT8 gains, the guarded forward keeps {statistics.median(kept):.1%} ± {error:.1%} "
        "(limit: 95 %).",
        f"Once a step, `guard.step()` takes {ms['step']:.0f} ms and quantising the weights {ms['quantise']:.0f} ms; "
        "over the",
        f"{per_step} such forwards of the recipe's step of {STEP_TOKENS:,} tokens that is {share:.2f} ms each, "
        "and with them",
        f"{of_step:.1%} are kept.",
    ]


def store_rows(layers: int, n_tokens: int) -> list[str]:
    """Return the table of the stores."""
    rows = []
    for frozen in ("resident", "offload", "dequantize"):
        found = in_a_process(frozen, layers, n_tokens)
        mib = {key: found[key] / 2**20 for key in ("bf16", "low", "recovered", "counted")}
        rows.append(
            f"| `{frozen}` | {mib['bf16']:.0f} | {mib['low']:.0f} | {mib['recovered']:.0f} | {mib['counted']:.0f} | "
            f"{1e3 * found['attach'] / layers:.0f} | {1e3 * found['fill']:.1f} | {found['slower']:.2f} |"
        )
    return rows


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    times = forwards(args.layers, args.tokens, args.rounds)
    rows, said = speed_rows(times, args.tokens)
    section = "\n".join(
        [
            "## Real INT8 (`int8.py`)",
            "",
            f"The linears of {args.layers} decoder layers of the 1.3B shape (hidden {HIDDEN}, intermediate {INNER}), "
            f"{args.tokens} tokens.",
            f"Machine: {machine()}; torch {torch.__version__}.",
            "",
            f"Forwards, all three in turn in one process, {args.rounds} rounds; the guard has one unit of "
            f"{7 * args.layers} on recovery.",
            "",
            "| forward | median (ms) | times as fast as BF16 |",
            "|---|---:|---:|",
            *rows,
            "",
            *said,
            "",
            f"Frozen weights of {STORE_LAYERS} such layers, {RECOVERED} of them on recovery; memory that the system "
            "cannot drop (anonymous pages,",
            "MiB) before, on the low-cost path, and on recovery; what `weight_bytes()` says of the last; and CPU time.",
            "",
            "| `frozen=` | BF16 | INT8 | recovered | `weight_bytes` | attach (ms a layer) | fetch (ms a layer) "
            "| recovery over BF16 |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *store_rows(STORE_LAYERS, args.tokens),
            "",
            "The last column is forward and backward of a layer on recovery, over that of a plain BF16 layer.",
        ]
    )
    print(section)
    write("int8.py", section)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of three forwards")
    parser.add_argument("--layers", type=int, default=14, help="decoder layers")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a forward")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if asked.store:
        print(json.dumps(store(asked.store, asked.layers, asked.tokens)))
    else:
        run(main)
