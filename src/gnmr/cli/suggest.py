"""``gnmr suggest``: thresholds for a wanted rate of false alarms, from a trace."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer


def suggest(
    trace: Annotated[
        Path, typer.Argument(help="A healthy run's trace: *.parquet, or the *.arrow of one that goes on.")
    ],
    rate: Annotated[float, typer.Option("--false-alarm-rate", help="Wanted, a unit and step: in (0, 1).")] = 0.001,
    skip: Annotated[int, typer.Option(min=0, help="Steps at the beginning to leave out; the warm-up always is.")] = 0,
) -> None:
    """Suggest α and β: as the trace has them, and as Theorem 2 bounds them. Needs no torch."""
    from gnmr.theory import empirical_threshold, kappas, persistence, suggestions
    from gnmr.trace import read_trace

    found = read_trace(trace)
    rows = (found.steps > max(skip, found.policy.warmup_steps, 1))[:, None] & found.observed
    alpha = empirical_threshold(found.gnmr[rows], rate)
    beta = empirical_threshold(found.delta_gnmr[rows], rate)
    typer.echo(f"{int(rows.sum())} observed unit-steps of {len(found.units)} units; wanted false alarms: {rate:g}")
    typer.echo(f"from the trace, if it is healthy: alpha {alpha:.3g} (GNMR), beta {beta:.3g} (ΔGNMR)")
    kappa = float(np.nanmedian(kappas(found, skip)))
    bounds = ", ".join(
        f"{'none' if value is None else f'{value:.3g}'} at step {step}"
        for step, value in suggestions(found, rate, (10, 100, 1000)).items()
    )
    typer.echo(f"Theorem 2, a bound and far above: alpha {bounds} (median kappa {kappa:.3g})")
    by_unit, pooled, events = persistence(found)
    if not events:
        typer.echo("persistence π: no risk above 1 in this trace")
    else:
        most = [unit for unit in np.argsort(-np.nan_to_num(by_unit)) if not np.isnan(by_unit[unit])][:3]
        named = ", ".join(f"{found.units[unit]} {by_unit[unit]:.2f}" for unit in most)
        typer.echo(f"persistence π: {pooled:.2f} over {events} risks above 1; the highest: {named}")
    typer.echo(f"try them on it: gnmr replay {trace} --alpha {alpha:.4g} --beta {beta:.4g}")
