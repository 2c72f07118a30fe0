"""Tokenizers: text comes back, files load in both libraries, and no text can forge the end of a document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

import tokenizers

from grape_pe.lab.data import (
    default_tokenizer,
    hf_tokenizer,
    load_tokenizer,
    open_dataset,
    open_source,
    prepare,
    verify,
)
from grape_pe.lab.data.tokenizer import build_tokenizer, tokenizer_setting
from grape_pe.lab.errors import LabError

TEXTS = ["def f(x):\n    return x + 1\n", "The quick brown fox. The quick brown dog.", "é€𝛼 naïve"] * 20
BYTES = build_tokenizer("bytes", ())
TRAINED = build_tokenizer("bpe-300", TEXTS)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(any_text | st.just("a<|endoftext|>b"))
def test_text_comes_back_and_never_ends_a_document(text: str) -> None:
    for tokenizer in (BYTES, TRAINED):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos not in ids
        assert tokenizer.encode_document(text).tolist() == [tokenizer.eos, *ids]


@given(any_text)
def test_bytes_are_bytes_also_as_the_library_runs_them(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.inner.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert (BYTES.vocab_size, BYTES.eos) == (257, 256)


def test_training_is_deterministic_and_of_the_size_asked() -> None:
    assert TRAINED.vocab_size == 300
    assert build_tokenizer("bpe-300", TEXTS).inner.to_str() == TRAINED.inner.to_str()
    assert len(TRAINED.encode(TEXTS[1])) < len(BYTES.encode(TEXTS[1])) / 2


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_files_load_everywhere(tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer/tokenizer.json"
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizers.Tokenizer.from_file(str(file)).encode(TEXTS[0]).ids == ids
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == load_tokenizer(file.parent).encode(TEXTS[0]) == ids
    for theirs in (hf_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(file.parent)):
        assert theirs(TEXTS[0])["input_ids"] == ids
        assert theirs.decode(ids) == TEXTS[0]
        assert theirs.eos_token_id == tokenizer.eos
        assert theirs("a<|endoftext|>")["input_ids"][-1] == tokenizer.eos
        assert len(theirs) == tokenizer.vocab_size


def test_vocab_and_merges(tmp_path: Path) -> None:
    """GPT-2's own two files."""
    said = json.loads(TRAINED.inner.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(said["vocab"]))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in said["merges"])
    )
    found = build_tokenizer(str(tmp_path), ())
    assert found.encode(TEXTS[0]) == TRAINED.encode(TEXTS[0])
    assert (found.eos, found.vocab_size) == (TRAINED.eos, 300)


def test_a_saved_tokenizer_that_cuts_and_pads_is_told_not_to(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(TRAINED.inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer(str(tmp_path / "tokenizer.json"), ()).encode(TEXTS[0]) == TRAINED.encode(TEXTS[0])


def _word_tokenizer(path: Path, vocabulary: dict[str, int]) -> str:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    inner.save(str(path / "tokenizer.json"))
    return str(path)


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    words = ["w0", "b" * 300, "c" * 300]
    name = _word_tokenizer(tmp_path, {"<|endoftext|>": 0, "w0": 1, words[1]: 65535, words[2]: 65536})
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(words[1 + number % 2])
    source = open_source([str(tmp_path / f"{number}.txt") for number in range(8)])
    data = open_dataset(
        prepare(source, tmp_path / "data", tokenizer=name, validation=0.5, show_progress=False)
    )
    found = {t for shard in data.manifest.shards for t in data.read(shard, 0, shard.tokens).tolist()}
    assert found == {0, 65535, 65536} and all(fault is None for _, fault in verify(data.directory))
    numbers = np.fromfile(data.directory / data.manifest.shards[0].file, dtype="<i4", count=3)
    assert numbers.tolist()[:2] == [20240801, 7]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refused("bpe-256", "bpe-N takes N from 257 (256 bytes and an end token) to 65536, got 256")
    _refused("bpe-65537", "got 65537")
    _refused(str(tmp_path), "it needs tokenizer.json, or vocab.json and merges.txt")
    nameless = _word_tokenizer(tmp_path, {"w0": 0, "stop": 1})
    _refused(nameless, "has no end token: none of <|endoftext|>,")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    assert build_tokenizer(nameless, ()).eos == 1
    (tmp_path / "tokenizer.json").write_text("{}")
    _refused(str(tmp_path), "cannot be read")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: nothing is asked of the Hub, whose own retries take half a minute."""
    import huggingface_hub

    def unknown(*_: object) -> None:
        raise OSError("name not known")

    def cached_only(name: str, file: str, local_files_only: bool = False) -> None:
        assert local_files_only, "asked the Hub"
        raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")

    for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached_only)
    _refused("gpt2", "(name not known); without a network give --tokenizer bpe-8192, which is trained on")


def test_the_default_needs_no_network() -> None:
    assert default_tokenizer(["some.txt"]) == default_tokenizer(["builtin"]) == "bpe-8192"
    assert default_tokenizer(["fineweb-edu-10B"]) == "gpt2"


def _refused(name: str, message: str) -> None:
    with pytest.raises(LabError) as problem:
        build_tokenizer(name, TEXTS)
    assert message in str(problem.value)


def test_a_local_tokenizer_is_known_by_its_contents(tmp_path: Path) -> None:
    assert tokenizer_setting("gpt2") == "gpt2"
    before = tokenizer_setting(_word_tokenizer(tmp_path, {"<|endoftext|>": 0}))
    after = tokenizer_setting(_word_tokenizer(tmp_path, {"<|endoftext|>": 0, "more": 1}))
    assert before != after
