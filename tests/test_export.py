"""Moving out: stock transformers loads the directory without this package and gives the same logits."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from grape_pe.hf import GrapeConfig, GrapeForCausalLM, adapt, export, new_parameters
from grape_pe.models import Decoder

V = 61
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def stirred(model):
    """Away from the start: weights that make positions matter, frequencies a few dozen percent off."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((6.0 if name.endswith("delta") else 0.3) * torch.randn_like(parameter))
    return model.eval()


def small(encoding="grape-m", **options):
    torch.manual_seed(0)
    options = {"shared_encoding": True, "qk_norm": False, **options}
    return stirred(GrapeForCausalLM(GrapeConfig(**SIZES, encoding=encoding, **options)))


def tokens():
    return torch.randint(1, V, (2, 24), generator=torch.Generator().manual_seed(1))


CASES = {
    "grape-m": {},
    "rope": {"encoding": "rope", "shared_encoding": False},
    "interleaved": {"encoding_options": {"layout": "interleaved"}},
    "qk-norm": {"qk_norm": True},
    "qk-norm-interleaved": {"qk_norm": True, "encoding_options": {"layout": "interleaved"}},
    "basis": {"encoding": "grape-m-basis"},
    "basis-per-head": {"encoding": "grape-m-basis", "encoding_options": {"basis_per_head": True}},
    "unitary": {"encoding": "grape-m-basis", "encoding_options": {"basis": "unitary"}},
    "cayley": {"encoding": "string-cayley"},
    "basis-interleaved": {"encoding": "grape-m-basis", "encoding_options": {"layout": "interleaved"}},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(case, tmp_path):
    model, ids = small(**CASES[case]), tokens()
    export(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is (Qwen3ForCausalLM if model.config.qk_norm else LlamaForCausalLM)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    if case != "rope":  # negative control: the learned spectrum is what makes them equal
        plain = type(stock.config).from_pretrained(
            tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
        wrong = AutoModelForCausalLM.from_pretrained(tmp_path, config=plain)
        with torch.no_grad():
            assert (wrong(ids).logits - model(ids).logits).abs().max() > 1e-2


def test_plain_decoder(tmp_path):
    model = small(qk_norm=True)
    plain = Decoder(model.config.to_decoder()).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    export(plain, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(stock(tokens()).logits, plain(tokens()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_adapted_models_go_home(kind, tmp_path):
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 48}
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if kind == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
    )
    model = stirred(adapt(stirred(model), "grape-m", shared=True))
    assert len(new_parameters(model)) == 1
    export(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        want = stock(tokens()).logits
        torch.testing.assert_close(want, model(tokens()).logits, rtol=1e-4, atol=1e-4)
        back = adapt(stock, "rope+fox")  # its longrope has one spectrum, so it can be adapted again
        torch.testing.assert_close(back(tokens()).logits, want, rtol=1e-4, atol=1e-4)


def test_loads_without_this_package(tmp_path):
    export(small(), tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    code = (
        "import sys; sys.modules['grape_pe'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(type(m).__name__)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == "LlamaForCausalLM", done.stderr


@pytest.mark.parametrize(
    "options, says",
    [
        ({"encoding": "grape-m", "shared_encoding": False}, "same frequencies in all layers"),
        ({"encoding_options": {"per_head": True}}, "same frequencies in all layers"),
        ({"encoding": "rope+fox"}, "only rope, grape-m and grape-m-basis"),
        ({"encoding": "grape-ap"}, "only rope, grape-m and grape-m-basis"),
        ({"encoding": "grape-m-ctx"}, "no stock form"),
        ({"encoding": "grape-m-basis", "qk_norm": True}, "exported with a QK norm"),
        (
            {"encoding": "grape-m", "encoding_options": {"rotary_heads": 1}},
            "rotary_heads=1 has no stock form",
        ),
        ({"encoding": "string-circulant"}, "rotary_dim=6 has no stock form"),
        ({"encoding": "xpos"}, "has no stock form"),
        ({"encoding": "pope"}, "has no stock form"),
        ({"qk_norm": "after"}, "no stock form"),
        ({"output_norm": True}, "output_norm=True has no stock form"),
        ({"output_gate": True}, "output_gate=True has no stock form"),
        ({"kv_shift": True}, "kv_shift=True has no stock form"),
    ],
)
def test_refused_with_the_reason_and_nothing_written(options, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        export(small(**options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stock_models_are_not_ours(tmp_path):
    with pytest.raises(TypeError, match="export takes"):
        export(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)), tmp_path)
