"""The record of a run: one row for each unit and step, in one columnar file.

While a run goes on the file is an Arrow IPC stream (``run.arrow``), flushed every few steps: a run that is
killed leaves everything up to the last flush readable. Closing it writes Parquet (``run.parquet``) and removes the
stream. Both carry the same JSON header (policy, units, versions, seed) in their schema.

    step, unit      int32   1-based step whose gradients were read; index into the header's units
    norm            float64 null = not observed; NaN and Inf are kept
    gnmr, delta_gnmr, risk  float64
    exceeds         bool    risk > 1
    active          bool    on the recovery path at step + 1
    lock            int32
"""

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gnmr._io import atomic_write
from gnmr.controller import Decision
from gnmr.errors import TraceError
from gnmr.policy import Policy

SCHEMA = 1

_KEY = b"gnmr"
_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("step", pa.int32(), np.int32),
    ("unit", pa.int32(), np.int32),
    ("norm", pa.float64(), np.float64),
    ("gnmr", pa.float64(), np.float64),
    ("delta_gnmr", pa.float64(), np.float64),
    ("risk", pa.float64(), np.float64),
    ("exceeds", pa.bool_(), np.bool_),
    ("active", pa.bool_(), np.bool_),
    ("lock", pa.int32(), np.int32),
)
_DECIDED = ("gnmr", "delta_gnmr", "risk", "exceeds", "active", "lock")


@dataclass(frozen=True, eq=False)
class Trace:
    """A run as arrays; T steps, N units.

    Attributes:
        header: JSON-able: ``policy``, ``units``, ``versions``, and what the run added.
        steps: (T,) int, the 1-based steps, consecutive.
        norm: (T, N) float64, NaN where not observed.
        observed: (T, N) bool.
        gnmr: (T, N) float64.
        delta_gnmr: (T, N) float64.
        risk: (T, N) float64.
        exceeds: (T, N) bool.
        active: (T, N) bool; row t is the plan of step ``steps[t] + 1``.
        lock: (T, N) int.
        truncated: whether the file ends in the middle of a batch, as a killed run's does.
    """

    header: Mapping[str, Any]
    steps: NDArray[np.int32]
    norm: NDArray[np.float64]
    observed: NDArray[np.bool_]
    gnmr: NDArray[np.float64]
    delta_gnmr: NDArray[np.float64]
    risk: NDArray[np.float64]
    exceeds: NDArray[np.bool_]
    active: NDArray[np.bool_]
    lock: NDArray[np.int32]
    truncated: bool = field(default=False)

    @property
    def units(self) -> list[str]:
        """The N unit names."""
        return list(self.header["units"])

    @property
    def policy(self) -> Policy:
        """The policy that decided."""
        return Policy.from_dict(self.header["policy"])

    @property
    def planned(self) -> NDArray[np.bool_]:
        """(T, N) bool: on the recovery path *at* each step, which the row before it planned."""
        before = np.full((1, len(self.units)), self.policy.warmup_steps > 0)
        if self.header.get("trigger") == "fixed" and len(self.active):
            before = self.active[:1]  # a static baseline never changes
        return np.concatenate([before, self.active[:-1]])[: len(self.steps)]


