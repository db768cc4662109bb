"""One update of a million units, beside one ``numpy.argpartition`` of the same length, on one core.

Run it with ``python benchmarks/controller.py``.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from statistics import median
from time import perf_counter

import numpy as np

from gnmr import Policy
from gnmr.controller import init, update

UNITS, ACTIVE, WARM_UP, ROUNDS = 1_000_000, 1000, 20, 41


def main() -> None:
    draw = np.random.default_rng(0)
    norms = [draw.lognormal(size=UNITS) for _ in range(20)]
    policy = Policy(max_active=ACTIVE)
    state = init(policy, UNITS)
    for row in norms[:WARM_UP]:  # every queue is full, and the memory is the process's
        state, _ = update(policy, state, row)
    updates, partitions = [], []
    for row in (norms[i % len(norms)] for i in range(ROUNDS)):
        start = perf_counter()
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            state, decision = update(policy, state, row)
        updates.append(perf_counter() - start)
        start = perf_counter()
        np.argpartition(row, UNITS - ACTIVE)
        partitions.append(perf_counter() - start)
    assert decision.active.sum() <= ACTIVE
    ratios = [a / b for a, b in zip(updates, partitions, strict=True)]
    print(f"| {UNITS:,} units, k = {ACTIVE} | median of {ROUNDS} |")
    print("|---|---:|")
    print(f"| one update | {median(updates) * 1e3:.1f} ms |")
    print(f"| one numpy.argpartition | {median(partitions) * 1e3:.1f} ms |")
    print(f"| ratio, round by round | {median(ratios):.2f} (wanted: at most 8) |")


if __name__ == "__main__":
    main()
