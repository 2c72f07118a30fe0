"""Stored verdicts on the Triton kernels, with a fake device whose check passes, fails, hangs and crashes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from grape_pe.attention import attend, folder
from grape_pe.attention.gpu import api, check, store, verdict
from grape_pe.attention.gpu.store import Device, release
from grape_pe.attention.gpu.verdict import Verdict

GPU = Device("Fake GPU", (9, 0), "555.42")
GOOD = Verdict(None, {"out": {"error": 1e-7, "dense": 1e-7, "allowed": 1e-5}})
BAD = Verdict("wrong numbers in d_q: relative error 3.0e-01, allowed 1.0e-05")
Q = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
CASE = verdict.Case("bfloat16", 64, 64, "slope", ("causal",))
REPORT = (
    "import json, os, sys; given = json.loads(sys.argv[1]); "
    "open(os.environ['GRAPE_PE_CACHE'] + '/runs', 'a').write(given['bias'] + '\\n'); "
)


def answers(result: Verdict) -> str:
    """A child that counts its runs and prints `result`."""
    return REPORT + f"print('noise'); print({json.dumps(asdict(result))!r})"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake device, a cache folder of its own, nothing known yet."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GRAPE_PE_CACHE", str(tmp_path))
    monkeypatch.delenv("GRAPE_TRITON", raising=False)
    monkeypatch.setattr(verdict, "describe", lambda device: GPU)
    forget(monkeypatch)
    use(monkeypatch, "raise SystemExit('no child expected')")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would start."""
    monkeypatch.setattr(verdict, "_known", {})
    monkeypatch.setattr(verdict, "_warned", set())
    store.kept_tiles.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(verdict, "command", lambda: [sys.executable, "-S", "-c", script])


def ask(bias: str = "slope", masks: tuple[str, ...] = ("causal",), q: torch.Tensor = Q) -> str | None:
    return verdict.why_not_trusted(q, q, bias, masks)


def runs(folder: Path) -> list[str]:
    path = folder / "runs"
    return path.read_text().split() if path.exists() else []


def test_a_kernel_that_passes_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, answers(GOOD))
    assert ask() is None and ask() is None
    forget(monkeypatch)
    assert ask() is None
    assert runs(tmp_path) == ["slope"]
    assert ask("path") is None and ask(masks=("causal", "window")) is None
    assert runs(tmp_path) == ["slope", "path", "slope"]


def test_a_known_verdict_is_a_look_up(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, answers(GOOD))
    ask()
    monkeypatch.setattr(verdict, "describe", lambda device: pytest.fail("asked for the device again"))
    monkeypatch.setattr(verdict, "stored", lambda *_: pytest.fail("read the file again"))
    assert ask() is None


def test_wrong_numbers_warn_once_and_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, answers(BAD))
    with pytest.warns(UserWarning, match="wrong numbers in d_q") as caught:
        assert "wrong numbers" in (ask() or "") and "wrong numbers" in (ask() or "")
    assert len(caught) == 1
    said = str(caught[0].message)
    for part in ("Fake GPU", "bfloat16", "next implementation", "GRAPE_TRITON=off", "grape doctor --out"):
        assert part in said
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="wrong numbers"):
        assert ask() is not None
    assert runs(tmp_path) == ["slope"]


FAILURES = {
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", True),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", False),
    "garbage": ("print('{\\x00 garbage')", "no readable result", False),
    "wrong json": ("print('[1, 2]')", "no readable result", False),
    "no reason": ('print(\'{"ok": false, "reason": null}\')', "no readable result", False),
    "silent": ("pass", "no readable result", False),
    "error": ("raise SystemExit('something broke')", "something broke", False),
}


@pytest.mark.parametrize("script, says, kept", FAILURES.values(), ids=FAILURES)
def test_a_child_that_ends_badly(script: str, says: str, kept: bool, monkeypatch: pytest.MonkeyPatch):
    """Only what tells something of the kernels is stored."""
    use(monkeypatch, script)
    with pytest.warns(UserWarning, match=says):
        assert says in (ask() or "")
    assert (verdict.stored(GPU, CASE) is not None) == kept


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verdict, "command", lambda: ["/no/such/python"])
    with pytest.warns(UserWarning, match="could not start"):
        assert "could not start" in (ask() or "")
    assert verdict.stored(GPU, CASE) is None


