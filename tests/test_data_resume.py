"""Interrupted, killed or out of disk, a preparation continues to the same bytes, whatever the workers."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

from data_cases import KINDS, OPTIONS, files_of, in_a_child, jsonl_files, text_files
from grape_pe.lab.data import load_tokenizer, open_dataset, open_source, prepare
from grape_pe.lab.errors import LabError

preparing = sys.modules[prepare.__module__]
sources = sys.modules[open_source.__module__]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few documents, progress noted after each."""
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 200)
    monkeypatch.setattr(preparing, "COMMIT_TOKENS", 1)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it gave to the system: only a power cut does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_chunks")
def test_interrupted_anywhere_it_continues_to_the_same_bytes(
    kind: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    source = kind(tmp_path / "in")
    whole = files_of(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    real, steps = preparing._Preparation._write, 0

    def stopping(*arguments: Any) -> bool:
        nonlocal steps
        steps += 1
        assert steps < 300, "it does not get on"
        more: bool = real(*arguments)
        if steps % 4 == 0:  # three chunks are noted, the fourth is written and lost
            raise KeyboardInterrupt
        return more

    monkeypatch.setattr(preparing._Preparation, "_write", stopping)
    while not (tmp_path / "broken/manifest.json").exists():
        with suppress(KeyboardInterrupt):
            prepare(open_source(source), tmp_path / "broken", **OPTIONS)
    assert steps > 12  # so it was stopped more than three times
    assert files_of(tmp_path / "broken") == whole


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


@pytest.mark.usefixtures("small_chunks")
def test_killed_at_every_moment_it_continues_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = jsonl_files(tmp_path / "in")
    whole = files_of(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    kills = 0
    for moment in range(1, 400):
        if in_a_child(_prepare_and_die, source, tmp_path / "broken", 1 + moment % 37) == 0:
            break
        kills += 1
    assert kills > 10
    assert files_of(tmp_path / "broken") == whole


@pytest.mark.usefixtures("small_chunks")
def test_a_kill_at_each_single_moment(tmp_path: Path) -> None:
    """One kill a run, at moments spread over all of it; the second run finishes."""
    (tmp_path / "in").mkdir()
    source = text_files(tmp_path / "in")
    whole = files_of(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    for moment in (1, 2, 3, 4, 5, 6, 7, 8, 12, 21, 34, 55, 80):
        out = tmp_path / f"broken{moment}"
        code = in_a_child(_prepare_and_die, source, out, moment)
        assert code in (0, -signal.SIGKILL)
        assert files_of(prepare(open_source(source), out, **OPTIONS)) == whole


def _fill_the_disk(source: str, out: Path) -> None:
    """In a child process: no file may grow beyond 1500 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    try:
        prepare(open_source(source), out, **OPTIONS)
    except LabError as problem:
        os._exit(3 if "cannot write" in str(problem) and "work is kept" in str(problem) else 4)
    os._exit(0)


@pytest.mark.parametrize("real", [True, False])
def test_a_full_disk(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    source = text_files(tmp_path / "in")
    whole = files_of(prepare(open_source(source), tmp_path / "whole", **OPTIONS))
    if real:
        load_tokenizer(tmp_path / "whole").save(_begun(tmp_path / "full", source))
        assert in_a_child(_fill_the_disk, source, tmp_path / "full") == 3
    else:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", _no_space)
            with pytest.raises(LabError, match="No space left on device; free disk space"):
                prepare(open_source(source), tmp_path / "full", **OPTIONS)
    assert files_of(prepare(open_source(source), tmp_path / "full", **OPTIONS)) == whole


def _begun(out: Path, source: str) -> Path:
    """A preparation stopped before its tokenizer, which is larger than the limit the test sets."""
    out.mkdir()
    settings = open_source(source).settings() | OPTIONS | {"max_tokens": None}
    (out / "progress.json").write_text(json.dumps({"settings": settings}))
    return out


def _no_space(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("small_chunks")
def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = text_files(tmp_path / "in")
    options = OPTIONS | {"tokenizer": "bpe-300", "max_tokens": 900}
    one = prepare(open_source(source), tmp_path / "one", **options)
    two = prepare(open_source(source), tmp_path / "two", workers=2, **options)
    assert files_of(one) == files_of(two)
    total = sum(open_dataset(one).tokens(split) for split in ("train", "val"))
    assert 900 <= total < 900 + 150  # up to the end of a document


@pytest.mark.usefixtures("small_chunks")
def test_other_settings_are_refused_halfway_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, out = jsonl_files(tmp_path / "in"), tmp_path / "out"
    assert in_a_child(_prepare_and_die, source, out, 30) == -signal.SIGKILL
    before = files_of(out)
    with pytest.raises(LabError, match="tokenizer was 'bytes', now 'bpe-300'"):
        prepare(open_source(source), out, **OPTIONS | {"tokenizer": "bpe-300"})
    assert files_of(out) == before
