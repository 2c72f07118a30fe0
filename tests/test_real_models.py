"""Real pretrained models, prepared by tools/real_models.py; `make test-real` runs these."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grape_pe.hf import adapt
from grape_pe.lab.evaluate.questions import DEFINED, check_questions
from grape_pe.lab.pretrained import load_pretrained
from grape_pe.models.llama2c import read_llama2c

ROOT = Path(os.environ.get("GRAPE_REAL") or Path.home() / ".cache/grape-pe/real").expanduser()
NAMES = ["rope+grape-ap", "rope+fox", "rope+grape-a-qk", "rope+alibi", "grape-m", "grape-m-basis"]
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
    "a big, red ball. She wanted to play with it, but it was too high. Lily's mom said, \"Lily, let's go to the "
    "park.\" Lily was sad and didn't know what to do."
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not ROOT.is_dir(), reason="run tools/real_models.py first"),
]


def story_ids():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "stories15M")
    ids = tokenizer.encode(STORY, add_special_tokens=False)
    assert tokenizer.decode(ids) == STORY
    return torch.tensor([[1, *ids]])


@torch.no_grad()
def test_stories15m_gives_the_same_logits_in_our_decoder_and_in_transformers():
    ours, theirs = (
        read_llama2c(ROOT / "stories15M.data"),
        AutoModelForCausalLM.from_pretrained(ROOT / "stories15M"),
    )
    ids = story_ids()
    found, expected = ours.decoder(ids), theirs(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:])
    assert 0.67 < float(loss) < 0.87  # 0.772 nats a token, on text of its own kind


@torch.no_grad()
def test_the_tables_in_the_file_are_those_of_our_rope():
    found = read_llama2c(ROOT / "stories15M.data")
    rope = found.decoder.model.encoding_of(0)
    planes = torch.tensor([1.0, 0.0]).repeat(24).expand(1, 6, found.context, 48)
    turned = rope(planes, planes).k[0, 0]  # each plane starts at (1, 0) and becomes (cos, sin)
    torch.testing.assert_close(turned[:, 0::2], found.cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(turned[:, 1::2], found.sin, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_stories15m_is_unchanged_by_adapt(name):
    model, ids = AutoModelForCausalLM.from_pretrained(ROOT / "stories15M"), story_ids()
    before = model(ids).logits
    torch.testing.assert_close(adapt(model, name)(ids).logits, before, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_smollm2_from_gguf_is_unchanged_by_adapt_and_can_be_saved(tmp_path):
    model, tokenizer = load_pretrained(ROOT / "SmolLM2-135M-Instruct.Q4_1.gguf")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    before, said = model(ids).logits, model.generate(ids, max_new_tokens=8, do_sample=False)
    adapt(model, "rope+grape-ap")
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=2e-4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(ids, max_new_tokens=8, do_sample=False), said)


def test_the_questions_of_the_seven_tasks_are_complete():
    check_questions(list(DEFINED), ROOT / "tasks")
    counts = {name: len((ROOT / "tasks" / f"{name}.jsonl").read_text().splitlines()) for name in DEFINED}
    assert counts == {
        "arc_easy": 2376, "arc_challenge": 1172, "hellaswag": 10042, "openbookqa": 500, "piqa": 1838,
        "winogrande": 1267, "sciq": 1000,
    }  # fmt: skip
