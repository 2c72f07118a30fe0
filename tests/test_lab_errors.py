"""What can go wrong with a run: one clear line, an exit code, nothing overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")

from grape_pe.cli import main
from grape_pe.lab.data import read_shard
from lab_runs import tiny_data, words

SHORT = {"train__steps": 4, "train__checkpoint_every": 2, "train__eval_every": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("errors"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(words(data, run, **SHORT)) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run to do harm to."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def spoiled(data: Path, tmp_path: Path) -> Path:
    """A dataset to do harm to."""
    return Path(shutil.copytree(data, tmp_path / "spoiled"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount a small file system to fill")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line a command said when it refused."""
    capsys.readouterr()
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert said.startswith("grape: ") and len(said.splitlines()) == 1, said
    return said


def shard(data: Path) -> Path:
    return data / "train_000000.bin"


def test_a_truncated_shard(spoiled: Path, tmp_path: Path, capsys) -> None:
    with shard(spoiled).open("r+b") as file:
        file.truncate(5000)
    said = refused(words(spoiled, tmp_path / "new"), capsys)
    assert str(shard(spoiled)) in said and "tokens" in said
    assert not (tmp_path / "new").exists()


def test_a_wrong_magic(spoiled: Path, tmp_path: Path, capsys) -> None:
    with shard(spoiled).open("r+b") as file:
        file.write(b"\0\0\0\0")
    said = refused(words(spoiled, tmp_path / "new"), capsys)
    assert str(shard(spoiled)) in said and "20240520" in said
    assert not (tmp_path / "new").exists()


def test_a_token_beyond_the_vocabulary(spoiled: Path, tmp_path: Path, capsys) -> None:
    tokens = np.array(read_shard(shard(spoiled)))
    tokens[:] = np.where(np.arange(len(tokens)) % 7 == 0, 4000, tokens)
    with shard(spoiled).open("r+b") as file:
        file.seek(1024)
        file.write(tokens.astype("<u2").tobytes())
    said = refused(words(spoiled, tmp_path / "new"), capsys)
    assert "token 4000 at position" in said and "beyond the vocabulary of 257" in said


def test_a_model_with_too_few_tokens(data: Path, tmp_path: Path, capsys) -> None:
    said = refused(words(data, tmp_path / "new", model__vocab_size=100), capsys)
    assert "model.vocab_size must cover the 257 tokens" in said and "got 100" in said


def test_data_that_are_not_there(tmp_path: Path, capsys) -> None:
    assert "nowhere" in refused(words(tmp_path / "nowhere", tmp_path / "new"), capsys)
    assert "flip-flop" in refused(words("task:flip-flip", tmp_path / "new"), capsys)
    assert not (tmp_path / "new").exists()


def test_changed_data(run: Path, spoiled: Path, data: Path, capsys) -> None:
    before = contents(run)
    manifest = spoiled / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"documents"', ' "documents"'))
    shutil.rmtree(run / "final")
    before = contents(run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(data), str(spoiled)))
    said = refused([*words(spoiled, run, **SHORT), "--resume"], capsys)
    assert "the data of" in said and "have changed" in said
    (run / "config.yaml").write_text(config)
    assert contents(run) == before


def test_a_run_is_not_begun_twice(run: Path, data: Path, capsys) -> None:
    before = contents(run)
    assert "continue it with --resume" in refused(words(data, run, **SHORT), capsys)
    assert contents(run) == before


def test_a_changed_configuration(run: Path, data: Path, capsys) -> None:
    before = contents(run)
    changed = words(data, run, "--resume", **SHORT | {"train__lr": 0.5, "model__encoding": "fox"})
    said = refused(changed, capsys)
    assert "train.lr: 0.001 -> 0.5" in said and "model.encoding: 'rope' -> 'fox'" in said
    assert contents(run) == before


