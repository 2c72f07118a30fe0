"""Text from a trained model: a seed repeats, temperature 0 is the likeliest, transformers loads it."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")

from grape_pe.cli import main
from grape_pe.lab.data import load_tokenizer
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate.sampling import sample_tokens
from grape_pe.lab.train.saved_model import load_model, tokenizer_directory
from grape_pe.lab.train.trainer import train
from lab_runs import tiny_config, tiny_data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of forty steps, which already likes some letters more than others."""
    place = tmp_path_factory.mktemp("sampling")
    changes = {"train__steps": 40, "train__lr": 1e-2, "train__checkpoint_every": 20}
    train(tiny_config(tiny_data(place), model__encoding="grape-ap", **changes), place / "run", quiet=True)
    return place / "run"


def said(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["sample", str(run), "--prompt", "The token", "--tokens", "30", *more]) == 0
    return capsys.readouterr().out


def test_a_seed_says_the_same_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = said(run, capsys)
    assert first.startswith("The token") and first.endswith("\n")
    assert said(run, capsys) == first
    assert said(run, capsys, "--seed", "1") != first
    found = json.loads(said(run, capsys, "--json"))
    assert found["prompt"] == "The token" and first.rstrip("\n").startswith("The token" + found["text"][:10])


def test_temperature_zero_is_the_likeliest_token_of_a_full_forward(run: Path) -> None:
    model, words = load_model(run), load_tokenizer(tokenizer_directory(run))
    prompt = [words.eos, *words.encode("The token")]
    found = list(sample_tokens(model, prompt, count=40, temperature=0))
    context = list(prompt)
    for token in found:
        with torch.no_grad():
            assert token == int(model(torch.tensor([context]))[0, -1].argmax())
        context.append(token)
    assert len(found) == 40 and len(set(found)) > 1


def test_samples_follow_the_probabilities() -> None:
    """One token drawn often: its frequencies are the softmax, cut at top_p."""
    from grape_pe.lab.evaluate.sampling import _draw

    logits = torch.tensor([2.0, 1.0, 0.0, -8.0])
    dice = torch.Generator().manual_seed(0)
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        drawn = torch.tensor([_draw(logits, temperature, top_p, dice) for _ in range(1500)])
        want = (logits / temperature).softmax(-1)
        want = want * torch.tensor([1, 1, top_p == 1, top_p == 1])
        got = torch.bincount(drawn, minlength=4) / 1500
        torch.testing.assert_close(got, want / want.sum(), atol=0.05, rtol=0)


def test_it_stops_at_the_end_token(run: Path) -> None:
    model = load_model(run)
    free = list(sample_tokens(model, [5, 6], count=20, temperature=0))
    stop = free[3]
    assert list(sample_tokens(model, [5, 6], count=20, temperature=0, stop=stop)) == free[: free.index(stop)]


WRONG: list[dict] = [
    {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
    {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": math.nan},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_mistakes(wrong: dict, run: Path) -> None:
    with pytest.raises(LabError, match=f"{next(iter(wrong))}.* must be"):
        sample_tokens(load_model(run), [1], **{"count": 1, **wrong})
    with pytest.raises(LabError, match="at least one token"):
        sample_tokens(load_model(run), [], count=1)


@pytest.mark.parametrize("wrong", [("--temperature", "nan"), ("--tokens", "-5"), ("--top-p", "2")], ids=str)
def test_mistakes_on_the_command_line(wrong: tuple[str, str], run: Path, capsys) -> None:
    assert main(["sample", str(run), "--prompt", "The", *wrong]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("grape: ") and re.search(f"got '?{wrong[1]}\\b", said.err)


def test_a_run_a_checkpoint_and_the_export_are_one_model(run: Path) -> None:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        end = load_model(run)(ids)
        assert torch.equal(load_model(run / "final")(ids), end)
        assert torch.equal(load_model(run / "checkpoints/step-00000040")(ids), end)
        assert not torch.equal(load_model(run / "checkpoints/step-00000020")(ids), end)


def test_a_run_under_way_can_speak(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copy / "final")
    assert said(copy, capsys) == said(run, capsys)


def test_transformers_loads_the_end(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import grape_pe.hf  # noqa: F401  (makes the Auto classes know it)

    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    words = AutoTokenizer.from_pretrained(run / "final")
    ids = words("The token", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, load_model(run)(ids))
    assert words.decode(ids[0]) == "The token"
    assert words.eos_token_id == load_tokenizer(tokenizer_directory(run)).eos
    ours = list(sample_tokens(load_model(run), ids[0].tolist(), count=12, temperature=0))
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert theirs == ours


@pytest.mark.parametrize("harm", ["nothing there", "no weights", "half the weights", "no checkpoint"])
def test_what_is_no_model_is_told_in_a_line(
    harm: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    if harm != "nothing there":
        shutil.copytree(run, place)
    if harm == "no weights":
        (place / "final/model.safetensors").unlink()
    elif harm == "half the weights":
        weights = place / "final/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    elif harm == "no checkpoint":
        shutil.rmtree(place / "final")
        shutil.rmtree(place / "checkpoints")
    assert main(["sample", str(place)]) == 2
    told = capsys.readouterr().err
    assert str(place) in told and len(told.splitlines()) == 1
