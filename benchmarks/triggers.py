"""What the errors that the trigger ``gap`` reads cost in a training step of 4,096 tokens.

    python benchmarks/triggers.py [--steps 21]

Both sides run alternately in this process on one core, on simulated INT8 products and on packed 4-bit activations, with
the same five units on recovery at every step: one measures the errors of its casts, the other does not. Times are CPU
time. The table goes into benchmarks/README.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr
from common import machine, run, timed, write
from gnmr.paths import product, saved_activations
from gnmr.paths.errors import ErrorMeter
from gnmr.pytorch.signals import CastError
from gnmr.triggers import AlwaysTop
from guard import alternate, row

BATCH, LENGTH = 16, 256


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Measured(AlwaysTop):
    """Chooses as the other side does, by norm, so that the errors are all that differs."""

    needs = "error"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.needs = "error"


class Meter:
    """CPU time in the functions that read errors."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0
        self.wrap(ErrorMeter, "add", "read")
        self.wrap(product, "sampled")
        self.wrap(saved_activations.SavedActivations, "measure", "errors")
        self.wrap(product._Books, "_measure")
        self.wrap(gnmr.Simulated, "meter", "errors")
        self.wrap(CastError, "read")

    def wrap(self, owner: Any, *names: str) -> None:
        """Time these functions from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._depth += 1
            start = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.process_time() - start

        return timed


def side(paths: gnmr.Paths, trigger: type[AlwaysTop]) -> Callable[[int], float]:
    """A training step whose guard takes the top five by norm."""
    model = make_model()
    signal = {"signal": lambda guard: CastError(guard.paths, every=4)} if trigger is Measured else {}
    guard = gnmr.Guard(model, paths, gnmr.Policy(max_active=5), trigger=partial(trigger, by="norm"), **signal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number + 2)
        batch = torch.randint(256, (BATCH, LENGTH), generator=generator)

        def work() -> None:
            model(input_ids=batch, labels=batch).loss.backward()
            guard.step()
            optimizer.step()
            optimizer.zero_grad()

        return timed(work)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=21, help="pairs of training steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backends = {
        "`Simulated`, INT8 with delayed scales": partial(gnmr.Simulated, "int8", "exact", scaling="delayed"),
        "`SavedActivations`, 4 bits": gnmr.SavedActivations,
    }
    meter, rows, shares = Meter(), [], []
    for name, make in backends.items():
        meter.seconds = 0.0
        times = alternate([side(make(), AlwaysTop), side(make(), Measured)], args.steps)
        rows.append(row(name, times, 1.02))
        shares.append(meter.seconds / (args.steps + 2) / statistics.median(times[0]))
    section = "\n".join(
        [
            "## What the trigger `gap` costs (`triggers.py`)",
            "",
            "LLaMA (hidden 128, intermediate 344, 4 heads, 4 layers, 28 units), float32; "
            f"{BATCH} x {LENGTH} tokens a step.",
            f"Machine: {machine()}; torch {torch.__version__}.",
            "",
            "Median CPU time of a training step in ms, with the same five units on recovery: without the errors of the",
            "casts, and with what `gap` reads of them. Both sides in turn in one process.",
            "",
            "| paths | without (ms) | with (ms) | ratio of medians | median of paired ratios | limit | pairs |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "The time within the functions that read errors, a sharper bound where the pairs are noisy: "
            + " and ".join(f"{share:.2%}" for share in shares)
            + " of",
            "a step in these two rows.",
        ]
    )
    print(section)
    write("triggers.py", section)


if __name__ == "__main__":
    run(main)
