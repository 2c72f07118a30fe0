"""A short run of the streaming fuzzer, and that it notices a cache that loses something."""

from __future__ import annotations

import pytest
import torch

import grape_pe as grape
from grape_pe.attention import decode
from grape_pe.cache.static import StaticLayout
from grape_pe.cache.table import TokenTable
from grape_pe.testing.fuzz import run
from grape_pe.testing.fuzz.streaming import check


def test_random_schedules():
    summary = run(check, cases=250, seed=0)
    assert not summary.failures, next(iter(summary.failures.values()))
    assert summary.runs > 500, summary


def fails(cases: int) -> bool:
    return bool(run(check, cases=cases, seed=0).failures)


def test_a_lost_state_is_noticed(monkeypatch):
    monkeypatch.setattr(grape.StreamingCache, "_state", lambda self, carried: None)
    assert fails(60)


def test_a_lost_neighbour_is_noticed(monkeypatch):
    monkeypatch.setattr(grape.StreamingCache, "_shift_state", lambda self: None)
    assert fails(60)


def test_padding_left_in_place_is_noticed(monkeypatch):
    monkeypatch.setattr(
        TokenTable, "cut", lambda self, counts, trim=False: setattr(self, "length", self.length - min(counts))
    )
    assert fails(60)


@pytest.mark.parametrize("name", ["hidden"])
def test_a_visible_empty_slot_is_noticed(monkeypatch, name):
    monkeypatch.setattr(TokenTable, name, lambda self, last=None: None)
    assert fails(60)


def test_a_skipped_key_is_noticed(monkeypatch):
    right = decode.compiled.attend_rows

    def greedy(*given):  # as if all keys were zero and a thousandth of a nat were much
        *rest, _, bound = given
        return right(*rest, 1e-3, None if bound is None else 0 * bound)

    monkeypatch.setattr(decode.compiled, "attend_rows", greedy)
    assert fails(60)


def test_a_static_cache_that_shows_too_much_is_noticed(monkeypatch):
    right = StaticLayout.visible
    monkeypatch.setattr(StaticLayout, "visible", lambda self, *limits: torch.ones_like(right(self, *limits)))
    assert fails(60)