def test_a_hang_is_ended_with_all_its_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The child and a process that it started, both of which would sleep for minutes."""
    grandchild = "import subprocess, sys; other = subprocess.Popen(['sleep', '300']); "
    script = f"{grandchild} open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid)); other.wait()"
    use(monkeypatch, script)
    monkeypatch.setattr(verdict, "LIMIT", 1.0)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="did not end within 1 seconds"):
        assert "did not end" in (ask() or "")
    assert time.monotonic() - start < 60
    found = verdict.stored(GPU, CASE)
    assert found is not None and not found.ok
    assert not alive(int((tmp_path / "pid").read_text()))


def alive(pid: int) -> bool:
    """Whether a process runs, given a moment to die; a zombie that nobody has waited for does not."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def test_triton_on_and_off_need_no_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GRAPE_TRITON", "on")
    assert ask() is None
    monkeypatch.setenv("GRAPE_TRITON", "off")
    assert ask() == "GRAPE_TRITON=off"
    monkeypatch.setenv("GRAPE_TRITON", "maybe")
    with pytest.raises(ValueError, match=r"GRAPE_TRITON must be one of check, on, off; got 'maybe'"):
        ask()
    assert runs(tmp_path) == []
    monkeypatch.setenv("GRAPE_TRITON", "")  # as if not set
    with pytest.warns(UserWarning, match="failed their check"):
        assert ask() is not None


