"""`grape doctor`: runs with torch alone and without a GPU, finds what is broken, and writes no names."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from grape_pe import cli
from grape_pe.attention.gpu import store, verdict
from grape_pe.attention.gpu.verdict import Verdict
from grape_pe.commands import doctor
from grape_pe.commands.doctor import checks, machine, text

TORCH_ALONE = """
import sys
for name in ("rich", "numpy", "pydantic", "yaml", "transformers", "triton", "psutil"):
    sys.modules[name] = None
from grape_pe.cli import main
sys.exit(main(sys.argv[1:]))
"""
GOOD = Verdict(None, {"out": {"error": 1e-7, "dense": 1e-7, "allowed": 1e-5}})
GPU = {
    "name": "Fake GPU", "capability": "9.0", "driver": "555.42", "memory_gib": 80.0, "multiprocessors": 132,
    "shared_memory_kib": 228,
}  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What `grape doctor --quick --out` prints and writes on this machine, with torch alone."""
    file = tmp_path_factory.mktemp("doctor") / "doctor.json"
    words = [sys.executable, "-c", TORCH_ALONE, "doctor", "--quick", "--out", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def test_a_healthy_machine(quick: tuple[str, dict[str, Any]]):
    said, report = quick
    assert report["ok"] and said.rstrip().endswith("All is well.")
    assert report["versions"]["torch"] == torch.__version__ and torch.__version__ in said
    passed = {(row["impl"], row["bias"]) for row in report["checks"] if row["status"] == "passed"}
    assert {("reference", bias) for bias in checks.BIASES} <= passed
    for row in report["checks"]:
        assert row["status"] in ("passed", "refused")
        assert (row["reason"] is None) == (row["status"] == "passed")
        if row["status"] == "passed" and row["device"] == "cpu":
            assert row["repeatable"] and row["of_allowed"] <= 1 and row["error"] < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(quick: tuple[str, dict[str, Any]]):
    said, report = quick
    assert report["gpus"] == [] and report["why_no_gpu"]
    assert "The Triton kernels were not run." in said


def test_the_file_has_no_names(quick: tuple[str, dict[str, Any]]):
    written = json.dumps(quick[1])
    for name in (str(Path.home()), sys.prefix, str(Path.cwd()), socket.gethostname()):
        assert name not in written
    assert not re.search(r"(?<![\w.])/\w", written)


def test_scrub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    said = machine.scrub(
        "alice@node7: cannot open '/home/alice/.cache/x.so': C:\\Users\\alice gone; ratio 1/2"
    )
    assert said == "<name>@<name>: cannot open '<path>': <path> gone; ratio 1/2"
    assert machine.scrub("[Errno 13] '/home/alice/my own files/x', 'b'") == "[Errno 13] '<path>', 'b'"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    """A container may run as a number that the password file does not know."""

    def unknown() -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GRAPE_PE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert machine.scrub("cannot open '/x/y'") == "cannot open '<path>'"
    assert machine.cache()["usable"] is False


def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "g++").write_bytes(b"\0\0\0\0")
    (tmp_path / "g++").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = machine.compiler()
    assert said is not None and "g++, which does not run" in said and str(tmp_path) not in said


# What is broken is found


def run_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[checks.Row]):
    monkeypatch.setattr(checks, "rows", lambda *_: iter(rows))
    monkeypatch.setattr(checks, "devices", lambda: ["cpu"])
    code = cli.main(["doctor", "--quick"])
    return code, capsys.readouterr().out


ROW = checks.Row("cpu", "float32", 64, ("causal",), "slope", "cpu", "passed")


def test_a_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    bad = checks._with_verdict(ROW, Verdict("wrong numbers in d_q", GOOD.errors))
    code, said = run_with(monkeypatch, capsys, [ROW, bad])
    assert code == 1
    assert "cpu on cpu, float32, bias slope, causal: wrong numbers in d_q" in said
    assert "All is well" not in said
    assert run_with(monkeypatch, capsys, [ROW])[0] == 0


def test_a_conflict_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(machine, "conflicts", lambda: ["torch 1.0 is installed, grape-pe needs torch>=2.13"])
    code, said = run_with(monkeypatch, capsys, [ROW])
    assert code == 1 and "CONFLICT: torch 1.0" in said


def test_a_kernel_that_does_not_build_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys):
    def fails() -> str:
        import warnings

        reason = "could not build: /usr/lib/x.h is missing"
        warnings.warn(f"there is no kernel: {reason}", stacklevel=1)
        return reason

    monkeypatch.setattr(machine.build, "why_not", fails)
    code, said = run_with(monkeypatch, capsys, [ROW])
    assert code == 1 and "could not build: <path> is missing" in said
    monkeypatch.setattr(machine.build, "why_not", lambda: "GRAPE_PE_NATIVE=0 switches it off")
    assert run_with(monkeypatch, capsys, [ROW])[0] == 0


