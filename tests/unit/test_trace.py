"""Traces: written while a run goes on, readable whatever becomes of it, and exact under replay."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gnmr.trace
from gnmr import Controller, Policy, TraceError
from gnmr.replay import compare, replay, summary
from gnmr.trace import TraceWriter, read_trace

POLICY = Policy(max_active=2, alpha=((1, 1.5), (8, 1.1)), window=2, lock_steps=2)
UNITS = ["a", "b", "<c>"]


def header(policy=POLICY, units=UNITS):
    return {"policy": policy.to_dict(), "units": list(units), "seed": 7}


def rows(steps, seed=0, n=3):
    draw = np.random.default_rng(seed)
    norms = draw.lognormal(size=(steps, n))
    norms[draw.random((steps, n)) < 0.1] = np.nan
    norms[draw.random((steps, n)) < 0.05] = np.inf
    return norms, draw.random((steps, n)) < 0.9


def record(path, steps=20, **options):
    writer = TraceWriter(path, header(), **options)
    write_steps(writer, 0, steps)
    return writer


def write_steps(writer, first, last):
    norms, observed = rows(20)
    controller = Controller(3, POLICY, UNITS)
    for step in range(last):
        decision = controller.update(norms[step], observed[step])
        if step >= first:
            writer.write(norms[step], observed[step], decision)


def test_what_is_written_is_read(tmp_path):
    record(tmp_path / "run.arrow", flush_every=7).close()

    trace = read_trace(tmp_path / "run.parquet")
    norms, observed = rows(20)
    assert not (tmp_path / "run.arrow").exists()
    assert trace.header["seed"] == 7
    assert trace.units == UNITS
    assert trace.policy == POLICY
    assert trace.steps.tolist() == list(range(1, 21))
    np.testing.assert_array_equal(trace.observed, observed)
    np.testing.assert_array_equal(trace.norm[observed], norms[observed])


def test_a_run_that_goes_on_is_readable_up_to_the_last_flush(tmp_path):
    writer = record(tmp_path / "run.arrow", flush_every=6)

    assert len(read_trace(tmp_path / "run.arrow").steps) == 18
    writer.abandon()


def test_a_killed_run_leaves_everything_up_to_the_last_flush(tmp_path):
    code = f"""
    import os, signal, numpy as np
    from gnmr import Controller, Policy
    from gnmr.trace import TraceWriter
    policy = Policy(max_active=1)
    controller = Controller(2, policy)
    header = {{"policy": policy.to_dict(), "units": ["a", "b"]}}
    writer = TraceWriter({str(tmp_path / "run.arrow")!r}, header, flush_every=4)
    for step in range(10):
        writer.write(np.ones(2), np.ones(2, bool), controller.update(np.ones(2)))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)

    assert done.returncode == -signal.SIGKILL
    assert read_trace(tmp_path / "run.arrow").steps.tolist() == list(range(1, 9))


def test_a_stream_cut_anywhere_is_read_or_refused_by_name(tmp_path):
    record(tmp_path / "run.arrow", flush_every=5).abandon()
    whole = (tmp_path / "run.arrow").read_bytes()
    cut = tmp_path / "cut.arrow"
    seen = set()
    for size in (*range(0, len(whole), 97), len(whole)):
        cut.write_bytes(whole[:size])
        try:
            seen.add(len(read_trace(cut).steps))
        except TraceError as error:
            seen.add("cut.arrow: the file is damaged" in str(error))

    assert seen == {True, 0, 5, 10, 15, 20}


@pytest.mark.parametrize("name", ["run.arrow", "run.parquet"])
def test_a_resumed_trace_equals_an_uninterrupted_one(tmp_path, name):
    whole = record(tmp_path / "whole.arrow").close()
    writer = record(tmp_path / "run.arrow", steps=14, flush_every=5)
    if name == "run.parquet":
        writer.close()
    else:
        writer.flush()
        writer.abandon()

    resumed = TraceWriter.resume(tmp_path / "run.arrow", header(), keep_through_step=9, flush_every=3)
    write_steps(resumed, 9, 20)

    one, two = read_trace(whole), read_trace(resumed.close())
    for column in ("steps", "norm", "observed", "gnmr", "risk", "active", "lock"):
        np.testing.assert_array_equal(getattr(one, column), getattr(two, column))


def test_a_trace_that_ends_before_the_checkpoint_is_refused(tmp_path):
    record(tmp_path / "run.arrow", steps=6).close()

    with pytest.raises(TraceError, match="ends at step 6, and the run goes on after step 9"):
        TraceWriter.resume(tmp_path / "run.arrow", header(), keep_through_step=9)


def test_a_full_disk_loses_nothing_that_was_flushed(tmp_path, monkeypatch):
    writer = record(tmp_path / "run.arrow", steps=10, flush_every=5)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gnmr.trace.os, "fsync", full)
    with pytest.raises(TraceError, match=r"run.arrow: the trace cannot be written: .*No space left"):
        write_steps(writer, 10, 16)
    monkeypatch.undo()
    assert len(read_trace(tmp_path / "run.arrow").steps) >= 10


