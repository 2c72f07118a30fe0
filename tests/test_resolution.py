"""The project with all its extras resolves on the machines people have, from public metadata alone.

`uv pip compile` ignores pip's configuration and local wheel folders, so a CPU build of torch on this machine
cannot hide a conflict. Only a conflict between requirements fails: a test is skipped where the index cannot
be reached, answers with an error, or lacks a package.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINS = ROOT / "constraints.txt"
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}
PYTHONS = ("3.11", "3.12", "3.13")
QUICK = {("Linux aarch64", "3.12"), ("macOS arm64", "3.13"), ("Windows", "3.11")}
MATRIX = [
    pytest.param(name, python, marks=() if (name, python) in QUICK else pytest.mark.slow)
    for name in PLATFORMS
    for python in PYTHONS
]
INDEX_GAPS = ("was not found in the", "there is no version of", "network connectivity is disabled")
NOTICE = "the resolution of the dependencies was not checked, for want of a package index"


class Conflict(Exception):
    """The requirements contradict one another."""


class NoIndex(Exception):
    """The index could not be reached, answered with an error, or lacks a package."""


def environment(cache: Path) -> dict[str, str]:
    """This environment without any setting of uv, pip or Python that could bring in other packages."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith(("UV_", "PIP_", "PYTHON"))}
    settings = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1", "UV_PYTHON_DOWNLOADS": "never"}
    settings |= {"UV_SYSTEM_CERTS": "true", "UV_CACHE_DIR": str(cache), "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    return {**kept, **settings}


def compiled(cache: Path, *arguments: str, seconds: float = 180) -> str:
    """What `uv pip compile` finds; raises Conflict or NoIndex."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--python", sys.executable, "--no-config"]
    command += ["--quiet", "--no-header", "--no-annotate", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        raise NoIndex(f"no answer within {seconds} s") from late
    if done.returncode == 0:
        return done.stdout
    if "No solution found" in done.stderr and not any(gap in done.stderr for gap in INDEX_GAPS):
        raise Conflict(done.stderr)
    raise NoIndex(done.stderr)


def resolve(cache: Path, *options: str, pins: Path = PINS) -> str:
    """The pinned requirements of the project with all extras; raises Conflict or NoIndex."""
    return compiled(cache, "pyproject.toml", "--all-extras", "-c", str(pins), *options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """uv's cache for this module; skips its tests at once where there is no index."""
    directory = tmp_path_factory.mktemp("uv")
    (directory / "one.txt").write_text("filelock\n")
    try:
        compiled(directory, str(directory / "one.txt"), seconds=60)
    except NoIndex as problem:
        pytest.skip(f"{NOTICE}: {str(problem).strip()[-300:]}")
    return directory


def resolve_or_skip(cache: Path, *options: str, pins: Path = PINS) -> str:
    try:
        return resolve(cache, *options, pins=pins)
    except NoIndex as problem:
        pytest.skip(f"{NOTICE}: {str(problem).strip()[-300:]}")


def test_resolves_for_every_platform_and_python(cache: Path):
    found = resolve_or_skip(cache, "--universal", "--python-version", PYTHONS[0])
    assert "torch==2.13.0" in found and "triton==3.7.1" in found


@pytest.mark.parametrize("name, python", MATRIX)
def test_resolves_with_wheels_of_the_platform(cache: Path, name: str, python: str):
    """Unlike the universal resolution, this also asks for wheels that the platform can install."""
    found = resolve_or_skip(cache, "--python-platform", PLATFORMS[name], "--python-version", python)
    assert "torch==2.13.0" in found and ("triton" in found) == name.startswith("Linux")


def test_a_triton_of_another_torch_is_a_conflict(cache: Path, tmp_path: Path):
    """torch 2.13.0 from the public index requires triton 3.7.1: a pin of 3.9.0 cannot be installed there."""
    pins = tmp_path / "pins.txt"
    pins.write_text(PINS.read_text().replace("triton==3.7.1", "triton==3.9.0"))
    assert "triton==3.9.0" in pins.read_text()
    with pytest.raises(Conflict, match="triton"):
        resolve_or_skip(cache, "--universal", "--python-version", PYTHONS[0], pins=pins)


@pytest.fixture
def answers_with() -> Iterator[list[int]]:
    """A local index; the last item of the list is the status that it answers with, the first its port."""
    status: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status[-1])

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        status.append(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield status
        server.shutdown()


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_an_index_that_answers_with_an_error_is_no_conflict(
    tmp_path: Path, answers_with: list[int], status: int, monkeypatch
):
    answers_with.append(status)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(NoIndex):
        resolve(tmp_path, "--universal", "--default-index", f"http://127.0.0.1:{answers_with[0]}/simple")


def test_an_index_that_cannot_be_reached_is_no_conflict(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(NoIndex):
        resolve(tmp_path, "--universal", "--default-index", "http://127.0.0.1:9/simple")
    with pytest.raises(NoIndex):
        resolve(tmp_path, "--universal", "--offline")