# What is stored


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"key": 1, "value": {}}', "\x00\xff"])
def test_a_damaged_file_is_ignored_and_rewritten(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    verdict.keep(GPU, CASE, GOOD)
    (path,) = tmp_path.glob("triton-*.json")
    path.write_text(text)
    assert verdict.stored(GPU, CASE) is None
    use(monkeypatch, answers(GOOD))
    assert ask() is None
    assert runs(tmp_path) == ["slope"] and verdict.stored(GPU, CASE) is not None


def test_a_verdict_of_the_wrong_type_is_ignored(tmp_path: Path):
    verdict.keep(GPU, CASE, GOOD)
    (path,) = tmp_path.glob("triton-*.json")
    for wrong in ({"ok": True, "reason": None}, {}, {"sure": True}, [None], None):
        path.write_text(json.dumps({**json.loads(path.read_text()), "value": wrong}))
        assert verdict.stored(GPU, CASE) is None


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], tuple[Device, verdict.Case]]] = {
    "name": lambda _: (replace(GPU, name="Other GPU"), CASE),
    "capability": lambda _: (replace(GPU, capability=(8, 0)), CASE),
    "driver": lambda _: (replace(GPU, driver="600.1"), CASE),
    "dtype": lambda _: (GPU, replace(CASE, dtype="float16")),
    "head": lambda _: (GPU, replace(CASE, head_dim=128)),
    "value": lambda _: (GPU, replace(CASE, value_dim=128)),
    "bias": lambda _: (GPU, replace(CASE, bias="slope+path")),
    "masks": lambda _: (GPU, replace(CASE, masks=())),
    "torch": lambda patch: (patch.setattr(torch, "__version__", "9.9"), (GPU, CASE))[1],
    "triton": lambda patch: (patch.setattr(store, "triton_version", lambda: "9.9"), (GPU, CASE))[1],
    "source": lambda patch: (patch.setattr(store, "source_hash", lambda: "other"), (GPU, CASE))[1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_verdict_holds_for_its_key_only(change: Callable, monkeypatch: pytest.MonkeyPatch):
    verdict.keep(GPU, CASE, GOOD)
    assert verdict.stored(GPU, CASE) == GOOD
    assert verdict.stored(*change(monkeypatch)) is None


def test_a_file_under_a_false_name_is_ignored(tmp_path: Path):
    verdict.keep(GPU, CASE, GOOD)
    (path,) = tmp_path.glob("triton-*.json")
    other = replace(CASE, bias="path")
    verdict.keep(GPU, other, BAD)
    (second,) = set(tmp_path.glob("triton-*.json")) - {path}
    os.replace(path, second)
    assert verdict.stored(GPU, other) is None


@pytest.mark.parametrize("rights", [0o777, 0o720, 0o702])
def test_a_folder_others_may_write_to_is_not_used(
    rights: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    verdict.keep(GPU, CASE, BAD)
    tmp_path.chmod(rights)
    use(monkeypatch, answers(GOOD))
    assert verdict.stored(GPU, CASE) is None
    assert ask() is None and ask() is None
    assert runs(tmp_path) == ["slope"]
    assert len(list(tmp_path.glob("triton-*"))) == 1
    tmp_path.chmod(0o700)


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch):
    verdict.keep(GPU, CASE, GOOD)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert verdict.stored(GPU, CASE) is None and not store.write("triton", {}, 1)


def test_without_a_home_directory_nothing_is_stored(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(folder, "cache_directory", no_home)
    assert verdict.stored(GPU, CASE) is None and not store.write("triton", {}, 1)


def test_head_sizes_are_padded_as_the_kernels_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    sizes = {0: 16, 1: 16, 16: 16, 17: 32, 64: 64, 65: 128, 256: 256}
    assert {size: verdict.padded(size) for size in sizes} == sizes
    use(monkeypatch, answers(GOOD))
    assert ask() is None
    assert ask(q=Q[..., :40]) is None  # 40 features are padded to 64 as well
    assert runs(tmp_path) == ["slope"]


# Many at once


def test_processes_that_start_together_check_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two that ask while a third holds the lock: the first to get it checks, the other finds the verdict."""
    from filelock import FileLock

    use(monkeypatch, answers(GOOD))
    found: list[Verdict] = []

    def one() -> None:
        found.append(verdict.check(torch.device("cpu"), CASE))

    threads = [threading.Thread(target=one) for _ in range(2)]
    with FileLock(tmp_path / "check.lock"):
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert runs(tmp_path) == []
    for thread in threads:
        thread.join(60)
    assert [each.ok for each in found] == [True, True] and runs(tmp_path) == ["slope"]


def test_a_lock_that_is_never_free_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from filelock import FileLock

    monkeypatch.setattr(verdict, "LIMIT", 0.02)
    with FileLock(tmp_path / "check.lock"):
        found = verdict.check(torch.device("cpu"), CASE)
    assert not found.ok and not found.conclusive and "another process" in (found.reason or "")


# Tracing and capture


def compiled(q: torch.Tensor) -> torch.Tensor:
    return q + 1 if verdict.why_not_trusted(q, q, "slope", ("causal",)) is None else q - 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_uses_a_stored_verdict(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch):
    verdict.keep(GPU, CASE, GOOD)
    torch._dynamo.reset()
    step = torch.compile(compiled, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(step(Q), Q + 1)


def test_torch_compile_runs_no_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, answers(GOOD))
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="not yet checked") as caught:
        assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(Q), Q - 1)
    assert len(caught) == 1 and runs(tmp_path) == []
    assert ask() is None and runs(tmp_path) == ["slope"]  # a call that is not traced may check
    torch._dynamo.reset()
    assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(Q), Q + 1)


def test_graph_capture_runs_no_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, answers(GOOD))
    monkeypatch.setattr(verdict, "_capturing", lambda device: True)
    with pytest.warns(UserWarning, match="CUDA graph"):
        assert "not yet checked" in (ask() or "")
    assert runs(tmp_path) == []
    verdict.keep(GPU, CASE, GOOD)
    assert ask() is None


def test_release():
    assert [release(v) for v in ("3.7.1+git", "2.13.0a0", "x")] == [(3, 7, 1), (2, 13, 0), ()]


# What the child runs


def problem(**changes: object) -> check.Problem:
    given = {"impl": "reference", "device": "cpu", "dtype": "float32", "head_dim": 16, "value_dim": 24}
    return check.Problem(**(given | {"bias": "slope+path+distance", "tokens": 40} | changes))


ALL_MASKS = ("causal", "documents", "padding", "window")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dense_computation_passes_its_own_check(dtype: str):
    found = check.check(problem(dtype=dtype, masks=ALL_MASKS))
    assert found.ok, found.reason
    names = {"out", "d_q", "d_k", "d_v", "d_c_q", "d_c_k", "d_rate_q", "d_rate_k"}
    assert set(found.errors) == names | {
        "d_probe_q",
        "d_probe_k",
        "d_rate",
        "d_table",
        "d_mix",
        "out[1]",
        "out[3]",
    }
    assert all(row["error"] == row["dense"] for row in found.errors.values())


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what the checked implementation gives, not the truth nor the dense computation."""
    original, calls = check.evaluate, iter(range(100))

    def evaluate(task: check.Problem, *rest: object) -> dict[str, torch.Tensor]:
        found = original(replace(task, impl="reference"), *rest)
        if task.impl == "spoilt":
            next(calls)
            found["d_k"] = change(found["d_k"])
        return found

    monkeypatch.setattr(check, "evaluate", evaluate)
    monkeypatch.setattr(check, "why_not", lambda *_: None)


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, lambda x: x * (1 + 3e-5))
    found = check.check(problem(impl="spoilt"))
    assert not found.ok and found.reason.startswith("wrong numbers in d_k: relative error 3.0e-05")


def test_not_a_number_is_found(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, lambda x: x * float("nan"))
    found = check.check(problem(impl="spoilt"))
    assert not found.ok and "d_k" in found.reason and found.errors["d_k"]["error"] > 1e20
    json.dumps(asdict(found), allow_nan=False)


def test_half_precision_may_have_twice_the_dense_error(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, lambda x: x * (1 + 2**-8))
    found = check.check(problem(impl="spoilt", dtype="bfloat16", bias="none"))
    row = found.errors["d_k"]
    assert row["allowed"] == 2 * row["dense"] and not found.ok


def test_results_that_change_are_found(monkeypatch: pytest.MonkeyPatch):
    numbers = iter([0.0, 1e-9, 0.0])
    spoil(monkeypatch, lambda x: x.double() + next(numbers))
    found = check.check(problem(impl="spoilt"))
    assert not found.ok and found.reason == "repeated calls differ in d_k"


def test_a_refusal_is_no_success():
    found = check.check(problem(impl="triton", dtype="float64"))
    assert not found.ok and "impl='triton'" in found.reason


def test_no_memory_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch):
    def full(_: check.Problem) -> Verdict:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(check, "check", full)
    found = check.safely(problem())
    assert not found.ok and not found.conclusive and "2 GiB" in found.reason


def test_the_child_process_itself(monkeypatch: pytest.MonkeyPatch):
    """The command line as it is, on a computation that every machine has."""
    monkeypatch.undo()
    found = verdict.run(asdict(problem()))
    assert found.ok and found.errors["out"]["error"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bias", [("float32", "slope+path"), ("float16", "distance")])
def test_the_kernels_themselves_in_the_emulator(dtype: str, bias: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from ptx.device import emulated_device

    monkeypatch.setattr(api, "why_not_device", lambda _: None)
    given = problem(impl="triton", dtype=dtype, bias=bias, masks=("causal", "documents"))
    with emulated_device() as report:
        found = check.safely(given)
    assert found.ok and not report.faults.found, found.reason


@pytest.mark.parametrize("verdict_of_check", (None, "it failed its check"))
def test_auto_asks_before_it_takes_triton(monkeypatch, verdict_of_check):
    """`auto` takes Triton only with a good verdict; by name it is taken without one."""
    asked = []

    def trusted(q, v, bias, masks):
        asked.append((bias, masks))
        return verdict_of_check

    module = sys.modules["grape_pe.attention.attend"]
    able = replace(module.IMPLEMENTATIONS["triton"], why_not=lambda *_: None)
    monkeypatch.setitem(module.IMPLEMENTATIONS, "triton", able)
    monkeypatch.setattr(module.Call, "_preference", lambda call: (["triton", "blocks"], "a fake GPU"))
    monkeypatch.setattr(module, "why_not_trusted", trusted)
    q = torch.randn(1, 2, 5, 4)
    bias = grape.build("alibi", heads=2, head_dim=4)(q, q).bias
    told = attend.explain(q, q, q, bias=bias, window=3)
    assert told.impl == ("triton" if verdict_of_check is None else "blocks")
    assert asked[0] == ("slope", ("causal", "window"))
    assert verdict_of_check is None or told.why_not["triton"] == verdict_of_check
    assert attend.explain(q, q, q, bias=bias, impl="triton").impl == "triton"
    asked.clear()
    monkeypatch.setattr(module.Call, "_preference", lambda call: (["blocks", "triton"], "a fake GPU"))
    assert attend.explain(q, q, q, bias=bias).why_not["triton"] == "less preferred here"
    assert asked == []  # a check takes minutes, and this call does not depend on it
