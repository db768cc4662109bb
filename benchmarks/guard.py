"""What the guard costs: beside clipping alone, and beside a training step on the same low-cost path.

    python benchmarks/guard.py [--repeats 41] [--steps 61]

The model is the 60M LLaMA of the paper's Table 8. Both sides of a pair run alternately in this process on one
core, and the order within a pair alternates too. Times are CPU time of the process, which on one thread is the
wall time of an idle core. The table goes into benchmarks/README.md, between the markers of this file.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr
from common import machine, run, timed, write

MAX_NORM = 1e-3  # always clips: the more expensive case


def make_model(*, tiny: bool = False) -> LlamaForCausalLM:
    """The 60M shape, or the same operators so small that only the cost of calling them is left."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64 if tiny else 32000,
        hidden_size=16 if tiny else 512,
        intermediate_size=16 if tiny else 1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def backward(model: LlamaForCausalLM, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    model(input_ids=batch, labels=batch).loss.backward()


def alternate(sides: list[Callable[[int], float]], repeats: int) -> list[list[float]]:
    """Run both sides ``repeats`` times in turn, after two rounds to warm up; returns their seconds."""
    times: list[list[float]] = [[], []]
    for repeat in range(-2, repeats):
        order = (0, 1) if repeat % 2 else (1, 0)
        for side in order:
            seconds = sides[side](repeat)
            if repeat >= 0:
                times[side].append(seconds)
    return times


def clipping(repeats: int) -> list[list[float]]:
    """Only the clip is timed; a backward of two tokens before it makes new gradients."""
    plain, model = make_model(), make_model()
    guard = gnmr.Guard(model, None, gnmr.Policy(max_active=4), monitor_only=True)

    def alone(repeat: int) -> float:
        backward(plain, 2, repeat + 2)
        return timed(lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))

    def guarded(repeat: int) -> float:
        backward(model, 2, repeat + 2)
        return timed(lambda: (guard.step(), guard.clip_grad_norm_(MAX_NORM)))

    return alternate([alone, guarded], repeats)


def training(steps: int, length: int, *, tiny: bool = False) -> list[list[float]]:
    """A whole step of AdamW; both sides store 4-bit activations, one has a guard that promotes nothing."""
    plain, model = make_model(tiny=tiny), make_model(tiny=tiny)
    static = gnmr.SavedActivations(low="e2m1", high="e4m3")
    static.attach(gnmr.find_units(plain))
    guard = gnmr.Guard(model, gnmr.SavedActivations(low="e2m1", high="e4m3"), gnmr.Policy(max_active=0))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (plain, model)]

    def alone(step: int) -> float:
        def work() -> None:
            backward(plain, length, step + 2)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            optimizers[0].step()
            optimizers[0].zero_grad()

        return timed(work)

    def guarded(step: int) -> float:
        def work() -> None:
            backward(model, length, step + 2)
            guard.step()
            guard.clip_grad_norm_(MAX_NORM)
            optimizers[1].step()
            optimizers[1].zero_grad()

        return timed(work)

    return alternate([alone, guarded], steps)


def row(name: str, times: list[list[float]], limit: float | None) -> str:
    """One line of the table: medians, and the median of the paired ratios with its standard error."""
    alone, guarded = (statistics.median(side) for side in times)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    error = 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median, for normal noise
    return (
        f"| {name} | {1e3 * alone:.2f} | {1e3 * guarded:.2f} | {guarded / alone:.4f} | "
        f"{statistics.median(ratios):.4f} ± {error:.4f} | {limit or '-'} | {len(ratios)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=41, help="pairs of clips")
    parser.add_argument("--steps", type=int, default=61, help="pairs of training steps")
    parser.add_argument("--length", type=int, default=64, help="tokens of a training step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = training(args.steps, args.length)
    tiny = training(5 * args.steps, 4, tiny=True)
    rows = [
        row("`guard.step()` + `guard.clip_grad_norm_` beside `clip_grad_norm_`", clipping(args.repeats), 1.10),
        row(
            f"training step of {args.length} tokens on 4-bit saved activations, with and without a guard",
            whole,
            1.01,
        ),
        row("the same with tensors of no size: the guard's own work a step", tiny, None),
    ]
    own = 1e3 * statistics.median(b - a for a, b in zip(*tiny, strict=True))
    step = 1e3 * statistics.median(whole[0])
    section = "\n".join(
        [
            "## The guard's cost (`guard.py`)",
            "",
            "60M LLaMA (hidden 512, intermediate 1376, 8 heads, 8 layers, vocabulary 32000), float32.",
            f"Machine: {machine()}; torch {torch.__version__}.",
            "",
            "Median CPU time in ms, both sides in turn in one process; the ratio must stay below its limit.",
            "",
            "| what | without (ms) | with (ms) | ratio of medians | median of paired ratios | limit | pairs |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"The guard's own work is {own:.2f} ms a step, whatever the size of the tensors: {own / step:.2%} of",
            "the second row's step. Where the error of that row is larger than its limit allows, this is the",
            "sharper bound.",
        ]
    )
    print(section)
    write("guard.py", section)


if __name__ == "__main__":
    run(main)
