"""Preparing: every source gives its documents, and every mistake one clear line."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

from data_cases import KINDS, OPTIONS, TEXTS, documents_of, files_of, jsonl_files, parquet_file, text_files
from grape_pe.lab.data import (
    adopt,
    builtin,
    default_tokenizer,
    load_tokenizer,
    open_dataset,
    open_source,
    prepare,
    verify,
)
from grape_pe.lab.data.splitting import held_out, without_repeats
from grape_pe.lab.errors import LabError

sources = sys.modules[open_source.__module__]


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_documents(kind: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    out = prepare(open_source(kind(tmp_path / "in")), tmp_path / "out", **OPTIONS)
    dataset, words = open_dataset(out), load_tokenizer(out)
    found = {split: documents_of(out, split) for split in ("train", "val")}
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


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, out = text_files(tmp_path / "in"), tmp_path / "out"
    prepare(open_source(source), out, **OPTIONS)
    before = files_of(out)
    assert prepare(open_source(source), out, **OPTIONS) == out  # done: nothing to do
    with pytest.raises(LabError, match=r"shard_tokens was 500, now 400; max_tokens was None, now 9\)"):
        prepare(open_source(source), out, **OPTIONS | {"shard_tokens": 400, "max_tokens": 9})
    (tmp_path / "in/a.txt").write_text("changed")
    with pytest.raises(LabError, match="files was '2 files, "):
        prepare(open_source(source), out, **OPTIONS)
    assert files_of(out) == before


def test_a_directory_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        LabError, match=r"holds thesis.tex and is not a dataset; give an empty or new directory"
    ):
        prepare(open_source(__file__), tmp_path, **OPTIONS)
    assert files_of(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(LabError, match="--out must be a directory, but"):
        prepare(open_source(__file__), tmp_path / "thesis.tex", **OPTIONS)


def test_one_preparation_at_a_time(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out/.lock"),
        pytest.raises(LabError, match="is being written by another process"),
    ):
        prepare(open_source(__file__), tmp_path / "out", **OPTIONS)


WRONG_INPUT: list[tuple[str, bytes, str]] = [
    ("empty.txt", b" \n\n", "the source has no text"),
    ("one.jsonl", b'{"text": "alone"}', "holds out 2 bytes, fewer than 128; give more text"),
    (
        "bad.jsonl",
        b'{"text": "a"}\n{"body": "b", "id": 1}',
        "line 2 has no text in field 'text'; its fields are body, id",
    ),
    ("none.jsonl", b'{"text": null}', "line 1 has no text in field 'text'; its fields are text"),
    ("torn.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
    ("list.jsonl", b"[1]", "line 1 must be a JSON object, got list"),
    ("binary.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
    ("bad.parquet", b"PAR1 no", "is not a readable parquet file"),
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
    path = parquet_file(tmp_path)
    for field in ("body", "n"):
        _refused(
            path,
            rf"no column '{field}' of text; it has n \(int64\), text \(string\): choose one",
            tmp_path,
            field,
        )
    jsonl_files(tmp_path)
    _refused(f"hf:{tmp_path}", "no text in field 'body'; its fields are text, n", tmp_path, "body")
    _refused(f"hf:{tmp_path}/nowhere", "check the names and the network", tmp_path)
    with pytest.raises(LabError, match=r"no source 'nowhere.txt': it is neither builtin, fineweb-edu-10B"):
        open_source("nowhere.txt")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/a.bin").touch()
    with pytest.raises(LabError, match="use: grape data adopt"):
        open_source(str(tmp_path / "shards"))
    with pytest.raises(LabError, match=r"--validation must be between 0 and 1, got 1; try 0.005"):
        prepare(open_source(path), tmp_path / "out", tokenizer="bytes", validation=1)


def _refused(source: str, message: str, tmp_path: Path, field: str = "text") -> None:
    with pytest.raises(LabError, match=message):
        prepare(open_source(source, field=field), tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_fineweb_by_name() -> None:
    for name, config in (("fineweb-edu-10B", "sample-10BT"), ("fineweb-edu-100B", "sample-100BT")):
        said = open_source(name).settings()
        assert (said["source"], said["config"]) == ("hf:HuggingFaceFW/fineweb-edu", config)


def test_openwebtext_by_name() -> None:
    assert open_source("openwebtext").settings()["source"] == "hf:Skylion007/openwebtext"
    assert default_tokenizer(["openwebtext"]) == "gpt2"


@pytest.mark.parametrize("hub", [False, True])
def test_parts_are_disjoint_and_whole_and_can_be_continued(hub: bool, tmp_path: Path) -> None:
    for number in range(5):
        lines = [json.dumps({"text": f"{number}-{line}"}) for line in range(6)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    name = f"hf:{tmp_path}" if hub else str(tmp_path)
    parts = [open_source(name, part=(i, 2)) for i in range(2)]
    found = [list(part.documents()) for part in parts]
    assert sorted(found[0] + found[1]) == sorted(open_source(name).documents()) and len(found[0]) == 18
    assert parts[0].settings() != parts[1].settings() and parts[0].settings() != open_source(name).settings()
    stream = parts[1].documents()
    begun = [next(stream) for _ in range(8)]
    rest = open_source(name, part=(1, 2)).documents(parts[1].cursor())
    assert begun + list(rest) == found[1]
    with pytest.raises(LabError, match="--part I/N needs at least N files"):
        list(open_source(name, part=(0, 6)).documents())


def test_parts_prepared_apart_become_one_dataset(tmp_path: Path) -> None:
    """As the documentation says: prepare each part, give the shards names of their own, adopt them."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 200)
    (tmp_path / "whole").mkdir()
    for part in range(2):
        source = open_source(str(tmp_path / "*.txt"), part=(part, 2))
        out = prepare(source, tmp_path / f"part-{part}", tokenizer="bytes", validation=0.2)
        for shard in out.glob("*.bin"):
            shard.rename(tmp_path / "whole" / f"{part}_{shard.name}")
    manifest = open_dataset(adopt(tmp_path / "whole", tokenizer="bytes")).manifest
    assert len(manifest.of("val")) == len(manifest.of("train")) == 2


