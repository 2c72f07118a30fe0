"""How the compiled CPU kernel is built, kept and loaded, with fake compilers and folders of its own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from grape_pe.attention import folder
from grape_pe.attention.cpu import build

REAL = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is built on Linux only")
needs_compiler = pytest.mark.skipif(REAL is None, reason="needs a C++ compiler")
STUB = "".join(f'extern "C" void grape_{name}(void *) {{}}\n' for name in ("forward", "backward", "decode"))
Ask = Callable[[], tuple[bool, str, str]]


def forget() -> None:
    """Whether there is a kernel is decided once in a process: decide again."""
    build._load.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder for what is built, which does not exist yet, and no compiler on the PATH."""
    monkeypatch.setenv("GRAPE_PE_CACHE", str(tmp_path / "new" / "a b;c"))
    monkeypatch.delenv("GRAPE_PE_NATIVE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    forget()
    yield tmp_path / "new" / "a b;c"
    forget()


@pytest.fixture
def ask(cache: Path, capsys) -> Ask:
    """As a new process would: whether there is a kernel, why not, and what was printed or warned about."""

    def answer() -> tuple[bool, str, str]:
        forget()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            there = build.available()
            assert there == build.available() == (build.why_not() is None)
        said = [f"{each.category.__name__}: {each.message}" for each in caught]
        return there, str(build.why_not()), capsys.readouterr().err + "\n".join(said)

    return answer


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    """A small library with the kernel's functions."""
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.cpp").write_text(STUB)
    command = [str(REAL), "-shared", "-fPIC", "stub.cpp", "-o", "stub.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder / "stub.so"


def compiler(folder: Path, body: str) -> None:
    """A compiler `g++` in the folder `bin`, which first notes its first argument in `calls`."""
    (folder / "bin").mkdir()
    (folder / "bin" / "g++").write_text(f'#!/bin/sh\necho "$1" >> "{folder}/calls"\n{body}\n')
    (folder / "bin" / "g++").chmod(0o755)


def working(folder: Path, stub: Path, processes: int = 1) -> None:
    """A compiler that makes the stub, once so many processes have asked for its version."""
    asked = f'$(command -p grep -c version "{folder}/calls")'
    wait = f"while [ {asked} -lt {processes} ]; do command -p sleep 0.1; done"
    copy = f'for last; do :; done; command -p cp "{stub}" "$last"'
    compiler(folder, f'case "$1" in -c) {wait}; : > tiles.o ;; -shared) {copy} ;; esac')


def compilations(folder: Path) -> int:
    return (folder / "calls").read_text().split().count("-c")


@needs_compiler
def test_builds_once_says_so_and_is_quiet_afterwards(tmp_path: Path, cache: Path, ask: Ask, stub: Path):
    working(tmp_path, stub)
    there, _, said = ask()
    assert there and said.count("compiling the CPU kernel, once") == 1 and str(cache) in said
    there, _, said = ask()
    assert there and said == "" and compilations(tmp_path) == 1
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
def test_many_processes_compile_once(tmp_path: Path, cache: Path, stub: Path):
    working(tmp_path, stub, processes=3)
    code = "from grape_pe.attention.cpu import build; print(build.available(), build.why_not())"
    command, both = [sys.executable, "-c", code], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(command, text=True, **both) for _ in range(3)]
    said = [process.communicate(timeout=300) for process in started]
    assert all(out == "True None\n" for out, _ in said), said
    assert compilations(tmp_path) == 1
    assert sum("compiling" in err for _, err in said) == 1


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "without its hash"])
def test_a_damaged_library_is_rebuilt(tmp_path: Path, cache: Path, ask: Ask, stub: Path, damage: str):
    working(tmp_path, stub)
    assert ask()[0]
    (library,) = cache.glob("*.so")
    content = library.read_bytes()
    changed = content[:4000] + bytes([content[4000] ^ 1]) + content[4001:]
    kinds = {"truncated": content[:5000], "changed": changed, "empty": b"", "without its hash": content[:-32]}
    library.unlink()  # this process has the old one mapped
    library.write_bytes(kinds[damage])
    library.chmod(0o700)
    there, _, said = ask()
    assert there and "compiling" in said and compilations(tmp_path) == 2
    assert list(cache.glob("*.so")) == [library] and library.read_bytes() == content


def test_without_a_compiler_one_warning_says_what_to_do(cache: Path, ask: Ask, monkeypatch):
    there, why, said = ask()
    assert not there and "no C++ compiler" in why and "g++" in why
    assert said.count("RuntimeWarning") == 1
    for words in ("slower", "apt install g++", "GRAPE_PE_NATIVE=0"):
        assert words in said
    assert not cache.exists()
    for off in ("0", "off"):
        monkeypatch.setenv("GRAPE_PE_NATIVE", off)
        there, why, said = ask()
        assert not there and "GRAPE_PE_NATIVE=0" in why and said == ""


