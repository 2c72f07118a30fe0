"""`grape doctor --tune`: tiles of the Triton kernels, with a fake device and, among the slow tests, in the emulator."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from grape_pe import cli
from grape_pe.attention.gpu import api, check, launch, store, tune, verdict
from grape_pe.attention.gpu import compile as gpu
from grape_pe.attention.gpu.compile import Tile, Usage
from grape_pe.attention.gpu.store import Device
from grape_pe.attention.gpu.verdict import Verdict
from grape_pe.commands.doctor import checks, machine

GPU = Device("Fake GPU", (9, 0), "555.42")
CASE = store.Case("bfloat16", 64, 64, "slope", ())
CAUSAL = replace(CASE, masks=("causal",))
COLUMNS = tune.columns()
GOOD = Verdict(None, {"out": {"error": 1e-7, "dense": 1e-7, "allowed": 1e-5}})
BAD = Verdict("wrong numbers in out")
CPU = torch.device("cpu")


def text(tile: list[int]) -> str:
    return " ".join(map(str, tile))


def times(*seconds: float) -> dict[str, dict[str, float]]:
    """Times by kernel and tile, one number for each column."""
    found: dict[str, dict[str, float]] = {}
    for column, second in zip(COLUMNS, seconds, strict=True):
        for kernel, tile in column.items():
            found.setdefault(kernel, {}).setdefault(text(tile), second)
    return found


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake device, and a cache folder of its own."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GRAPE_PE_CACHE", str(tmp_path))
    for module in (verdict, tune, launch):
        monkeypatch.setattr(module, "describe", lambda device: GPU)
    monkeypatch.setattr(launch, "forced", None)
    monkeypatch.setattr(gpu, "_chosen", {})
    store.kept_tiles.cache_clear()
    yield
    store.kept_tiles.cache_clear()


def children(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    """Replace child processes by `answer(description)`; the descriptions they were given."""
    given: list[dict[str, Any]] = []

    def run(description: dict[str, Any]) -> Verdict:
        given.append(description)
        return answer(description)

    monkeypatch.setattr(verdict, "run", run)
    return given


def tuned(device: str = "cuda") -> Verdict:
    return tune.tune(torch.device(device), CASE)


def test_the_fastest_tile_is_kept(monkeypatch: pytest.MonkeyPatch):
    found = times(3.0, 1.0, 2.0, 4.0)
    given = children(monkeypatch, lambda d: replace(GOOD, times=found) if "columns" in d else GOOD)
    result = tuned()
    assert result.reason is None and result.tiles == COLUMNS[1]
    assert store.kept_tiles(GPU, CAUSAL) == COLUMNS[1]
    assert [d.get("tiles") for d in given] == [None, COLUMNS[1]]
    assert given[0]["columns"] == COLUMNS and given[0]["tokens"] == tune.TOKENS
    assert verdict.stored(GPU, CAUSAL) == GOOD  # the check of the kept tiles is the verdict on them


def test_kernels_are_tuned_apart(monkeypatch: pytest.MonkeyPatch):
    found = times(1.0, 2.0, 3.0, 4.0)
    found["key_kernel"] = times(4.0, 3.0, 2.0, 1.0)["key_kernel"]
    children(monkeypatch, lambda d: replace(GOOD, times=found))
    kept = tuned().tiles
    assert kept["forward_kernel"] == COLUMNS[0]["forward_kernel"]
    assert kept["key_kernel"] == COLUMNS[3]["key_kernel"]


def test_a_tile_that_was_never_launched_is_never_kept(monkeypatch: pytest.MonkeyPatch):
    """A tile that does not fit has no time."""
    found = {kernel: {text(COLUMNS[2][kernel]): 1.0} for kernel in COLUMNS[2]}
    children(monkeypatch, lambda d: replace(GOOD, times=found))
    assert tuned().tiles == COLUMNS[2]


FAILURES = {
    "timing crashes": (
        lambda d: replace(BAD, reason="it ended with SIGSEGV") if "columns" in d else GOOD,
        "could not be timed: it ended with SIGSEGV",
    ),
    "the fastest fail": (
        lambda d: replace(GOOD, times=times(1.0, 2.0, 3.0, 4.0)) if "columns" in d else BAD,
        "the fastest tiles failed their check: wrong numbers in out",
    ),
}


@pytest.mark.parametrize("answer, reason", FAILURES.values(), ids=FAILURES)
def test_nothing_is_kept_after_a_failure(answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    children(monkeypatch, answer)
    found = tuned()
    assert reason in (found.reason or "") and found.tiles == {}
    assert list(tmp_path.glob("tiles-*")) == [] and store.kept_tiles(GPU, CASE) == {}


def test_a_folder_others_may_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    children(monkeypatch, lambda d: replace(GOOD, times=times(1.0, 2.0, 3.0, 4.0)))
    tmp_path.chmod(0o777)
    assert "cache folder cannot be used" in (tuned().reason or "")
    tmp_path.chmod(0o700)
    assert store.keep_tiles(GPU, CASE, COLUMNS[0]) and store.kept_tiles(GPU, CASE) == COLUMNS[0]
    tmp_path.chmod(0o770)
    store.kept_tiles.cache_clear()
    assert store.kept_tiles(GPU, CASE) == {}
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("value", ["", "{", "[]", "null", '{"key_kernel": 3}', '{"key_kernel": ["a"]}'])
def test_a_damaged_file_is_ignored(value: str, tmp_path: Path):
    store.keep_tiles(GPU, CASE, COLUMNS[0])
    (path,) = tmp_path.glob("tiles-*.json")
    for written in (value, json.dumps({**json.loads(path.read_text()), "value": value})):
        path.write_text(written)
        store.kept_tiles.cache_clear()
        assert store.kept_tiles(GPU, CASE) == {}


def test_tiles_hold_for_their_key_only(monkeypatch: pytest.MonkeyPatch):
    store.keep_tiles(GPU, CASE, COLUMNS[0])
    assert store.kept_tiles(GPU, replace(CASE, masks=("window",))) == COLUMNS[0]  # masks do not matter
    for device, case in (
        (replace(GPU, driver="600.1"), CASE),
        (replace(GPU, name="Other"), CASE),
        (GPU, replace(CASE, dtype="float16")),
        (GPU, replace(CASE, head_dim=128)),
        (GPU, replace(CASE, bias="path")),
    ):
        assert store.kept_tiles(device, case) == {}
    for name in ("triton_version", "source_hash"):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, lambda: "other")
            store.kept_tiles.cache_clear()
            assert store.kept_tiles(GPU, CASE) == {}


def test_a_verdict_holds_for_the_tiles_that_were_checked(monkeypatch: pytest.MonkeyPatch):
    windowed = replace(CASE, masks=("causal", "window"))
    verdict.keep(GPU, windowed, GOOD)
    assert verdict.stored(GPU, windowed) == GOOD
    store.keep_tiles(GPU, CASE, COLUMNS[1])
    assert verdict.stored(GPU, windowed) is None
    given = children(monkeypatch, lambda d: GOOD)
    verdict.check(torch.device("cpu"), windowed)
    assert given[0]["tiles"] == COLUMNS[1]  # what this process will use, whatever is kept meanwhile


# The launcher


def plan(device: str = "cuda") -> launch.Plan:
    """A plan that is never launched."""
    q = torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16)
    problem = launch.AttentionProblem(q, q, q)
    made = launch.Plan.of(problem)

    class Cuda:
        """q with another device."""

        shape, dtype, element_size = q.shape, q.dtype, q.element_size
        device = torch.device("cuda", 0)

    return replace(made, problem=replace(problem, q=Cuda())) if device == "cuda" else made


def test_the_launcher_takes_what_is_kept(monkeypatch: pytest.MonkeyPatch):
    none = replace(CASE, bias="none")
    assert plan().tuned("key_kernel") is None
    store.keep_tiles(GPU, none, COLUMNS[3])
    assert plan().tuned("key_kernel") == Tile(*COLUMNS[3]["key_kernel"])
    assert plan("cpu").tuned("key_kernel") is None
    store.keep_tiles(GPU, none, {"key_kernel": [1024, 1024, 32, 9]})
    assert plan().tuned("key_kernel") is None  # not a candidate
    monkeypatch.setattr(launch, "forced", {})
    store.keep_tiles(GPU, none, COLUMNS[3])
    assert plan().tuned("key_kernel") is None


def usages(monkeypatch: pytest.MonkeyPatch, by_tile: dict[Tile, Usage]) -> None:
    monkeypatch.setattr(gpu, "compiled", lambda step, arch: step.tile)
    monkeypatch.setattr(Usage, "of", classmethod(lambda cls, tile: by_tile[tile]))


def test_a_tuned_tile_comes_first_unless_it_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    large, small = Tile(128, 64, 8, 3), Tile(64, 16, 4, 1)
    fits, spills = Usage(100, 0, 1024, 0, False), Usage(255, 80, 1024, 0, False)

    def chosen(wanted: Tile | None) -> Tile:
        gpu.forget_choices()
        make = lambda tile: gpu.Launch(None, (1,), {}, tile, CPU)  # noqa: E731
        return gpu.fitting(make, (large, small), 80, "key", lambda: wanted).tile

    usages(monkeypatch, {large: fits, small: spills})
    assert chosen(None) == large and chosen(small) == small
    usages(monkeypatch, {large: fits, small: Usage(255, 0, 10**9, 0, False)})
    assert chosen(small) == large
    usages(monkeypatch, {large: fits, small: Usage(255, 0, 0, 0, True)})
    assert chosen(small) == large


# Times


def test_times_are_medians_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch):
    """A fake call launches each kernel once, with the tile that is forced; a slow round does not count."""
    now, order = [0.0], []

    class Kernel:
        def __init__(self, name: str):
            self.__name__ = name

    def start(step: gpu.Launch) -> None:
        slow = 100.0 if len(order) == 12 else 0.0  # one slow launch
        order.append(step.tile)
        now[0] += step.tile.keys + slow

    def evaluate(*_: Any) -> None:
        for name in ("forward_kernel", "forward_kernel", "delta_kernel"):
            forced = launch.forced or {}
            tile = Tile(*forced.get(name, [64, 64, 4, 1]))
            gpu.start(gpu.Launch(Kernel(name), (1,), {}, tile, CPU))

    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr(check, "evaluate", evaluate)
    monkeypatch.setattr(check, "inputs", lambda problem: {})
    monkeypatch.setattr(tune.time, "perf_counter", lambda: now[0])
    problem = check.Problem("triton", "cpu", "bfloat16", 64, 64, "slope")
    found = tune.measured(problem, COLUMNS[:2])
    want = {text(column["forward_kernel"]): 2.0 * column["forward_kernel"][1] for column in COLUMNS[:2]}
    assert found.ok and found.times == {"forward_kernel": want}
    first, second = (Tile(*column["forward_kernel"]) for column in COLUMNS[:2])
    tiles_run = [tile for tile in order if tile != Tile(64, 64, 4, 1)]
    assert tiles_run == ([first] * 4 + [second] * 4) * tune.ROUNDS
    assert gpu.start is start


def test_the_child_forces_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "check", lambda problem: replace(GOOD, reason=str(launch.forced)))
    problem = check.Problem("triton", "cpu", "bfloat16", 64, 64, "slope")
    assert check.safely(problem, COLUMNS[2]).reason == str(COLUMNS[2])


@pytest.mark.slow
def test_tiles_are_timed_in_the_emulator(monkeypatch: pytest.MonkeyPatch):
    """The child's side with the real kernels: every tile that fits is launched, and its check passes."""
    from ptx.device import emulated_device

    monkeypatch.setattr(api, "why_not_device", lambda *_: None)
    monkeypatch.setattr(tune, "ROUNDS", 1)
    problem = check.Problem("triton", "cpu", "bfloat16", 64, 64, "slope", tokens=70)
    with emulated_device() as report:
        found = check.safely(problem, columns=COLUMNS[2:])
        passed = check.safely(problem, COLUMNS[3])
    assert found.ok and passed.ok, (found.reason, passed.reason)
    assert set(found.times) == set(launch.TILES) and not report.faults.found
    assert set(found.times["key_kernel"]) == {text(column["key_kernel"]) for column in COLUMNS[2:]}