def test_a_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {n} of a book\n" for n in range(12_000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    out = prepare(open_source(str(tmp_path / "book.txt")), tmp_path / "out", tokenizer="bytes")
    parts = [bytes(ids).decode() for split in ("val", "train") for ids in documents_of(out, split)]
    assert "".join(parts) == "".join(lines)
    assert len(parts) == 5 and all(part.endswith("\n") for part in parts)


@pytest.mark.parametrize("size, share", [(136_000, 0.005), (1_000_000, 0.005), (60_000, 0.05), (9_000, 0.3)])
def test_the_share_held_out_is_the_one_asked_for(size: int, share: float, tmp_path: Path) -> None:
    text = "".join(f"line {n} of a book\n" for n in range(size))[:size]
    (tmp_path / "book.txt").write_text(text)
    source = open_source(str(tmp_path / "book.txt"))
    out = open_dataset(prepare(source, tmp_path / "out", tokenizer="bytes", validation=share))
    held_out = out.tokens("val") / size
    assert 0.5 * share <= held_out <= 1.05 * share + 1 / size


def test_many_documents_keep_the_share() -> None:
    for share in (0.005, 0.03, 0.4):
        found = [held_out(number, share) for number in range(20_000)]
        assert found[0] and sum(found) / len(found) == pytest.approx(share, rel=0.15)


def test_too_little_text_is_refused_with_a_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("some words\n" * 1800)
    source = open_source(str(tmp_path / "note.txt"))
    with pytest.raises(LabError, match=r"holds out 99 bytes, fewer than 128; give --validation 0.01, or"):
        prepare(source, tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()
    prepare(source, tmp_path / "out", tokenizer="bytes", validation=0.01)


def test_a_failure_before_anything_is_kept_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 300_000}) + '\n{"text": ')
    with pytest.raises(LabError, match="line 2 is not a JSON object"):
        prepare(open_source(str(tmp_path / "a.jsonl")), tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud800 y"}\n{"text": "%s"}' % ("z" * 900))
    source = open_source(str(tmp_path / "a.jsonl"))
    out = prepare(source, tmp_path / "out", tokenizer="bytes", validation=0.2)
    assert bytes(documents_of(out, "val")[0]) == b"x ? y"


def test_adopt(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    made = prepare(open_source(text_files(tmp_path / "in")), tmp_path / "made", **OPTIONS)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for shard in open_dataset(made).manifest.shards:
        (theirs / f"edu_fineweb_{shard.file}").write_bytes((made / shard.file).read_bytes())
    before = files_of(theirs)
    adopt(theirs, tokenizer="bytes")
    assert {name: files_of(theirs)[name] for name in before} == before
    ours, adopted = open_dataset(made).manifest, open_dataset(theirs).manifest
    for split in ("train", "val"):
        assert [s.sha256 for s in adopted.of(split)] == [s.sha256 for s in ours.of(split)]
        assert adopted.documents(split) == ours.documents(split)
    assert adopt(theirs, tokenizer="bytes") == theirs
    with pytest.raises(LabError, match=r"has a manifest.json already, of \d+ shards with tokenizer bytes"):
        adopt(theirs, tokenizer="bpe-300")
    (theirs / "manifest.json").unlink()
    with pytest.raises(LabError, match="--tokenizer bpe-300 would be trained"):
        adopt(theirs, tokenizer="bpe-300")
    with pytest.raises(LabError, match=r"must hold two or more .bin shards"):
        adopt(tmp_path / "in", tokenizer="bytes")


def test_builtin_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPE_DATA", str(tmp_path))
    monkeypatch.setattr(sys.modules[sources.builtin_documents.__module__], "MAX_CHARACTERS", 600_000)
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
    assert "yield" in load_tokenizer(out).decode(np.concatenate(documents_of(out, "train")).astype(int))


def test_what_is_held_out_does_not_repeat_the_rest() -> None:
    shared = ["def f(x):", "    return x", "# the end"]
    long = "a line that is long enough to be recognised anywhere else in the text"
    training = "\n".join(["first", *shared, "last", long])
    held = "\n".join(["mine", "  " + shared[0], "", *shared[1:], "return x", "yours", long, "ours"])
    texts, numbers = without_repeats([training, held, long, "alone"], [False, True, True, True])
    assert texts == [training, "mine\n\nreturn x\nyours\nours", "alone"]  # short lines alone may repeat
    assert numbers == {1, 2}


def test_builtin_text_has_no_document_in_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[sources.builtin_documents.__module__], "MAX_CHARACTERS", 3_000_000)
    source = open_source("builtin")
    chosen = source.hold_out(0.1)
    documents = list(source.documents())
    held = [text for number, text in enumerate(documents) if chosen(number)]
    rest = [text for number, text in enumerate(documents) if not chosen(number)]
    assert len(set(documents)) == len(documents) and 0.05 < len(held) / len(documents) < 0.15
    lines = {line.strip() for text in rest for line in text.split("\n")}
    assert not [x for text in held for x in text.split("\n") if len(x.strip()) >= 50 and x.strip() in lines]