def test_a_directory_with_other_files(data: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "and is not a run" in refused(words(data, tmp_path, "--resume"), capsys)
    assert "is a file" in refused(words(data, tmp_path / "thesis.tex"), capsys)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_two_processes_on_one_run(run: Path, data: Path, capsys) -> None:
    before = contents(run)
    with (run / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = refused(words(data, run, "--resume", **SHORT), capsys)
    assert "is being written by another process" in said
    assert contents(run) == before


def test_no_directory_given(capsys) -> None:
    assert "--out" in refused(["train", "demo"], capsys)


@pytest.mark.parametrize("harm", ["truncate", "empty", "state", "gone"])
def test_a_damaged_checkpoint(harm: str, run: Path, data: Path, capsys, caplog) -> None:
    """It is named, and nothing is trained from it; without it the one before serves."""
    newest = run / "checkpoints/step-00000004"
    [tensors] = newest.glob("*.safetensors")
    if harm == "truncate":
        os.truncate(tensors, tensors.stat().st_size // 2)
    elif harm == "empty":
        os.truncate(tensors, 0)
    elif harm == "state":
        (newest / "state.json").write_text('{"step"')
    else:
        tensors.unlink()
    before = contents(run)
    assert str(newest) in refused([*words(data, run, **SHORT), "--resume"], capsys)
    assert not [each for each in caplog.records if each.exc_info]  # torch would log a traceback
    assert contents(run) == before
    shutil.rmtree(newest)
    assert main([*words(data, run, **SHORT), "--resume"]) == 0


def test_a_loss_that_is_no_number(data: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    given = {"train__steps": 40, "train__warmup": 39, "train__checkpoint_every": 2, "train__lr": 1e30,
             "train__clip": 0, "train__keep": 50, "train__eval_every": 0}  # fmt: skip
    said = refused(words(data, run, **given), capsys, code=3)
    kept = sorted(run.glob("checkpoints/step-*"))
    assert "stopped at step" in said and "train.lr" in said
    assert ("there is no checkpoint yet" in said) if not kept else (str(kept[-1]) in said)
    assert not (run / "final").exists()


def test_divergence_leaves_the_last_checkpoint_as_it_was(run: Path, data: Path, capsys) -> None:
    """A good run whose weights overflow at the next step: its checkpoint is named, and the same after it."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(run / "checkpoints/step-00000004")
    [path] = (run / "checkpoints/step-00000002").glob("*.safetensors")
    tensors, about = load_file(path), _metadata(path)
    name = next(name for name in tensors if name.endswith("gate_proj.weight") and name.startswith("model."))
    tensors[name].fill_(float("inf"))
    save_file(tensors, path, about)
    before = contents(run / "checkpoints")
    said = refused([*words(data, run, **SHORT), "--resume"], capsys, code=3)
    assert "stopped at step 2: the loss is nan" in said and "step-00000002" in said
    assert contents(run / "checkpoints") == before


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def fill(disk: Path, leave: int = 0) -> Path:
    """Take all the room but `leave` bytes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_bsize - leave))
    return filler


@pytest.mark.parametrize("leave", [0, 40_000, 300_000], ids=["nothing", "no checkpoint", "one checkpoint"])
def test_a_full_disk(leave: int, small_disk: Path, data: Path, capsys) -> None:
    """However much fits: one line; what was whole stays whole; with room again the run goes on to its end."""
    filler = fill(small_disk, leave)
    run = small_disk / "run"
    given = words(data, run, **SHORT | {"log__tensorboard": True, "train__keep": 9})
    assert "No space left on device" in refused(given, capsys)
    assert filler.exists()
    filler.unlink()
    assert main([*given, "--resume"]) == 0
    assert (run / "final/model.safetensors").is_file()
    assert not list(run.glob("checkpoints/.part-*"))


@pytest.mark.parametrize("name", ["final", "metrics.jsonl"])
def test_a_disk_full_at_the_end(name: str, small_disk: Path, finished: Path, data: Path, capsys) -> None:
    """A run that is done but cannot export, or cannot rewrite its metrics, loses nothing."""
    run = Path(shutil.copytree(finished, small_disk / "run"))
    if name == "final":
        shutil.rmtree(run / "final")
    else:
        with (run / name).open("a") as file:
            file.write('{"kind": "train", "step": 99, "loss": 1.0}\n')
    before = contents(run)
    filler = fill(small_disk, 0 if name == "metrics.jsonl" else 8192)
    assert "No space left on device" in refused([*words(data, run, **SHORT), "--resume"], capsys)
    filler.unlink()
    kept = contents(run)
    assert all(kept[path] == before[path] for path in before if path != ".lock")
    assert main([*words(data, run, **SHORT), "--resume"]) == 0
    assert contents(run)["final/model.safetensors"] == contents(finished)["final/model.safetensors"]


def test_a_read_only_disk(small_disk: Path, finished: Path, data: Path, capsys) -> None:
    shutil.copytree(finished, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for given in (words(data, small_disk / "new"), [*words(data, small_disk / "run", **SHORT), "--resume"]):
        assert "Read-only file system; give another --out" in refused(given, capsys)


def test_a_place_where_nothing_can_be_made(data: Path, capsys) -> None:
    assert "cannot write to /proc/new" in refused(words(data, Path("/proc/new")), capsys)


MISSING = [
    ("pydantic", ["train", "demo", "--train.steps", "5", "--dry-run"]),
    ("pydantic", ["recipes"]),
    ("yaml", ["train", "demo", "--dry-run"]),
    ("numpy", ["train", "demo", "--out", "OUT"]),
    ("tokenizers", ["sample", "OUT"]),
    ("tensorboard", ["train", "demo", "--out", "OUT"]),
    ("safetensors", ["train", "demo", "--out", "OUT"]),
    ("transformers", ["train", "demo", "--out", "OUT"]),
    ("shtab", ["completion", "bash"]),
]
WITHOUT = """
import json, os, sys
from grape_pe.cli import main
for module, arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        sys.modules[module] = None
        os._exit(main(arguments))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("exit", code, file=sys.stderr, flush=True)
"""


def test_a_missing_extra_gives_the_command(data: Path, tmp_path: Path) -> None:
    """In processes without a module: what it is needed for is not begun."""
    out = str(tmp_path / "out")
    cases = [(module, [out if word == "OUT" else word for word in given]) for module, given in MISSING]
    command = [sys.executable, "-c", WITHOUT, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(MISSING), done.stderr
    for (module, _), said, code in zip(MISSING, lines[::2], lines[1::2], strict=True):
        assert code == "exit 2"
        assert f"this needs {module}" in said and "pip install 'grape-pe[lab]'" in said
    assert not Path(out).exists()
