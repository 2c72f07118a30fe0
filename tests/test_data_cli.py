"""`grape data`: what it prints, its exit codes, and real kills of the real command."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from grape_pe.cli import main

COMMAND = [sys.executable, "-m", "grape_pe.cli", "data"]


def _corpus(path: Path, documents: int = 40) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"Document {n} " * (1 + n % 5)}) + "\n" for n in range(documents))
    )
    return path


def _prepare(source: Path | str, out: Path, *more: str) -> list[str]:
    return ["prepare", str(source), "--out", str(out), "--tokenizer", "bytes", "--workers", "1", *more]


def test_prepare_info_verify_adopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    source = _corpus(tmp_path / "in.jsonl")
    assert main(["data", *_prepare(source, out, "--shard-tokens", "5e2", "--validation", "0.1")]) == 0
    said = capsys.readouterr()
    assert "tokenizer bytes, vocabulary 257, end 256" in said.out
    assert "40 documents" in said.err  # the progress bar's last state
    assert main(["data", "info", str(out)]) == 0
    assert capsys.readouterr().out == said.out
    assert main(["data", "verify", str(out)]) == 0
    assert "train_000000.bin  good" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    assert main(["data", "adopt", str(out), "--tokenizer", "bytes"]) == 0
    assert "source: adopted shards" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = _corpus(tmp_path / "in.jsonl"), tmp_path / "out"
    assert main(["data", *_prepare(source, out, "--validation", "0.1")]) == 0
    capsys.readouterr()
    with open(out / "val_000000.bin", "r+b") as file:
        file.truncate(1030)
    for arguments, message in [
        (_prepare("nowhere", tmp_path / "new"), "no source 'nowhere'"),
        (_prepare(source, tmp_path), "holds in.jsonl and is not a dataset"),
        (_prepare(source, out, "--validation", "0.1", "--max-tokens", "10"), "max_tokens was None, now 10"),
        (_prepare(source, tmp_path / "new", "--field", "body"), "has no text in field 'body'"),
        (["info", str(out)], "val_000000.bin is truncated: expected"),
        (["verify", str(out)], "1 bad shard in"),
        (["info", str(tmp_path / "none")], "there is no dataset at"),
    ]:
        assert main(["data", *arguments]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("grape: ") and message in lines[0]


@pytest.mark.parametrize("what", [[], ["prepare"], ["adopt"], ["info"], ["verify"]])
def test_help_fits_a_screen_and_has_an_example(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", *what, "--help"])
    text = capsys.readouterr().out
    assert "Example" in text
    assert len(text.splitlines()) <= 40


def test_a_count_must_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("x", "0", "1.5", "inf"):
        assert main(["data", "prepare", "builtin", "--out", "x", "--max-tokens", wrong]) == 2
        message = f"--max-tokens must be a whole number of at least 1, such as 1000 or 1e9, got '{wrong}'"
        assert message in capsys.readouterr().err


def test_no_traceback_without_a_network(tmp_path: Path) -> None:
    arguments = ["prepare", "fineweb-edu-10B", "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=offline)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot read dataset 'HuggingFaceFW/fineweb-edu' (config sample-10BT, split train)" in last
    assert not (tmp_path / "out").exists()


OFTEN_NOTED = """
import sys
from grape_pe.cli import main
from grape_pe.lab.data import open_source, prepare
sys.modules[prepare.__module__].COMMIT_TOKENS = 20_000
sys.modules[open_source.__module__].CHUNK_CHARACTERS = 100_000
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_at_random_with_two_workers(tmp_path: Path) -> None:
    """SIGKILL the command up to twelve times: no worker outlives it, and the files come out the same."""
    source = _corpus(tmp_path / "in.jsonl", documents=200_000)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ["--tokenizer", "bpe-300", "--shard-tokens", "100000"]
    command = [sys.executable, "-c", OFTEN_NOTED, "data", "prepare", str(source), *options, "--workers", "2"]
    one = [*COMMAND, "prepare", str(source), *options, "--workers", "1", "--out", str(whole)]
    subprocess.run(one, check=True, capture_output=True)
    chance, kills = random.Random(0), 0
    while not (broken / "manifest.json").exists():
        child = subprocess.Popen(
            [*command, "--out", str(broken)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        _wait_for_progress(child, broken, chance.uniform(0, 0.3))
        if kills < 12:
            child.kill()
            kills += 1
        child.wait()
        _wait_for_workers(child.pid)
    assert kills >= 4  # a fast machine may be done before the twelfth
    for path in [*whole.glob("*.bin"), whole / "manifest.json", whole / "tokenizer/tokenizer.json"]:
        assert (broken / path.relative_to(whole)).read_bytes() == path.read_bytes()


def _wait_for_progress(child: subprocess.Popen[bytes], out: Path, seconds: float) -> None:
    """Until the child has started to write, and then some."""
    before = _written(out)
    while child.poll() is None and _written(out) == before:
        time.sleep(0.02)
    time.sleep(seconds)


def _written(out: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_mtime_ns) for path in out.glob("progress.json"))


def _wait_for_workers(session: int) -> None:
    """Nothing of a killed command's process group is left after a while."""
    for _ in range(200):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(session, signal.SIGKILL)
    raise AssertionError("workers outlived the command")
