"""`grape bench attention`: a small run from the command line, and what it says to wrong input."""

from __future__ import annotations

import json

import pytest

from attention_cases import one_thread  # noqa: F401
from grape_pe import cli
from grape_pe.commands import bench

SMALL = ["--lengths", "96", "--small", "48", "--rounds", "2", "--heads", "2", "--width", "16"]


def test_a_small_run(tmp_path, capsys):
    out = tmp_path / "deep" / "b.json"
    arguments = ["--encodings", "alibi", "grape-ap", "--memory-length", "128", "--json", str(out)]
    assert cli.main(["bench", "attention", *SMALL, *arguments]) == 0
    shown = capsys.readouterr().out
    assert "| alibi | 96 |" in shown and "| one small call |" in shown and "| alibi | 48 |" in shown
    report = json.loads(out.read_text())
    assert report["machine"]["threads"] == 1
    rows = [(row["encoding"], row["length"]) for row in report["rows"]]
    assert rows == [(name, length) for name in ("alibi", "grape-ap") for length in (48, 96)]
    for row in report["rows"]:
        assert set(row["both"]) == {"sdpa", "pruned", "unpruned", "mask"}
        assert all(len(times) == 2 for times in row["both"].values())
        assert row["length"] == 48 or row["peak_bytes"] >= 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing"], "no benchmark 'nothing'; choose attention"),
        (["attention", "--encodings", "abili"], "unknown encoding 'abili'"),
        (["attention", "--lengths", "0"], "--lengths must be at least 1"),
        (["attention", "--rounds", "many"], "invalid int value"),
    ],
)
def test_wrong_input_gets_a_sentence(arguments, words, capsys):
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_without_the_checkout_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path / "benchmarks")
    assert cli.main(["bench", "attention"]) == 2
    assert "source checkout" in capsys.readouterr().err