def test_a_kernel_that_crashes_is_not_run_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "implementations", lambda: ["cpu"])
    monkeypatch.setattr(checks, "why_not", lambda *_: None)
    monkeypatch.setattr(verdict, "run", lambda description: Verdict("it ended with SIGILL"))
    monkeypatch.setattr(checks.check, "safely", lambda problem: pytest.fail("ran a kernel that crashes"))
    found = list(checks.rows("cpu", checks.plan("cpu", "quick"), lambda text: None))
    assert {(row.status, row.reason) for row in found} == {("failed", "it ended with SIGILL")}


@pytest.mark.parametrize("impl, status", [("flex", "passed"), ("triton", "failed"), ("cpu", "failed")])
def test_only_our_kernels_must_repeat_themselves(impl: str, status: str):
    row = checks.replace(ROW, impl=impl)
    found = checks._with_verdict(row, Verdict("repeated calls differ", GOOD.errors, repeatable=False))
    assert found.status == status and found.repeatable is False


def test_triton_on_a_gpu_is_checked_in_a_child(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(verdict, "check", lambda *given, **more: asked.append((*given, more)) or GOOD)
    problem = checks.Problem("triton", "cuda:1", "bfloat16", 48, 64, "path", ("window", "causal"))
    for level, again in (("quick", False), ("normal", True)):
        assert checks._verdict(problem, checks.plan("cuda:1", level)) is GOOD
        case = store.Case("bfloat16", 64, 64, "path", ("causal", "window"))
        assert asked.pop() == (torch.device("cuda:1"), case, {"again": again})


# Versions


@pytest.mark.parametrize(
    "version, wanted, good",
    [
        ("2.13.0+cpu", ">=2.13,<2.15", True),
        ("2.12.1", ">=2.13,<2.15", False),
        ("2.15.0", "<2.15,>=2.13", False),
        ("2.14.9", "<2.15,>=2.13", True),
        ("3.7.1", "==3.7.1", True),
        ("3.7.2", "==3.7.1", False),
        ("3.8.4", "~=3.8.0", True),
        ("3.9.0", "~=3.8.0", False),
        ("3.9.0", "!=3.9", False),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, good: bool):
    assert machine.satisfies(version, wanted) == good


def test_conflicts_name_both_versions(monkeypatch: pytest.MonkeyPatch):
    requires = {
        "grape-pe": ["torch<2.15,>=2.13", "transformers<6,>=5.22; extra == 'hf'"],
        "torch": ["triton==3.7.1"],
    }
    monkeypatch.setattr(machine.importlib.metadata, "requires", requires.get)
    monkeypatch.setattr(machine, "installed", {"torch": "2.11.0", "transformers": "5.30"}.get)
    monkeypatch.setattr(machine, "triton_version", lambda: "3.6.0")
    assert machine.conflicts() == [
        "torch 2.11.0 is installed, grape-pe needs torch<2.15,>=2.13",
        "triton 3.6.0 is installed, torch needs triton==3.7.1",
        "triton 3.6.0 compiles wrong gradients for Hopper GPUs; install 3.7.1 or later",
    ]


# Times, and the text


def test_time_and_memory_of_what_passed():
    what = checks.replace(checks.plan("cpu", "normal"), tokens=64)
    problem = checks.Problem("", "cpu", "float32", 16, 16, "slope", tokens=64)
    rows = [checks.replace(ROW, impl="reference"), checks.replace(ROW, impl="triton", status="refused")]
    timed, refused = checks._timed(rows, problem, what)
    assert timed.time > 0 and timed.memory > 1 and timed.megabytes > 0 and timed.tokens == 64
    assert refused.time is None


def test_peak_memory_is_the_peak():
    def run() -> None:
        for _ in range(3):
            torch.zeros(1000)
            torch.zeros(2000)

    assert checks.peak_bytes(run, "cpu") == 8000


def test_a_failure_while_timing_is_a_failure():
    def fails() -> None:
        raise RuntimeError("device-side assert in /usr/lib/x.cu")

    problem = checks.Problem("", "cpu", "float32", 16, 16, "slope", tokens=64)
    assert checks._ratios(fails, fails, problem) == {
        "status": "failed", "reason": "at 64 tokens: device-side assert in <path>",
    }  # fmt: skip


def test_gpus_are_shown(quick: tuple[str, dict[str, Any]]):
    row = checks.replace(
        ROW, device="cuda:0", impl="triton", time=0.8125, memory=1.5, error=1e-3, of_allowed=0.5
    )
    said = "\n".join(text.lines({**quick[1], "gpus": [GPU], "checks": [asdict(row)]}))
    assert "cuda:0  Fake GPU, capability 9.0, driver 555.42" in said
    assert "Attention on cuda:0, float32, heads of 64, causal" in said
    (line,) = [line for line in said.splitlines() if "triton  " in line and "slope" in line]
    assert line.split() == ["slope", "triton", "training", "passed", "1.0e-03", "50%", "-", "0.81", "1.50"]


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It is said before the checks, which take minutes."""
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail("ran the checks first"))
    assert cli.main(["doctor", "--json", "--out", "/no/such/folder/x.json"]) == 2
    assert "cannot write --out /no/such/folder/x.json" in capsys.readouterr().err
