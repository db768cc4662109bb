"""What a run reads: the same for every arm, a function of the seed, and never silently something else."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnmr import RecipeError
from gnmr.lab.data import Stream, Windows, load_corpus
from gnmr.lab.embedded import embedded_text
from gnmr.lab.tokens import ByteTokenizer, make_tokenizer

LINES = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 3 for i in range(60)]


def write(folder, kind):
    path = folder / f"text.{kind}"
    if kind == "txt":
        path.write_text("\n".join(LINES))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": line, "id": i}) + "\n" for i, line in enumerate(LINES)))
    else:
        pq.write_table(pa.table({"text": LINES}), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_local_files_are_read_and_a_part_is_held_out(recipe, tmp_path, kind):
    corpus = load_corpus(recipe(f"data.name={write(tmp_path, kind)}"), seed=0)

    def text(samples):
        return b"".join(bytes(s["input_ids"][s["input_ids"] < 256].tolist()) for s in samples)

    assert len(corpus.train) == 10 * 4
    assert b"brown fox" in text(corpus.train[i] for i in range(8))
    assert len(corpus.validation) > 0
    assert corpus.vocab_size == 257
    assert corpus.train[0]["input_ids"].shape == (32,)


def test_a_glob_and_a_folder_are_many_files(recipe, tmp_path):
    write(tmp_path, "jsonl")
    one = load_corpus(recipe(f"data.name={tmp_path}/*.jsonl"), seed=0)
    two = load_corpus(recipe(f"data.name={tmp_path}"), seed=0)

    assert one.facts["sha256"] == two.facts["sha256"]


def test_a_file_of_its_own_is_held_out(recipe, tmp_path, text):
    corpus = load_corpus(recipe(f"data.name={write(tmp_path, 'txt')}", f"data.validation_name={text}"), seed=0)

    assert corpus.facts["validation_tokens"] > len(text.read_bytes())


def test_null_rows_are_no_text(recipe, tmp_path):
    path = tmp_path / "text.parquet"
    pq.write_table(pa.table({"text": [*LINES, None, "  "]}), path)
    full = load_corpus(recipe(f"data.name={path}"), seed=0)
    same = load_corpus(recipe(f"data.name={write(tmp_path, 'jsonl')}"), seed=0)

    assert full.facts["sha256"] == same.facts["sha256"]


def test_windows_depend_on_seed_and_index_only():
    tokens = np.arange(1000, dtype=np.int32)
    one, other = Windows(tokens, 16, 20, seed=3), Windows(tokens, 16, 20, seed=4)
    starts = [int(one[i]["input_ids"][0]) for i in range(20)]

    assert [int(Windows(tokens, 16, 20, seed=3)[i]["input_ids"][0]) for i in reversed(range(20))] == starts[::-1]
    assert [int(other[i]["input_ids"][0]) for i in range(20)] != starts


def test_validation_is_the_same_for_all_seeds(recipe):
    one, two = (load_corpus(recipe(), seed=seed) for seed in (0, 1))

    assert (one.validation[3]["input_ids"] == two.validation[3]["input_ids"]).all()
    assert (one.train[3]["input_ids"] != two.train[3]["input_ids"]).any()


def test_streams_pack_documents_without_loss():
    documents = [b"abc", b"defgh", b"i"]
    found = [s["input_ids"].tolist() for s in Stream(documents, ByteTokenizer(), 4)]

    assert found == [[97, 98, 99, 256], [100, 101, 102, 103], [104, 256, 105, 256]]


def test_a_local_stream(recipe, tmp_path):
    path = write(tmp_path, "jsonl")
    overrides = (f"data.name={path}", f"data.validation_name={path}", "data.streaming=true")
    corpus = load_corpus(recipe(*overrides), seed=0)
    first = next(iter(corpus.train))["input_ids"]

    assert first.shape == (32,)
    assert (first == next(iter(corpus.train))["input_ids"]).all()  # it can be read again
    assert len(corpus.validation) == 16


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("", (), "is empty: there is no text to learn from"),
        (" \n ", (), "holds no text"),
        ("short", (), "fewer than one sequence of 32"),
        (b"\xff\xfe\xfa" * 99, (), "cannot be read"),
        ("enough text " * 200, ("data.split=test",), "has no split 'test': set data.validation_name"),
        ("enough text " * 200, ("data.streaming=true",), "streams no more than the 1000 documents"),
        ("enough text " * 200, ("data.tokenizer=bpe", "data.streaming=true"), "cannot be streamed"),
        ("enough text " * 200, ("data.tokenizer=/nowhere",), "neither 'bytes' nor 'bpe'"),
    ],
)
def test_a_text_that_cannot_serve_is_named(recipe, tmp_path, content, overrides, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(RecipeError) as error:
        load_corpus(recipe(f"data.name={path}", *overrides), seed=0)

    assert message in str(error.value)
    assert "bad.txt" in str(error.value) or "tokenizer" in str(error.value)


def test_a_missing_file_and_a_missing_column(recipe, tmp_path):
    with pytest.raises(RecipeError, match="there is no such file"):
        load_corpus(recipe(f"data.name={tmp_path}/none.jsonl"), seed=0)
    with pytest.raises(RecipeError, match="has no column 'body'; its columns are text, id: set data.text_column"):
        load_corpus(recipe(f"data.name={write(tmp_path, 'jsonl')}", "data.text_column=body"), seed=0)


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_broken_json_line_is_reported_with_the_file(recipe, tmp_path, streaming):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n' * 50)

    with pytest.raises(RecipeError, match=r"broken.jsonl' cannot be read"):
        load_corpus(recipe(f"data.name={path}", f"data.streaming={streaming}", f"data.validation_name={path}"), seed=0)


def test_the_embedded_text_is_split_by_file_and_counted(tmp_path):
    for i in range(60):
        (tmp_path / f"module_{i}.py").write_text(f"x = {i}\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "foreign.py").write_text("foreign = 1\n")
    (tmp_path / "latin.py").write_bytes("name = 'é'".encode("latin-1"))
    (tmp_path / "empty.py").write_text("")
    text = embedded_text(tmp_path)

    assert not set(text.train) & set(text.validation)
    assert len(text.train) + len(text.validation) == 60
    assert text.skipped == 2
    assert embedded_text(tmp_path) == text
    (tmp_path / "module_1.py").write_text("x = 2\n")
    assert embedded_text(tmp_path).sha256 != text.sha256


def test_a_python_without_source_says_so(tmp_path):
    with pytest.raises(RecipeError, match="comes without the source of its standard library"):
        embedded_text(tmp_path)


def test_a_bpe_is_trained_once_and_cached(own_cache):
    corpus = [line.encode() for line in LINES]
    one = make_tokenizer("bpe", 300, corpus)
    made = [file.stat().st_mtime_ns for file in own_cache.glob("bpe-*.json")]
    two = make_tokenizer("bpe", 300, corpus)

    assert one.vocab_size == 300
    assert one.encode(corpus).tolist() == two.encode(corpus).tolist()
    assert len(one.encode(corpus)) < sum(map(len, corpus))
    assert [file.stat().st_mtime_ns for file in own_cache.glob("bpe-*.json")] == made


def test_a_cache_that_is_a_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GNMR_CACHE", str(tmp_path / "file"))

    with pytest.raises(ValueError, match="GNMR_CACHE must name a folder"):
        make_tokenizer("bpe", 300, [b"text"])
