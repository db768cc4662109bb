"""Any task of ``lm-eval`` by its name: its data (fetched, or of a YAML file of one's own), its prompts, its metrics."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from gnmr.lab.evaluate.items import Choices, Generation, Question, Text
from gnmr.lab.evaluate.tasks import MAX_TOKENS, SHOT_SEED

PREFIX = "lm-eval:"


class HarnessTask:
    """A task, or the tasks of a group, as questions; the model is run by gnmr, as on files.

    Args:
        name: ``lm-eval:NAME``.
        shots: examples in each prompt; by default what the task says.
        include: a folder with YAML files of one's own.

    Raises:
        ValueError: there is no such task, its data cannot be had, or it asks for what gnmr does not do.
        ModuleNotFoundError: ``lm-eval`` is not installed.
    """

    def __init__(self, name: str, shots: int | None = None, include: Path | None = None) -> None:
        from lm_eval.tasks import get_task_dict

        for chatty in ("lm_eval", "datasets"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        self.name, self._given = name, shots
        inner = name.removeprefix(PREFIX)
        manager = _manager(inner, include)
        try:
            self._tasks = dict(_leaves(get_task_dict([inner], manager)))
        except Exception as error:
            raise ValueError(f"the data of lm-eval's {inner!r} cannot be had: {error}") from error
        for task in self._tasks.values():
            task.set_fewshot_seed(seed=SHOT_SEED)
            if shots is not None:
                task.set_config(key="num_fewshot", value=shots)

    def questions(self, limit: int | None) -> list[Question]:
        """Return the first questions of every task in turn, or all."""
        each = [_questions(name, task, limit) for name, task in self._tasks.items()]
        if limit is None:
            return [question for questions in each for question in questions]
        deepest = max(map(len, each))
        return [questions[i] for i in range(deepest) for questions in each if i < len(questions)][:limit]

    def facts(self) -> dict[str, Any]:
        """See :class:`gnmr.lab.evaluate.tasks.Task`."""
        from importlib.metadata import version

        tasks = {
            name: {"version": str(task.VERSION), "shots": task.config.num_fewshot or 0}
            for name, task in self._tasks.items()
        }
        return {"lm_eval": version("lm-eval"), "shots": self._given, "tasks": tasks}


def _manager(task: str, include: Path | None) -> Any:
    """Return the index that has a task: one's own tasks, which is read at once, or all of lm-eval's beside them."""
    from lm_eval.tasks import TaskManager

    for defaults in (False, True) if include is not None else (True,):
        manager = TaskManager(include_path=None if include is None else str(include), include_defaults=defaults)
        if task in manager.all_tasks:
            return manager
    raise ValueError(f"lm-eval has no task {task!r}: `lm-eval ls tasks` lists them")


def _leaves(tasks: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the tasks of nested groups."""
    found: list[tuple[str, Any]] = []
    for name, task in tasks.items():
        found.extend(_leaves(task) if isinstance(task, Mapping) else [(str(name), task)])
    return found


def _questions(name: str, task: Any, limit: int | None) -> list[Question]:
    make: dict[str, Callable[[str, Any, list[Any]], Question]] = {
        "multiple_choice": _choices,
        "generate_until": _generation,
        "loglikelihood_rolling": _text,
    }
    if task.OUTPUT_TYPE not in make:
        raise ValueError(f"lm-eval's {name} is of the kind {task.OUTPUT_TYPE}; gnmr does {', '.join(make)}")
    # A text counts as many items as it has windows, which are limited once it is cut.
    task.build_all_requests(limit=None if task.OUTPUT_TYPE == "loglikelihood_rolling" else limit)
    by_doc = groupby(task.instances, key=lambda instance: instance.doc_id)
    return [make[task.OUTPUT_TYPE](f"{name}/{doc}", task, list(instances)) for doc, instances in by_doc]


def _choices(key: str, task: Any, instances: list[Any]) -> Choices:
    doc = instances[0].doc
    answers = tuple(task.doc_to_choice(doc))
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(gold, str) and gold in answers:
        gold = answers.index(gold)
    if not isinstance(gold, int) or not 0 <= gold < len(answers):
        raise ValueError(f"{key} has {gold!r} for its right choice, and must have one of {len(answers)}")
    # What may follow are the choices without their context, for a metric that is not computed here.
    return Choices(key, tuple(tuple(each.args) for each in instances[: len(answers)]), answers, gold)


def _generation(key: str, task: Any, instances: list[Any]) -> Generation:
    context, how = instances[0].args
    if how.get("do_sample") or how.get("num_beams", 1) != 1:
        raise ValueError(f"{key} samples its answers ({how}); gnmr writes greedily")
    until = how.get("until") or []
    until = (until,) if isinstance(until, str) else tuple(until)
    doc = instances[0].doc
    new = int(how.get("max_gen_toks", MAX_TOKENS))
    return Generation(key, context, until, new, partial(_mark, key, task, instances[0]), str(task.doc_to_target(doc)))


def _mark(key: str, task: Any, instance: Any, answer: str) -> dict[str, float]:
    """Mark an answer by the task's own filters and metrics."""
    instance.resps, instance.filtered_resps = [answer], {}
    for each in task._filters:
        each.apply([instance])
    found: dict[str, float] = {}
    for name, filtered in instance.filtered_resps.items():
        for metric, value in task.process_results(instance.doc, [filtered]).items():
            if not isinstance(value, int | float) and getattr(value, "ndim", None) != 0:
                raise ValueError(f"{key}: the metric {metric} is no number for an item, so it cannot be paired")
            found[metric if name == "none" else f"{metric}_{name}"] = float(value)
    return found


def _text(key: str, task: Any, instances: list[Any]) -> Text:
    (text,) = instances[0].args
    # A task may count the bytes and words of another text than the one that is predicted.
    said = task.process_results(instances[0].doc, (0.0,))
    counts = {name: said[name][1] for name in ("bits_per_byte", "word_perplexity") if name in said}
    n_bytes = counts.get("bits_per_byte", len(text.encode()))
    return Text(key, text, float(n_bytes), float(counts.get("word_perplexity", len(text.split()))))