# The command


ROW = checks.Row("cpu", "float32", 64, ("causal",), "slope", "cpu", "passed")


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], devices: list[str]):
    monkeypatch.setattr(checks, "rows", lambda *_: iter([ROW]))
    monkeypatch.setattr(checks, "devices", lambda: ["cpu", *devices])
    code = cli.main(["doctor", "--quick", "--tune"])
    return code, capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code, said = doctor(monkeypatch, capsys, [])
    assert code == 0 and "No GPU: there is nothing to time." in said


def test_the_report_shows_every_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    shown = [{"name": "Fake GPU", "capability": "9.0", "driver": "555.42", "memory_gib": 80.0,
              "multiprocessors": 132, "shared_memory_kib": 228}]  # fmt: skip
    monkeypatch.setattr(machine, "gpus", lambda: shown)
    monkeypatch.setattr(checks, "why_not_device", lambda *_: None)
    found = Verdict(None, times=times(0.003, 0.001, 0.002, 0.004), tiles=COLUMNS[1])
    monkeypatch.setattr(tune, "tune", lambda *_: found)
    code, said = doctor(monkeypatch, capsys, ["cuda:0"])
    assert code == 0 and "cuda:0, bfloat16, heads of 64, bias slope" in said
    assert "forward_kernel 128x64/8/3 3.000   128x32/8/3 1.000*   128x16/8/2 2.000   64x16/4/1 4.000" in said
    monkeypatch.setattr(tune, "tune", lambda *_: Verdict("the tiles could not be timed: /x/y broke"))
    code, said = doctor(monkeypatch, capsys, ["cuda:0"])
    assert code == 1 and "nothing kept. the tiles could not be timed: <path> broke" in said
    monkeypatch.setattr(checks, "why_not_device", lambda *_: "triton is not installed")
    code, said = doctor(monkeypatch, capsys, ["cuda:0"])
    assert code == 0 and "nothing kept. triton is not installed" in said


def test_a_real_child_times_nothing_it_cannot_run():
    """On a machine without a GPU the child refuses, and nothing is kept."""
    problem = check.Problem("triton", "cpu", "bfloat16", 64, 64, "slope", tokens=40)
    found = verdict.run({**asdict(problem), "columns": COLUMNS[:1]})
    assert not found.ok and "impl='triton'" in (found.reason or "")
