"""Preparing: the same bytes whatever the workers and interruptions; every mistake in one clear line."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from grape_pe.lab.data import (
    adopt,
    builtin,
    load_tokenizer,
    open_dataset,
    open_source,
    prepare,
    read_shard,
    verify,
)
from grape_pe.lab.data import prepare as prepare_function
from grape_pe.lab.errors import LabError

preparing = sys.modules[prepare_function.__module__]
sources = sys.modules[open_source.__module__]

TEXTS = [f"Document {n}: " + "so many words, " * (n % 7) for n in range(60)]
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "shard_tokens": 500, "validation": 0.1}


def _text(path: Path) -> str:
    (path / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:25]))
    (path / "b.md").write_text("\n<|endoftext|>\n".join(TEXTS[25:]))
    return str(path)


def _jsonl(path: Path) -> str:
    for name, part in (("a", TEXTS[:25]), ("b", TEXTS[25:])):
        lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(part)]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(path / "*.jsonl")


def _parquet(path: Path) -> str:
    pq.write_table(pa.table({"n": range(60), "text": TEXTS}), path / "a.parquet", row_group_size=7)
    return str(path / "a.parquet")


def _hub(path: Path) -> str:
    _jsonl(path)
    return f"hf:{path}"


KINDS = [_text, _jsonl, _parquet, _hub]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few documents, progress noted after each."""
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 200)
    monkeypatch.setattr(preparing, "COMMIT_TOKENS", 1)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it gave to the system: only a power cut does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def _files(directory: Path) -> dict[str, bytes]:
    """Everything in a dataset but the lock."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_documents(kind: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    out = prepare(open_source(kind(tmp_path / "in")), tmp_path / "out", **OPTIONS)
    dataset, words = open_dataset(out), load_tokenizer(out)
    found = {split: _documents(out, split) for split in ("train", "val")}
    decoded = {split: [words.decode(ids).strip() for ids in found[split]] for split in found}
    assert decoded["val"][0] == TEXTS[0].strip()
    expected = [text.strip() for text in TEXTS]
    assert sorted(decoded["train"] + decoded["val"]) == sorted(expected)
    assert decoded["train"] == [text for text in expected if text in decoded["train"]]  # in order
    assert dataset.manifest.documents("train") + dataset.manifest.documents("val") == 60
    assert 1 < dataset.manifest.documents("val") < 15
    assert [shard.tokens for shard in dataset.manifest.of("train")][:-1] == [500] * (
        len(dataset.manifest.of("train")) - 1
    )
    assert all(problem is None for _, problem in verify(out))
    assert not (out / "progress.json").exists()


def _documents(out: Path, split: str) -> list[list[int]]:
    dataset = open_dataset(out)
    stream = np.concatenate([read_shard(out / shard.file) for shard in dataset.manifest.of(split)])
    starts = np.flatnonzero(stream == dataset.eos)
    assert starts[0] == 0
    return [part[1:].tolist() for part in np.split(stream, starts[1:])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_chunks")
def test_interrupted_anywhere_it_continues_to_the_same_bytes(
    kind: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    source = kind(tmp_path / "in")
    whole = _files(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    real, steps = preparing._write, 0

    def stopping(*arguments: Any) -> bool:
        nonlocal steps
        steps += 1
        more: bool = real(*arguments)
        if steps % 4 == 0:  # three chunks are noted, the fourth is written and lost
            raise KeyboardInterrupt
        return more

    monkeypatch.setattr(preparing, "_write", stopping)
    while not (tmp_path / "broken/manifest.json").exists():
        with suppress(KeyboardInterrupt):
            prepare(open_source(source), tmp_path / "broken", **OPTIONS)
    assert steps > 12  # so it was stopped more than three times
    assert _files(tmp_path / "broken") == whole


def _prepare_and_die(source: str, out: Path, moment: int) -> None:
    """In a child process: SIGKILL at the so-many-th of the calls that touch the disk for good."""
    left = moment

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return call

    for name in ("replace", "fsync", "unlink"):  # each stands between two states of the directory
        setattr(os, name, deadly(getattr(os, name)))
    prepare(open_source(source), out, **OPTIONS)
    os._exit(0)


def _in_a_child(function: Callable[..., None], *arguments: Any) -> int:
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.usefixtures("small_chunks")
def test_killed_at_every_moment_it_continues_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = _jsonl(tmp_path / "in")
    whole = _files(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    kills = 0
    for moment in range(1, 400):
        if _in_a_child(_prepare_and_die, source, tmp_path / "broken", 1 + moment % 37) == 0:
            break
        kills += 1
    assert kills > 10
    assert _files(tmp_path / "broken") == whole


@pytest.mark.usefixtures("small_chunks")
def test_a_kill_at_each_single_moment(tmp_path: Path) -> None:
    """One kill a run, at moments spread over all of it; the second run finishes."""
    (tmp_path / "in").mkdir()
    source = _text(tmp_path / "in")
    whole = _files(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    for moment in (1, 2, 3, 4, 5, 6, 7, 8, 12, 21, 34, 55, 80):
        out = tmp_path / f"broken{moment}"
        code = _in_a_child(_prepare_and_die, source, out, moment)
        assert code in (0, -signal.SIGKILL)
        assert _files(prepare(open_source(source), out, **OPTIONS)) == whole


def _fill_the_disk(source: str, out: Path) -> None:
    """In a child process: no file may grow beyond 1500 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    try:
        prepare(open_source(source), out, **OPTIONS)
    except LabError as problem:
        os._exit(3 if "cannot write" in str(problem) and "is kept" in str(problem) else 4)
    os._exit(0)


