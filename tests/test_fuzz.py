"""The fuzzers find what is wrong, and a short fixed run of the one of `attend` finds nothing."""

from __future__ import annotations

import pytest
import torch

from grape_pe.testing.fuzz import Outcome, __main__, attend, run
from grape_pe.testing.fuzz.attend import draw_case


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_attend() -> None:
    summary = run(attend.check, cases=400, seed=0)
    assert not summary.failures, next(iter(summary.failures.values()))
    assert summary.runs > 1000


def test_cases_cover_what_they_should() -> None:
    cases = [draw_case(seed) for seed in range(400)]
    assert {c.dtype for c in cases} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert {c.default_dtype for c in cases} == {torch.float64, torch.float32, torch.bfloat16}
    assert {c.autocast for c in cases} == {None, torch.bfloat16, torch.float16}
    assert {0, 1} <= {c.sizes.queries for c in cases} and {0} <= {c.sizes.keys for c in cases}
    assert 0 in {c.sizes.batch for c in cases}
    assert {layout.kind for c in cases for layout in c.layouts.values()} == set(attend.Layout.KINDS)
    assert {c.threads for c in cases} == {1, 2, 4} and {c.skips for c in cases} == {True, False}
    names = " ".join(c.raw.name for c in cases if c.raw)
    for kind in ("jump", "back", "far", "rows", "any", "-inf", "mixed", "profile"):
        assert f"{kind}]" in names or f"{kind}," in names, kind
    masks = {name for c in cases for name in c.masks}
    assert masks == {"causal", "window", "sinks", "documents", "cu_seqlens", "key_padding"}


def test_the_same_seed_is_the_same_case() -> None:
    one, other = draw_case(7), draw_case(7)
    assert str(one) == str(other)
    assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attend.attend

    class Wrong:
        explain = staticmethod(right.explain)

        def __call__(self, *args, **kwargs):
            y = right(*args, **kwargs)
            return y * 1.001 if y.dtype == torch.float32 else y

    monkeypatch.setattr(attend, "attend", Wrong())
    summary = run(attend.check, cases=20, seed=0, keep_going=True)
    assert summary.failures and "impl=" in next(iter(summary.failures.values()))


def test_command_prints_the_seed_that_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def check(seed: int) -> Outcome:
        assert seed != 12, "wrong"
        return Outcome(runs=2, refused=["too odd"])

    monkeypatch.setattr(attend, "check", check)
    assert __main__.main(["attend", "--cases", "50", "--seed", "10"]) == 1
    said = capsys.readouterr().out
    assert "fuzz attend --seed 12 --cases 1" in said and "refused 2 times: too odd" in said
    assert __main__.main(["attend", "--cases", "5", "--seed", "13"]) == 0
