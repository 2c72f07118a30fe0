"""The command line: help that fits a screen, output for scripts, exit codes, errors in one line."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from grape_pe import cli
from grape_pe.lab.errors import Diverged, LabError


def every_parser(parser: argparse.ArgumentParser, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The names and the help of a command and of all below it."""
    yield names, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from every_parser(inner, *names, name)


COMMANDS = dict(every_parser(cli.parser()))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_and_shows_an_example(names: tuple[str, ...]) -> None:
    text = COMMANDS[names]
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(rf"Examples?:\s+grape {' '.join(names)}", text), text


@pytest.mark.parametrize("names", [n for n in COMMANDS if n], ids=" ".join)
def test_examples_are_right(names: tuple[str, ...]) -> None:
    """What the help shows can be typed: every option of it exists."""
    lines = re.findall(r"^(?:Examples?:)?\s+(grape .*)$", COMMANDS[names], re.M)
    assert lines
    for line in lines:
        words = shlex.split(line.split(">")[0])[1:]
        options, left = cli.parser().parse_known_args(words)
        assert not left and callable(options.run), line


def test_help_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "Exit codes" in said and all(name in said for name, *_ in filter(None, COMMANDS))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("grape-pe ")


JSON = [
    ["model", "medium", "--json"],
    ["recipes", "--json"],
    ["train", "demo", "--print-config", "--json"],
    ["train", "paper-large", "--dry-run", "--json"],
]


@pytest.mark.parametrize("words", JSON, ids=" ".join)
def test_json_is_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("demo", "small", "paper-medium", "paper-large"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("train", "sample", "recipes", "eval"))
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=said, text=True, check=True)


@pytest.mark.parametrize("size, count", [("medium", "353,508,352"), ("large", "772,234,496")])
def test_the_papers_models_are_counted_without_memory(
    size: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["model", size]) == 0
    assert count in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, says",
    [
        (["model", "medium", "--encoding", "grap-m"], "did you mean grape-m"),
        (["train", "demo", "--encoding", "grap-m", "--dry-run"], "did you mean grape-m"),
        (["inspect", "fox[forget_bias=x]"], "forget_bias of fox must be a number, got 'x'"),
        (["atlas", "--encodings", ","], "--encodings must name at least one, separated by commas, got ','"),
        (["encodings", "rope", "fox"], "unexpected argument 'fox'"),
        (["train", "demoo", "--dry-run"], "did you mean demo"),
        (["train", "demo", "--train.lrr", "1", "--dry-run"], "did you mean --train.lr?"),
        (["bench", "nothing"], "no benchmark 'nothing'"),
        (["sample", "no/such/run"], "no/such/run"),
        (["data", "info", "no/such/data"], "no/such/data"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("grape: ") and says in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "problem, code",
    [(LabError("wrong"), 2), (ImportError("missing"), 2), (Diverged("nan"), 3), (KeyboardInterrupt(), 130)],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(problem: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_options: argparse.Namespace) -> int:
        raise problem

    monkeypatch.setattr("grape_pe.commands.model.run_model", fail)
    assert cli.main(["model", "medium"]) == code


def test_a_mistake_in_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_options: argparse.Namespace) -> int:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("grape_pe.commands.model.run_model", fail)
    with pytest.raises(ValueError, match="ours"):
        cli.main(["model", "medium"])


def test_a_reader_that_leaves_is_no_error() -> None:
    """`grape train demo --print-config | head -1`."""
    command = f"{shlex.quote(sys.executable)} -m grape_pe.cli train demo --print-config | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0