@pytest.mark.parametrize("real", [True, False])
def test_a_full_disk(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    source = _text(tmp_path / "in")
    whole = _files(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    if real:
        load_tokenizer(tmp_path / "whole").save(_begun(tmp_path / "full", source))
        assert _in_a_child(_fill_the_disk, source, tmp_path / "full") == 3
    else:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", _no_space)
            with pytest.raises(LabError, match="No space left on device; make room"):
                prepare(open_source(source), tmp_path / "full", **OPTIONS)
    assert _files(prepare(open_source(source), tmp_path / "full", **OPTIONS)) == whole


def _begun(out: Path, source: str) -> Path:
    """A preparation stopped before its tokenizer, which is larger than the limit the test sets."""
    out.mkdir()
    settings = open_source(source).settings() | OPTIONS | {"max_tokens": None}
    (out / "progress.json").write_text(json.dumps({"settings": settings}))
    return out


def _no_space(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_read_only_directory(tmp_path: Path) -> None:
    place = tmp_path
    if os.geteuid() == 0:  # root may write anywhere but here
        place = Path("/sys")
    else:
        tmp_path.chmod(0o555)
    if not place.is_dir():
        pytest.skip("no directory that is read-only for root")
    with pytest.raises(LabError, match=f"cannot write {place}/out: .*(denied|not permitted|Read-only)"):
        prepare(open_source(__file__), place / "out", **OPTIONS)


@pytest.mark.usefixtures("small_chunks")
def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = _text(tmp_path / "in")
    options = OPTIONS | {"tokenizer": "bpe-300", "max_tokens": 900}
    one = prepare(open_source(source), tmp_path / "one", **options)
    two = prepare(open_source(source), tmp_path / "two", workers=2, **options)
    assert _files(one) == _files(two)
    total = sum(open_dataset(one).tokens(split) for split in ("train", "val"))
    assert 900 <= total < 900 + 150  # up to the end of a document


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, out = _text(tmp_path / "in"), tmp_path / "out"
    prepare(open_source(source), out, **OPTIONS)
    before = _files(out)
    assert prepare(open_source(source), out, **OPTIONS) == out  # done: nothing to do
    with pytest.raises(LabError, match=r"shard_tokens was 500, now 400; max_tokens was None, now 9\)"):
        prepare(open_source(source), out, **OPTIONS | {"shard_tokens": 400, "max_tokens": 9})
    (tmp_path / "in/a.txt").write_text("changed")
    with pytest.raises(LabError, match="files was '2 files, "):
        prepare(open_source(source), out, **OPTIONS)
    assert _files(out) == before


@pytest.mark.usefixtures("small_chunks")
def test_other_settings_are_refused_halfway_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, out = _jsonl(tmp_path / "in"), tmp_path / "out"
    assert _in_a_child(_prepare_and_die, source, out, 30) == -signal.SIGKILL
    before = _files(out)
    with pytest.raises(LabError, match="tokenizer was 'bytes', now 'bpe-300'"):
        prepare(open_source(source), out, **OPTIONS | {"tokenizer": "bpe-300"})
    assert _files(out) == before


def test_a_directory_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        LabError, match=r"holds thesis.tex and is no dataset; choose an empty or new directory"
    ):
        prepare(open_source(__file__), tmp_path, **OPTIONS)
    assert _files(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(LabError, match="is a file; a dataset needs a directory"):
        prepare(open_source(__file__), tmp_path / "thesis.tex", **OPTIONS)


def test_one_preparation_at_a_time(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/.lock"), pytest.raises(LabError, match="another process is preparing"):
        prepare(open_source(__file__), tmp_path / "out", **OPTIONS)


WRONG_INPUT: list[tuple[str, bytes, str]] = [
    ("empty.txt", b" \n\n", "the source has no text: every document is empty"),
    ("one.jsonl", b'{"text": "alone"}', "too few documents: one is held out"),
    (
        "bad.jsonl",
        b'{"text": "a"}\n{"body": "b", "id": 1}',
        "line 2 has no text in field 'text'; its fields are body, id",
    ),
    ("none.jsonl", b'{"text": null}', "line 1 has no text in field 'text'; its fields are text"),
    ("torn.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
    ("list.jsonl", b"[1]", "line 1 must be a JSON object, got list"),
    ("binary.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
    ("bad.parquet", b"PAR1 no", "is no readable parquet file"),
]


@pytest.mark.parametrize("name, content, message", WRONG_INPUT, ids=[row[0] for row in WRONG_INPUT])
def test_wrong_input(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError) as problem:
        prepare(open_source(str(tmp_path / name)), tmp_path / "out", **OPTIONS)
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


def test_wrong_columns_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = _parquet(tmp_path)
    for field in ("body", "n"):
        _refused(
            path,
            rf"no column '{field}' of text; it has n \(int64\), text \(string\): choose one",
            tmp_path,
            field,
        )
    _jsonl(tmp_path)
    _refused(f"hf:{tmp_path}", "no text in field 'body'; its fields are text, n", tmp_path, "body")
    _refused(f"hf:{tmp_path}/nowhere", "check the names and the network", tmp_path)
    with pytest.raises(LabError, match=r"no source 'nowhere.txt': it is neither builtin, fineweb-edu-10B"):
        open_source("nowhere.txt")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/a.bin").touch()
    with pytest.raises(LabError, match="use: grape data adopt"):
        open_source(str(tmp_path / "shards"))
    with pytest.raises(LabError, match="between 0 and 1, got 1"):
        prepare(open_source(path), tmp_path / "out", tokenizer="bytes", validation=1)


def _refused(source: str, message: str, tmp_path: Path, field: str = "text") -> None:
    with pytest.raises(LabError, match=message):
        prepare(open_source(source, field=field), tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_fineweb_by_name() -> None:
    for name, config in (("fineweb-edu-10B", "sample-10BT"), ("fineweb-edu-100B", "sample-100BT")):
        said = open_source(name).settings()
        assert (said["source"], said["config"]) == ("hf:HuggingFaceFW/fineweb-edu", config)


def test_a_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {n} of a book\n" for n in range(12_000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    out = prepare(open_source(str(tmp_path / "book.txt")), tmp_path / "out", tokenizer="bytes")
    parts = [bytes(ids).decode() for split in ("val", "train") for ids in _documents(out, split)]
    assert "".join(parts) == "".join(lines)
    assert len(parts) == 4 and all(part.endswith("\n") for part in parts)


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud800 y"}\n{"text": "z"}')
    out = prepare(open_source(str(tmp_path / "a.jsonl")), tmp_path / "out", tokenizer="bytes")
    assert bytes(_documents(out, "val")[0]) == b"x ? y"


def test_adopt(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    made = prepare(open_source(_text(tmp_path / "in")), tmp_path / "made", **OPTIONS)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for shard in open_dataset(made).manifest.shards:
        (theirs / f"edu_fineweb_{shard.file}").write_bytes((made / shard.file).read_bytes())
    before = _files(theirs)
    adopt(theirs, tokenizer="bytes")
    assert {name: _files(theirs)[name] for name in before} == before
    ours, adopted = open_dataset(made).manifest, open_dataset(theirs).manifest
    for split in ("train", "val"):
        assert [s.sha256 for s in adopted.of(split)] == [s.sha256 for s in ours.of(split)]
        assert adopted.documents(split) == ours.documents(split)
    assert adopt(theirs, tokenizer="bytes") == theirs
    with pytest.raises(LabError, match=r"has a manifest.json already, of \d+ shards with tokenizer bytes"):
        adopt(theirs, tokenizer="bpe-300")
    (theirs / "manifest.json").unlink()
    with pytest.raises(LabError, match="bpe-300 cannot be trained on them"):
        adopt(theirs, tokenizer="bpe-300")
    with pytest.raises(LabError, match=r"must hold two or more .bin shards"):
        adopt(tmp_path / "in", tokenizer="bytes")


def test_builtin_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPE_DATA", str(tmp_path))
    monkeypatch.setattr(sys.modules[sources.python_documents.__module__], "MAX_CHARACTERS", 600_000)
    children = [
        multiprocessing.get_context("fork").Process(target=builtin, args=(None, "bytes")) for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    out = builtin(tokenizer="bytes")
    assert out.parent == tmp_path
    changed = (out / "train_000000.bin").stat().st_mtime_ns
    assert builtin(tokenizer="bytes") == out
    assert (out / "train_000000.bin").stat().st_mtime_ns == changed
    dataset = open_dataset(out)
    assert 600_000 <= sum(dataset.tokens(split) for split in ("train", "val")) < 1_000_000
    assert "yield" in load_tokenizer(out).decode(np.concatenate(_documents(out, "train")).astype(int))