def test_what_is_no_trace_is_refused_with_its_path_and_reason(tmp_path):
    text = tmp_path / "text.parquet"
    text.write_text("no trace")
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), foreign)
    other = tmp_path / "other.parquet"
    metadata = {"gnmr": json.dumps({"schema": 99})}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), other)

    for path, message in [
        (tmp_path / "none.parquet", "there is no such file"),
        (text, "damaged or no trace"),
        (foreign, "no gnmr header"),
        (other, "schema 99"),
    ]:
        with pytest.raises(TraceError) as error:
            read_trace(path)
        assert str(path) in str(error.value)
        assert message in str(error.value)


def test_a_trace_is_written_to_an_arrow_file():
    with pytest.raises(ValueError, match=r"\*.arrow, got 'run.parquet'"):
        TraceWriter("run.parquet", header())


@given(
    seed=st.integers(0, 10**6),
    max_active=st.integers(0, 3),
    warmup=st.integers(0, 5),
    lock=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_replay_under_the_same_policy_is_exact(tmp_path_factory, seed, max_active, warmup, lock):
    policy = Policy(max_active=max_active, warmup_steps=warmup, lock_steps=lock, window=2, alpha=1.1)
    norms, observed = rows(12, seed)
    controller = Controller(3, policy, UNITS)
    path = tmp_path_factory.mktemp("trace") / "run.arrow"
    with TraceWriter(path, header(policy)) as writer:
        for row, mask in zip(norms, observed, strict=True):
            writer.write(row, mask, controller.update(row, mask))
    trace = read_trace(path.with_suffix(".parquet"))

    again = replay(trace)

    for column in ("gnmr", "delta_gnmr", "risk", "exceeds", "active", "lock"):
        np.testing.assert_array_equal(getattr(trace, column), getattr(again, column), column)
    assert compare(trace, again).first_step is None


def test_compare_says_what_another_policy_changes(tmp_path):
    trace = read_trace(record(tmp_path / "run.arrow").close())

    none = replay(trace, Policy(max_active=0))
    difference = compare(trace, none)

    assert difference.new.promotion_ratio == 0
    assert difference.only_old.sum() == trace.active.sum() > 0
    assert difference.only_new.sum() == 0
    assert difference.first_step == int(trace.steps[trace.active.any(axis=1)][0])


def test_summary_counts_by_hand(tmp_path):
    policy = Policy(max_active=1, alpha=1.5, beta=None, lock_steps=0, warmup_steps=2)
    values = [[1.0, 1.0], [1.0, 1.0], [1.0, 9.0], [9.0, 1.0], [1.0, np.nan]]
    controller = Controller(2, policy)
    with TraceWriter(tmp_path / "run.arrow", header(policy, ["a", "b"])) as writer:
        for row in values:
            writer.write(np.array(row), np.array([True, True]), controller.update(row))
    done = summary(read_trace(tmp_path / "run.parquet"))

    assert (done.steps, done.warmup_steps) == (5, 1)
    assert done.active_steps.tolist() == [1, 2]  # plans of steps 4 (b), 5 (a) and 6 (b)
    assert done.promotions.tolist() == [1, 2]
    assert done.promotion_ratio == 3 / 8
    assert done.hit_max == 3 / 4
    assert done.exceeds_gnmr == 3 / 8
    assert done.exceeds_delta is None
    assert done.nonfinite.tolist() == [0, 1]
    assert done.global_faults == 0


def test_the_header_is_on_the_disk_at_once(tmp_path):
    writer = TraceWriter(tmp_path / "run.arrow", header())

    trace = read_trace(tmp_path / "run.arrow")
    assert (trace.units, len(trace.steps)) == (list(UNITS), 0)
    writer.close()


def test_the_stream_of_another_run_is_not_taken(tmp_path):
    writer = TraceWriter(tmp_path / "run.arrow", header())
    write_steps(writer, 0, 5)
    writer.flush()
    with pytest.raises(TraceError, match="is there already: another run writes it, or was not finished"):
        TraceWriter(tmp_path / "run.arrow", header())
    writer.close()
    assert len(read_trace(tmp_path / "run.parquet").steps) == 5


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda table: table.take(np.r_[1, 0, 2 : len(table)]), "its units are not in the order of its header"),
        (
            lambda table: table.set_column(
                table.column_names.index("active"), "active", pa.array([None] * len(table), pa.bool_())
            ),
            "rows have no 'active'",
        ),
    ],
)
def test_an_altered_trace_is_refused(tmp_path, alter, message):
    record(tmp_path / "run.arrow").close()
    table = pq.read_table(tmp_path / "run.parquet")
    pq.write_table(alter(table).replace_schema_metadata(table.schema.metadata), tmp_path / "altered.parquet")
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "altered.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": None}, "must name the units"),
        ({"units": [1, 2, 3]}, "must name the units"),
        ({"policy": "x"}, "must hold the 'policy'"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, changes, message):
    record(tmp_path / "run.arrow").close()
    table = pq.read_table(tmp_path / "run.parquet")
    changed = json.loads(table.schema.metadata[b"gnmr"]) | changes
    pq.write_table(table.replace_schema_metadata({b"gnmr": json.dumps(changed)}), tmp_path / "foreign.parquet")
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match=message):
        TraceWriter(tmp_path / "new.arrow", header() | changes)