class TraceWriter:
    """Writes a trace while a run goes on.

    Args:
        path: the stream to write, ``*.arrow``; the Parquet beside it appears on :meth:`close`.
        header: must hold ``policy`` (a dict) and ``units`` (names); anything JSON-able may be added.
        flush_every: steps that a kill can cost.

    Raises:
        ValueError: the path does not end in ``.arrow``, or the header lacks ``policy`` or ``units``.
        gnmr.TraceError: the stream of a run that was not finished is there already; or the file cannot be written (a
            full disk): what was flushed before stays readable.

    Examples:
        >>> import tempfile, gnmr
        >>> controller = gnmr.Controller(2, gnmr.Policy(max_active=1))
        >>> folder = tempfile.TemporaryDirectory()
        >>> header = {"policy": controller.policy.to_dict(), "units": ["a", "b"]}
        >>> with TraceWriter(f"{folder.name}/run.arrow", header) as writer:
        ...     for norms in ([1.0, 1.0], [4.0, 1.0]):
        ...         writer.write(np.array(norms), np.array([True, True]), controller.update(norms))
        >>> read_trace(f"{folder.name}/run.parquet").active.tolist()
        [[False, False], [True, False]]
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any], *, flush_every: int = 50) -> None:
        self.path = Path(path)
        if self.path.suffix != ".arrow":
            raise ValueError(f"a trace is written to a file named *.arrow, got {str(path)!r}")
        if flush_every < 1:
            raise ValueError(f"flush_every must be >= 1, got {flush_every!r}")
        _check_header(header, ValueError, "the header of a trace")
        if self.path.exists():
            raise TraceError(
                f"{self.path} is there already: another run writes it, or was not finished. Go on with it (resume), "
                "read it with gnmr replay, or remove it; or give another file"
            )
        self._schema = _schema({"schema": SCHEMA, **header})
        n = len(header["units"])
        self._units = np.arange(n, dtype=np.int32)
        self._buffer = {name: np.zeros((flush_every, n), dtype=kind) for name, _, kind in _FIELDS if name != "unit"}
        self._missing = np.zeros((flush_every, n), dtype=np.bool_)
        self._filled = 0
        with _Reported(self.path, "written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] | None = self.path.open("wb")
            self._stream = pa.ipc.new_stream(self._file, self._schema)
            # A batch without rows (an empty table has none): so that the header is on the disk at once.
            self._stream.write_batch(pa.record_batch(self._schema.empty_table().to_pydict(), schema=self._schema))
            self._sync()

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        header: Mapping[str, Any],
        *,
        keep_through_step: int,
        flush_every: int = 50,
    ) -> Self:
        """Go on with the trace of an interrupted run; rows after ``keep_through_step`` are dropped.

        Raises:
            gnmr.TraceError: there is no trace to go on from, or it ends before that step.
        """
        stream, parquet = Path(path), Path(path).with_suffix(".parquet")
        old = read_trace(stream if stream.exists() else parquet)
        kept = int(np.count_nonzero(old.steps <= keep_through_step))
        if kept < keep_through_step:
            raise TraceError(
                f"{stream}: the trace ends at step {kept}, and the run goes on after step {keep_through_step}: "
                "go on from an older checkpoint, or begin the run again"
            )
        if old.units != list(header["units"]):
            raise TraceError(f"{stream}: the trace has other units than the model; give another file")
        # The old stream stays until the new one holds what is kept of it.
        interim = stream.with_suffix(".resumed.arrow")
        interim.unlink(missing_ok=True)  # of a resume that was killed
        writer = cls(interim, header, flush_every=flush_every)
        for t in range(kept):
            writer._put({name: getattr(old, name)[t] for name in ("norm", *_DECIDED)}, old.observed[t], t + 1)
        writer.flush()
        writer.path = writer.path.replace(stream)
        return writer

    def write(self, norms: NDArray[np.float64], observed: NDArray[np.bool_], decision: Decision) -> None:
        """Add one step: (N,) norms, (N,) observed, and what was decided from them.

        Raises:
            gnmr.TraceError: a write has failed before, so that the trace would have a hole.
        """
        if self._file is None:
            raise TraceError(f"{self.path}: the trace was given up when a write failed, or closed: nothing is added")
        values = {name: np.asarray(getattr(decision, name)) for name in _DECIDED}
        self._put({"norm": norms, **values}, observed, int(decision.step))

    def flush(self) -> None:
        """Hand everything so far to the disk."""
        if self._filled == 0 or self._file is None:
            return
        rows = self._filled
        columns = []
        for name, kind, _ in _FIELDS:
            values = np.tile(self._units, rows) if name == "unit" else self._buffer[name][:rows].ravel()
            mask = self._missing[:rows].ravel() if name == "norm" else None
            columns.append(pa.array(values, type=kind, mask=mask))
        with _Reported(self.path, "written"):
            try:
                self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
                self._sync()
            except OSError:
                self.abandon()
                raise
        self._filled = 0

    def close(self) -> Path:
        """Write the Parquet and remove the stream; return the Parquet's path. Idempotent."""
        parquet = self.path.with_suffix(".parquet")
        if self._file is None:
            return parquet
        self.flush()
        with _Reported(self.path, "written"):
            self._stream.close()
            self._file.close()
        self._file = None
        with _Reported(parquet, "written"):
            with pa.OSFile(str(self.path)) as source, atomic_write(parquet) as target:
                reader = pa.ipc.open_stream(source)
                with pq.ParquetWriter(target, self._schema, compression="zstd") as out:
                    for batch in reader:
                        out.write_batch(batch)
            self.path.unlink()
        return parquet

    def abandon(self) -> None:
        """Leave the stream as it is on the disk, without what was not flushed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, values: Mapping[str, Any], observed: NDArray[np.bool_], step: int) -> None:
        row = self._filled
        for name, value in values.items():
            self._buffer[name][row] = value
        self._buffer["step"][row] = step
        self._missing[row] = ~observed
        self._filled += 1
        if self._filled == len(self._missing):
            self.flush()

    def _sync(self) -> None:
        assert self._file is not None  # noqa: S101 (only called while it is open)
        self._file.flush()
        os.fsync(self._file.fileno())


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, also that of a run that was killed or still goes on.

    Args:
        path: a ``.parquet``, or an ``.arrow`` stream that may end anywhere.

    Raises:
        gnmr.TraceError: there is no such file, it is damaged, or it is no trace; the message says which.
    """
    path = Path(path)
    if not path.is_file():
        other = path.with_suffix(".parquet" if path.suffix == ".arrow" else ".arrow")
        closed = "a finished run's trace is" if other.suffix == ".parquet" else "a run that goes on has"
        raise TraceError(f"{path}: there is no such file" + (f"; {closed} {other}" if other.exists() else ""))
    try:
        table, truncated = _read_stream(path) if path.suffix == ".arrow" else (pq.read_table(path), False)
        names = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: the file is damaged or no trace: {error}") from error
    header = _header(path, table.schema)
    missing = [name for name, _, _ in _FIELDS if name not in names]
    if missing:
        raise TraceError(f"{path}: the trace has no column {missing[0]!r}")
    n = len(header["units"])
    if n == 0 or table.num_rows % n:
        raise TraceError(f"{path}: {table.num_rows} rows do not divide among the {n} units of its header")
    for name, _, _ in _FIELDS:
        if name != "norm" and table[name].null_count:
            raise TraceError(f"{path}: {table[name].null_count} rows have no {name!r}: the trace was altered")
    if (table["unit"].to_numpy().reshape(-1, n) != np.arange(n)).any():
        raise TraceError(f"{path}: its units are not in the order of its header: the trace was altered")
    observed = table["norm"].is_valid().to_numpy().reshape(-1, n)
    columns = {
        name: np.asarray(table[name].to_numpy(), dtype=kind).reshape(-1, n)
        for name, _, kind in _FIELDS
        if name not in ("step", "unit")
    }
    steps = table["step"].to_numpy().reshape(-1, n)[:, 0].copy()
    if (steps != np.arange(1, len(steps) + 1)).any():
        raise TraceError(f"{path}: its steps are not 1, 2, 3, ...: it is a part of a trace, or was altered")
    return Trace(header=header, steps=steps, observed=observed, truncated=truncated, **columns)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, gnmr, NumPy and ``packages`` that are installed."""
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in ("gnmr", "numpy", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _schema(header: Mapping[str, Any]) -> Any:
    fields = [pa.field(name, kind) for name, kind, _ in _FIELDS]
    return pa.schema(fields, metadata={_KEY: json.dumps(header, allow_nan=False)})


def _header(path: Path, schema: Any) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(_KEY)
    if raw is None:
        raise TraceError(f"{path}: the file holds no gnmr header, so it is no trace")
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else None
        raise TraceError(f"{path}: the trace has schema {found!r}, and this gnmr reads {SCHEMA}")
    _check_header(header, TraceError, f"{path}: the header")
    return header


def _check_header(header: Mapping[str, Any], kind: type[ValueError], what: str) -> None:
    units = header.get("units")
    if not isinstance(units, list | tuple) or not units or not all(isinstance(name, str) for name in units):
        raise kind(f"{what} must name the units in 'units', got {units!r}")
    if not isinstance(header.get("policy"), dict):
        raise kind(f"{what} must hold the 'policy', got {header.get('policy')!r}")


def _read_stream(path: Path) -> tuple[Any, bool]:
    """Read whole batches up to where the stream ends, and say whether it ends too early."""
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        batches, truncated = [], False
        try:
            batches.extend(reader)
        except (pa.ArrowException, OSError):
            truncated = True
        return pa.Table.from_batches(batches, reader.schema), truncated


class _Reported:
    """Turn an OSError into a TraceError that names the file."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise TraceError(
                f"{self._path}: the trace cannot be {self._what}: {error}. What was flushed before is readable"
            ) from error