def test_attend_works_and_explains_without_a_compiler(ask: Ask):
    assert not ask()[0]
    q = torch.randn(1, 2, 512, 8)
    slope = grape.build("alibi", heads=2, head_dim=8)(q, q).bias
    torch.testing.assert_close(
        grape.attend(q, q, q, bias=slope), grape.attend(q, q, q, bias=slope, impl="reference")
    )
    assert "no C++ compiler" in str(grape.attend.explain(q, q, q, bias=slope))


@pytest.mark.parametrize(
    "body, words",
    [
        ('[ "$1" = --version ] || { echo "no such header" >&2; exit 1; }', "failed: no such header"),
        ("exit 3", "g++ failed"),
        (
            'for last; do :; done; [ "$1" = --version ] || { echo junk > "$last"; : > tiles.o; }',
            "does not load",
        ),
    ],
    ids=["an error", "not even a version", "a library that does not load"],
)
def test_a_compiler_that_fails_is_the_reason(tmp_path: Path, cache: Path, ask: Ask, body: str, words: str):
    compiler(tmp_path, body)
    there, why, said = ask()
    assert not there and words in why and said.count("RuntimeWarning") == 1
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}  # nothing half-built is left


def test_a_program_that_does_not_run_is_the_reason(tmp_path: Path, ask: Ask):
    compiler(tmp_path, "")
    (tmp_path / "bin" / "g++").write_bytes(b"\0\0\0\0")
    there, why, _ = ask()
    assert not there and "did not run" in why


def test_a_folder_that_cannot_be_written_is_the_reason(tmp_path: Path, ask: Ask, monkeypatch):
    """Below a regular file nobody can make a folder, not even root."""
    compiler(tmp_path, "exit 0")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPE_PE_CACHE", str(tmp_path / "file" / "cache"))
    there, why, _ = ask()
    assert not there and "GRAPE_PE_CACHE" in why and "Not a directory" in why and "compiler" not in why


@pytest.mark.parametrize(
    "given, meant", [("~/kept", "/home/alice/kept"), ("kept", "/here/kept"), (".", "/here")]
)
def test_the_folder_is_absolute(monkeypatch, given: str, meant: str):
    """A library without a folder in its name would be searched for elsewhere."""
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    monkeypatch.setenv("GRAPE_PE_CACHE", given)
    assert folder.cache_directory() == Path(meant)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, cache: Path, ask: Ask, mode: int):
    compiler(tmp_path, "exit 0")
    cache.mkdir(parents=True)
    cache.chmod(mode)
    there, why, said = ask()
    assert not there and "writable by nobody else" in why and "GRAPE_PE_CACHE" in why
    assert "RuntimeWarning" in said and not list(cache.iterdir())


def test_a_folder_of_another_user_is_refused(tmp_path: Path, cache: Path, ask: Ask, monkeypatch):
    compiler(tmp_path, "exit 0")
    cache.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    there, why, _ = ask()
    assert not there and "must belong to the user" in why


@needs_compiler
def test_a_library_that_others_can_write_is_refused(tmp_path: Path, cache: Path, ask: Ask, stub: Path):
    working(tmp_path, stub)
    assert ask()[0]
    (library,) = cache.glob("*.so")
    library.chmod(0o722)
    there, why, _ = ask()
    assert not there and "writable by nobody else" in why


def test_other_systems_are_the_reason_without_a_warning(ask: Ask, monkeypatch):
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    there, why, said = ask()
    assert not there and "Linux only, and this is Darwin" in why and said == ""


def test_the_real_kernel_truncated_is_rebuilt(tmp_path: Path):
    """A library truncated to 20,000 bytes, once loaded, ends the process with SIGBUS."""
    if not build.available():
        pytest.skip(str(build.why_not()))
    whole = build._built(build._compiler())
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:20_000])
    (tmp_path / whole.name).chmod(0o700)
    code = (
        "import torch, grape_pe as grape\n"
        "q = torch.randn(1, 2, 70, 8)\nslope = grape.build('alibi', heads=2, head_dim=8)(q, q).bias\n"
        "print(grape.attend(q, q, q, bias=slope).isfinite().all())\n"
        "from grape_pe.attention.cpu import build\nassert build.available(), build.why_not()\n"
    )
    env = {**os.environ, "GRAPE_PE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "compiling" in done.stderr, done.stderr
    assert (tmp_path / whole.name).stat().st_size > 20_000
