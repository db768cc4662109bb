"""``gnmr doctor``: what this machine and this environment can do with gnmr."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gnmr.doctor import Examination, Finding


def doctor(
    needed: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Packages and paths that have to work.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run every path once, look at packages, machine and settings; exit with 1 if what is there or needed is broken."""
    from gnmr.doctor import examine

    found = examine()
    faults = found.faults(needed or ())
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "faults": [fault.name for fault in faults]}, indent=1))
    else:
        _print(found, faults)
    if faults:
        raise typer.Exit(1)


def _print(found: "Examination", faults: "tuple[Finding, ...]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for label, status in (("packages", "ok"), ("not as tested", "doubt")):
        listed = [f"{each.name} {each.detail}" for each in found.packages if each.status == status]
        _line(console, label, "; ".join(listed), _STYLES[status] if status == "doubt" else "")
    _line(console, "not installed", "; ".join(each.name for each in found.packages if each.status == "missing"))
    for label, text in _machine(found.machine):
        _line(console, label, text)
    for setting in found.settings:
        _line(console, setting.name, setting.detail, _STYLES["doubt"] if setting.status == "doubt" else "")
    table = Table("path", "", "what came of it")
    for each in found.paths:
        table.add_row(each.name, f"[{_STYLES[each.status]}]{each.status}[/]", _plain(each.detail))
    console.print(table)
    for fault in faults:
        console.print(f"not in order: {fault.name}: {fault.detail}", style="red", markup=False, soft_wrap=True)


_STYLES = {"ok": "green", "doubt": "yellow", "missing": "dim", "broken": "red"}


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _line(console: "Console", label: str, text: str, style: str = "") -> None:
    if text:
        console.print(f"{label}: {text}", style=style, markup=False)


def _machine(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "system", f"{facts['system']}, Python {facts['python']}"
    yield "processor", f"{facts['cpu']}, {facts['cores']} cores; {_has(facts['cpu_has'])}"
    for gpu in facts["gpus"]:
        has = _has({name: gpu[name] for name in ("fp8", "mxfp8")})
        yield "accelerator", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}; {has}"
    if not facts["gpus"]:
        yield "accelerator", "none that torch sees"


def _has(facts: dict[str, bool | None]) -> str:
    words = {True: "yes", False: "no", None: "not known"}
    return ", ".join(f"{name} {words[value]}" for name, value in facts.items()) or "instruction sets not known"
