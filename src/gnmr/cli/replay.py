"""``gnmr replay``: decide a recorded run again under another policy."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from gnmr.policy import Ema, Schedule, Window

if TYPE_CHECKING:
    from gnmr.replay import Difference, Summary
    from gnmr.trace import Trace


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace: *.parquet, or the *.arrow of a run that goes on.")],
    alpha: Annotated[str | None, typer.Option(help="GNMR threshold: 1.5, or a schedule 1:1.5,21:1.1.")] = None,
    beta: Annotated[str | None, typer.Option(help="ΔGNMR threshold, a schedule, or none.")] = None,
    max_active: Annotated[int | None, typer.Option(help="maxO, the hard cap.")] = None,
    window: Annotated[int | None, typer.Option(help="δ, the window of ΔGNMR.")] = None,
    lock_steps: Annotated[int | None, typer.Option(help="T_lock.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of high-fidelity warm-up.")] = None,
    history: Annotated[str | None, typer.Option(help="cumulative, ema:0.97 or window:64.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Re-decide a trace under another policy, and say what would have changed. Needs no torch."""
    from gnmr.replay import compare
    from gnmr.replay import replay as decide
    from gnmr.trace import read_trace

    old = read_trace(trace)
    changes: dict[str, Any] = {
        "alpha": _threshold(alpha),
        "beta": None if beta == "none" else _threshold(beta),
        "max_active": max_active,
        "window": window,
        "lock_steps": lock_steps,
        "warmup_steps": warmup_steps,
        "history": _history(history),
    }
    given = {name: value for name, value in changes.items() if value is not None or (name == "beta" and beta)}
    new = decide(old, replace(old.policy, **given))
    difference = compare(old, new)
    if as_json:
        typer.echo(json.dumps(_plain(difference, old), indent=1))
    else:
        _print(difference, old, new)


def _threshold(text: str | None) -> float | Schedule | None:
    if text is None:
        return None
    try:
        if ":" not in text:
            return float(text)
        pairs = [pair.split(":") for pair in text.split(",")]
        return tuple((int(a) if "." not in a else float(a), float(b)) for a, b in pairs)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a number nor a schedule such as 1:1.5,21:1.1 (step:value) or 0.0:1.5,0.025:1.1"
        ) from None


def _history(text: str | None) -> str | Ema | Window | None:
    if text is None or text == "cumulative":
        return text
    kind, _, value = text.partition(":")
    try:
        if kind == "ema":
            return Ema(float(value))
        if kind == "window":
            return Window(int(value))
    except ValueError as error:
        raise ValueError(f"--history {text!r}: {error}") from None
    raise ValueError(f"--history must be cumulative, ema:DECAY or window:LENGTH, got {text!r}")


def _plain(difference: "Difference", old: "Trace") -> dict[str, Any]:
    def simple(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    def plain(summary: "Summary") -> dict[str, Any]:
        return {name: simple(value) for name, value in asdict(summary).items()}

    return {
        "units": old.units,
        "old": plain(difference.old),
        "new": plain(difference.new),
        "only_old": simple(difference.only_old),
        "only_new": simple(difference.only_new),
        "first_step": difference.first_step,
    }


def _print(difference: "Difference", old: "Trace", new: "Trace") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if old.truncated:
        console.print("The run was killed, or still goes on: this is its trace up to the last flush.")
    trigger = old.header.get("trigger", "gnmr")
    if trigger != "gnmr":
        console.print(f"The run's own decisions are those of the control {trigger!r}.", markup=False)
    before, after = old.policy.to_dict(), new.policy.to_dict()
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    console.print("Policy:", ", ".join(changed) or "unchanged", markup=False, highlight=False)

    table = Table("", "as it ran", "replayed")
    for label, name, share in _ROWS:
        pair = (getattr(difference.old, name), getattr(difference.new, name))
        table.add_row(label, *("unused" if x is None else f"{x:.2%}" if share else str(x) for x in pair))
    for label, name in (("promotions", "promotions"), ("unit-steps on recovery", "active_steps")):
        table.add_row(label, *(str(int(getattr(s, name).sum())) for s in (difference.old, difference.new)))
    console.print(table)

    if difference.first_step is None:
        console.print("No decision differs.")
        return
    console.print(
        f"Decisions differ from step {difference.first_step} on: {int(difference.only_old.sum())} unit-steps are no "
        f"longer on the recovery path, {int(difference.only_new.sum())} come to it. Most affected:"
    )
    units = Table("unit", "no longer", "newly")
    for i in np.argsort(-(difference.only_old + difference.only_new), kind="stable")[:10]:
        if difference.only_old[i] + difference.only_new[i]:
            units.add_row(escape(old.units[i]), str(difference.only_old[i]), str(difference.only_new[i]))
    console.print(units)


_ROWS = (
    ("steps", "steps", False),
    ("of these warm-up", "warmup_steps", False),
    ("promotion ratio", "promotion_ratio", True),
    ("unit-steps with GNMR > α", "exceeds_gnmr", True),
    ("unit-steps with ΔGNMR > β", "exceeds_delta", True),
    ("steps at the cap", "hit_max", True),
    ("global faults", "global_faults", False),
)
