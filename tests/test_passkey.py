"""Passkey texts: their length, where the number is, and that a model is scored by its own predictions."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from grape_pe.cli import main
from grape_pe.lab.evaluate.passkey import _text, mean_of, passkey_scores, passkey_table
from grape_pe.lab.evaluate.questions import EvaluationError

BEGIN = 300


class Bytes:
    """Bytes as tokens, and one at the beginning."""

    def encode(self, text, add_special_tokens=True):
        return [BEGIN] * add_special_tokens + list(text.encode())


class Copies:
    """A model that reads the number after its announcement, if that lies within `sight` tokens."""

    device = torch.device("cpu")

    def __init__(self, sight):
        self.sight = sight

    def __call__(self, input_ids, logits_to_keep, use_cache):
        row = input_ids[0].tolist()
        start = len(row) - logits_to_keep + 1
        mark = list(b" The pass key is")
        place = next(i for i in range(len(row)) if row[i : i + len(mark)] == mark) + len(mark)
        logits = torch.zeros(1, logits_to_keep, 301)
        if start - place <= self.sight:
            for i in range(logits_to_keep):
                logits[0, i, row[place + i]] = 9.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_texts_have_the_length_and_the_number_at_its_depth(depth):
    ids, secret = _text(Bytes(), 400, depth, (0, 3))
    text = bytes(i for i in ids if i != BEGIN).decode()
    assert len(ids) == 401 and ids[0] == BEGIN and ids[-len(secret) :] == secret
    number = bytes(secret).decode()
    assert text.count(f"The pass key is{number}") == 2 and text.endswith(f"The pass key is{number}")
    room = 401 - 1 - len(" The pass key is") - len(". Remember it.") - 2 * len(number)
    room -= len(" What is the pass key? The pass key is")
    assert text.index(" The pass key is") == round(depth * room)


def test_a_model_that_sees_the_number_answers_and_one_that_does_not_does_not():
    found = passkey_scores(Copies(250), Bytes(), [200, 600], cases=2)
    by = {(score.length, score.depth): score.exact for score in found}
    assert all(by[200, depth] == 1.0 for depth in (0.0, 0.5, 1.0))
    assert by[600, 0.0] == 0.0 and by[600, 1.0] == 1.0
    assert mean_of([s for s in found if s.length == 200])[0] == 1.0
    assert "100.0 ± 0.0" in passkey_table(found)
    different = {tuple(_text(Bytes(), 400, 0.5, (0, case))[1]) for case in range(4)}
    assert len(different) == 4


def test_other_numbers_are_announced_too():
    ids, secret = _text(Bytes(), 600, 0.5, (0, 1), 4)
    text = bytes(i for i in ids if i != BEGIN).decode()
    assert len(ids) == 601 and text.endswith(bytes(secret).decode())
    others = re.findall(r" The pass key of (\w+) is (\d{5})\. Remember it\.", text)
    assert [name for name, _ in others] == ["Anna", "Boris", "Clara", "David"]
    assert len({number for _, number in others} | {bytes(secret).decode().strip()}) == 5
    found = passkey_scores(Copies(900), Bytes(), [600], cases=1, others=4)
    assert all(score.exact == 1.0 for score in found)
    with pytest.raises(EvaluationError, match="others must be from 0 to 9"):
        passkey_scores(Copies(9), Bytes(), [600], others=10)


def test_a_text_without_room_is_refused():
    with pytest.raises(EvaluationError, match=r"need at least .* tokens, got 40"):
        passkey_scores(Copies(9), Bytes(), [40])


def test_the_command_scores_an_adapted_model(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    from grape_pe.hf import adapt
    from grape_pe.lab.data.tokenizer import build_tokenizer

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512,
    ))  # fmt: skip
    adapt(model, "rope+fox").save_pretrained(tmp_path)
    build_tokenizer("bytes", []).save(tmp_path)
    given = ["eval", "passkey", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer"), "--lengths", "160"]
    assert main([*given, "--cases", "1", "--output", str(tmp_path / "found.json")]) == 0
    assert "depth 0.25" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 5 and all(score["nats"] > 4 for score in found)
    assert main([*given[:-1], "1k"]) == 2
    assert "--lengths" in capsys.readouterr().err
