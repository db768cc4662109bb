"""Documents, from local files or a hub, through ``datasets``."""

from collections.abc import Iterator, Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Self

import datasets
import pyarrow as pa

from gnmr.errors import RecipeError
from gnmr.lab.sections import Data

_LOADERS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SHUFFLED = 1000

_UNREADABLE = (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError)


class Texts:
    """The documents of a data set, UTF-8, without empty ones; it can be read again from its beginning."""

    def __init__(self, rows: Any, name: str, column: str) -> None:
        self._rows, self._name, self._column = rows, name, column

    def __iter__(self) -> Iterator[bytes]:
        for row in rows_of(self._rows, self._name):
            text = cell(row, self._column, self._name, "text_column")
            if text is not None and str(text).strip():
                yield str(text).encode()

    def take(self, count: int) -> Self:
        """Return the first documents."""
        return type(self)(self._rows.take(count), self._name, self._column)

    def skip(self, count: int) -> Self:
        """Return all but the first documents."""
        return type(self)(self._rows.skip(count), self._name, self._column)

    def shuffle(self, seed: int) -> Self:
        """Return a stream's documents in the seed's order, as far as a buffer allows."""
        return type(self)(self._rows.shuffle(seed=seed, buffer_size=_SHUFFLED), self._name, self._column)


def texts_of(data: Data, name: str, split: str) -> Texts:
    """Open a data set.

    Args:
        data: how: ``config``, ``text_column`` and ``streaming``.
        name: a file, folder or glob, or a hub name.
        split: of a hub's data set; a file has no splits.

    Raises:
        gnmr.RecipeError: it is missing or unreadable; with its name.
    """
    return Texts(load_rows(data, name, split), name, data.text_column)


def rows_of(rows: Any, name: str) -> Iterator[dict[str, Any]]:
    """Read the rows of a data set.

    Raises:
        gnmr.RecipeError: one cannot be read; with the set's name.
    """
    left = iter(rows)
    while True:
        try:
            row = next(left)
        except StopIteration:
            return
        except _UNREADABLE as error:
            raise _unreadable(name, error) from error
        yield row


def cell(row: Mapping[str, Any], column: str, name: str, key: str) -> Any:
    """Return a row's value.

    Raises:
        gnmr.RecipeError: there is no such column; the message names those that there are, and the recipe's key.
    """
    if column not in row:
        raise RecipeError(f"{name!r} has no column {column!r}; its columns are {', '.join(row)}: set data.{key}")
    return row[column]


def load_rows(data: Data, name: str, split: str) -> Any:
    """Open a data set as rows; see :func:`texts_of`."""
    datasets.disable_progress_bars()
    files = _local_files(name)
    if files is None:
        source: dict[str, Any] = {"path": name, "name": data.config}
    elif split == "train":
        source = {"path": _LOADERS[files[0].suffix], "data_files": [str(file) for file in files]}
        if source["path"] == "text":
            source["sample_by"] = "document"
    else:
        raise RecipeError(f"{name!r} is a local file, which has no split {split!r}: set data.validation_name")
    try:
        return datasets.load_dataset(**source, split=split, streaming=data.streaming)
    except _UNREADABLE as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: BaseException) -> RecipeError:
    return RecipeError(f"the text {name!r} cannot be read: {error.__cause__ or error}")


def _local_files(name: str) -> list[Path] | None:
    """Return the files of a path or glob, or None for a hub name."""
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _LOADERS)
    elif has_magic(name):
        files = sorted(Path(file) for file in glob(name, recursive=True))  # noqa: PTH207 (the glob may be absolute)
    elif path.suffix in _LOADERS:
        files = [path]
    else:
        return None
    if not files or not all(file.is_file() for file in files):
        raise RecipeError(f"{name!r}: there is no such file, or no {', '.join(_LOADERS)} in the folder")
    kinds = {_LOADERS.get(file.suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise RecipeError(f"{name!r} mixes kinds of files, or has one that is none of {', '.join(_LOADERS)}")
    if all(file.stat().st_size == 0 for file in files):
        raise RecipeError(f"{name!r} is empty: there is no text to learn from")
    return files
