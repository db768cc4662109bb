"""One update of a million units, beside one ``numpy.argpartition`` of the same length, on one core.

Run it with ``python benchmarks/controller.py``.
"""

from statistics import median

import numpy as np

from common import machine, run, timed, write
from gnmr import Policy
from gnmr.controller import init, update

UNITS, ACTIVE, WARM_UP, ROUNDS = 1_000_000, 1000, 20, 41


def main() -> None:
    draw = np.random.default_rng(0)
    norms = [draw.lognormal(size=UNITS) for _ in range(20)]
    policy = Policy(max_active=ACTIVE)
    state = init(policy, UNITS)

    def step(row: np.ndarray) -> None:
        nonlocal state
        state, decision = update(policy, state, row)
        assert decision.active.sum() <= ACTIVE

    for row in norms[:WARM_UP]:  # every queue is full, and the memory is the process's
        step(row)
    updates, partitions = [], []
    for row in (norms[i % len(norms)] for i in range(ROUNDS)):
        updates.append(timed(lambda row=row: step(row)))
        partitions.append(timed(lambda row=row: np.argpartition(row, UNITS - ACTIVE)))
    ratios = [a / b for a, b in zip(updates, partitions, strict=True)]
    section = "\n".join(
        [
            "## One update of the controller (`controller.py`)",
            "",
            f"Machine: {machine()}; NumPy {np.__version__}. {UNITS:,} units, k = {ACTIVE}; both in turn.",
            "",
            f"| | median of {ROUNDS} |",
            "|---|---:|",
            f"| one update | {median(updates) * 1e3:.1f} ms |",
            f"| one `numpy.argpartition` of the same length | {median(partitions) * 1e3:.1f} ms |",
            f"| ratio, round by round | {median(ratios):.2f} (limit 8) |",
        ]
    )
    print(section)
    write("controller.py", section)


if __name__ == "__main__":
    run(main)
