"""The command line: help, sizes of the paper's models, and errors in one line."""

from __future__ import annotations

import pytest

from grape_pe import cli


@pytest.mark.parametrize("arguments", [[], ["bench"], ["eval"], ["eval", "lm"], ["model"]], ids=str)
def test_help_fits_a_screen(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) <= 40


@pytest.mark.parametrize("size, count", [("medium", "353,508,352"), ("large", "772,234,496")])
def test_the_papers_models_are_counted_without_memory(size, count, capsys):
    assert cli.main(["model", size]) == 0
    assert count in capsys.readouterr().out


def test_an_unknown_encoding_is_one_line(capsys):
    assert cli.main(["model", "medium", "--encoding", "grap-m"]) == 2
    said = capsys.readouterr().err
    assert "did you mean grape-m" in said
    assert len(said.splitlines()) == 1
