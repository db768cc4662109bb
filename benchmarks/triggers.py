"""What the trigger ``gap`` costs in a training step of 4,096 tokens, beside the default trigger.

    python benchmarks/triggers.py [--steps 21]

Both sides run alternately in this process on one core, on simulated INT8 products and on packed 4-bit activations, with
five units on recovery at every step. Times are CPU time. The table goes into benchmarks/README.md.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr
from common import machine, run, timed, write
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


def side(paths: gnmr.Paths, by: str) -> Callable[[int], float]:
    """A training step whose guard takes the top five by one score."""
    model = make_model()
    signal = {"signal": lambda guard: CastError(guard.paths, every=4)} if by == "gap" else {}
    guard = gnmr.Guard(model, paths, gnmr.Policy(max_active=5), trigger=partial(AlwaysTop, by=by), **signal)
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
    rows = [
        row(name, alternate([side(make(), "norm"), side(make(), "gap")], args.steps), 1.02)
        for name, make in backends.items()
    ]
    section = "\n".join(
        [
            "## What the trigger `gap` costs (`triggers.py`)",
            "",
            "LLaMA (hidden 128, intermediate 344, 4 heads, 4 layers, 28 units), float32; "
            f"{BATCH} x {LENGTH} tokens a step.",
            f"Machine: {machine()}; torch {torch.__version__}.",
            "",
            "Median CPU time of a training step in ms, five units on recovery: the top by gradient norm, and the top",
            "by `gap`, which measures the errors of the casts. Both sides in turn in one process.",
            "",
            "| paths | `norm` (ms) | `gap` (ms) | ratio of medians | median of paired ratios | limit | pairs |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(section)
    write("triggers.py", section)


if __name__ == "__main__":
    run(main)
