"""Every family `adapt` knows: logits unchanged, generation with a cache, saving, export, and what is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

from grape_pe.hf import adapt, export, load_adapter, new_parameters, save_adapter
from grape_pe.hf.families import ROWS
from grape_pe.testing import TOL

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 60, "bos_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "Llama": GROUPED,
    "Llama-yarn": {**GROUPED, "rope_parameters": YARN},
    "Qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": WIDE,
    "Mistral": {**GROUPED, "sliding_window": None},
    "Mistral-sliding": {**GROUPED, "sliding_window": 4, "head_dim": 16},
    "SmolLM3": {**GROUPED, "no_rope_layer_interval": 2},
    "SmolLM3-yarn": {**GROUPED, "no_rope_layer_interval": 2, "rope_parameters": YARN},
    "Olmo2": GROUPED,
    "Phi3": GROUPED,
    "Phi3-partial": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "sliding_window": 5},
    "GPTNeoX": {"rotary_pct": 0.25, "hidden_size": 64},
    "GPTNeoX-yarn": {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    "GPTNeoX-whole": {"rotary_pct": 1.0, "use_parallel_residual": False},
    "Glm": {**WIDE, "partial_rotary_factor": 0.5},
    "Gemma2": {**WIDE, "attn_logit_softcapping": None, "query_pre_attn_scalar": 16, "layer_types": SLIDING,
               "sliding_window": 4},
    "Gemma3": {**WIDE, "query_pre_attn_scalar": 16, "layer_types": SLIDING, "sliding_window": 4},
    "Gemma3-linear": {
        **WIDE, "layer_types": SLIDING, "sliding_window": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
SHARED = [case for case in CASES if not case.startswith(("SmolLM3", "Gemma3"))]


def stock(case, **options):
    """A model of random weights, in which positions matter."""
    family = next(row for row in ROWS if row.name == case.split("-")[0])
    torch.manual_seed(0)
    model = family.for_causal_lm(family.config(**{**SIZES, **CASES[case], **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch=2, length=12, seed=1):
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=TOL[torch.float32], atol=TOL[torch.float32])


def stir(model):
    """Away from the start, so that the new encoding matters."""
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return model


def greedy(model, ids, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **options
    )


def test_every_family_is_tried():
    assert {case.split("-")[0] for case in CASES} == {row.name for row in ROWS}


@pytest.mark.parametrize("case", CASES)
def test_a_family(case, tmp_path):
    """Logits as before, also padded; generation as the stock model's, with and without a cache; saved, loaded."""
    model, ids = stock(case), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        want, padded, text = (
            model(ids).logits,
            model(ids, attention_mask=mask).logits[0, 3:],
            greedy(model, ids),
        )
        assert (model(ids, position_ids=3 * torch.arange(12)[None]).logits - want).abs().max() > 1e-3
        adapt(model, "rope+fox")
        close(model(ids).logits, want)
        close(model(ids, attention_mask=mask).logits[0, 3:], padded)
        assert torch.equal(greedy(model, ids), text)
        changed = stir(model)(ids).logits
        assert (changed - want).abs().max() > 1e-3
        text = greedy(model, ids, use_cache=False)
        assert torch.equal(greedy(model, ids), text)
        assert torch.equal(greedy(model, ids, cache_implementation="static"), text)
        model.save_pretrained(tmp_path)
        back = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(back) is type(model) and torch.equal(back(ids).logits, changed)
        assert torch.equal(pickle.loads(pickle.dumps(back))(ids).logits, changed)
        hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
        close(hidden, model(ids, output_hidden_states=True).hidden_states[-1])


@pytest.mark.parametrize("case", ["SmolLM3", "GPTNeoX", "Glm", "Gemma3"])
def test_other_encodings(case, tmp_path):
    """A learned spectrum, a basis and a path; training moves the new parameters; the adapter file."""
    for name in ("grape-m-basis+alibi", "grape-m+grape-ap"):
        model, ids = stock(case), tokens()
        plain, want = copy.deepcopy(model), model(ids).logits
        adapt(model, name)
        close(model(ids).logits, want)
        model(ids, labels=ids).loss.backward()
        assert all(
            p.grad is not None for n, p in new_parameters(model).items() if "amplitude" in n or "delta" in n
        )
        path = save_adapter(stir(model), tmp_path / "a.safetensors")
        close(load_adapter(plain, path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("case", CASES)
def test_exported_again(case, tmp_path):
    """With an unchanged spectrum the configuration is the one it came from; with a learned one, longrope."""
    model, ids = stock(case), tokens()
    parameters, kind, want = copy.deepcopy(model.config.rope_parameters), type(model), model(ids).logits
    export(adapt(model, "rope"), tmp_path / "same")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    assert type(same) is kind and same.config.rope_parameters == parameters
    close(same(ids).logits, want)
    if case in SHARED:
        learned = stir(adapt(same, "grape-m", shared=True))
        export(learned, tmp_path / "learned")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "learned")
        assert again.config.rope_parameters["rope_type"] == "longrope"
        close(again(ids).logits, learned(ids).logits)


@pytest.mark.parametrize("case", ["SmolLM3", "Gemma3"])
def test_layers_that_differ_cannot_share(case, tmp_path):
    with pytest.raises(ValueError, match="shared=True needs layers with equal RoPE"):
        adapt(stock(case), "grape-m", shared=True)
    with pytest.raises(ValueError, match="same frequencies in all layers"):
        export(stir(adapt(stock(case), "grape-m")), tmp_path)


def test_what_is_refused_by_name():
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50.0.*is not supported"):
        adapt(stock("Gemma2", attn_logit_softcapping=50.0), "rope+fox")
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        adapt(stock("Gemma2", use_bidirectional_attention=True), "rope+fox")
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        adapt(stock("GPTNeoX", attention_dropout=0.1), "rope+fox")
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(ValueError, match="rope_type 'longrope' is not supported"):
        adapt(stock("Phi3", rope_parameters=long), "rope+fox")
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported"):
        adapt(
            stock("Olmo2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "grape-m",
        )
    with pytest.raises(TypeError, match="adapt takes LlamaForCausalLM"):
        adapt(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)), "rope+fox"
        )
    with pytest.raises(ValueError, match="option 'rotary_dim' is set by"):
        adapt(stock("GPTNeoX"), "rope+fox", rotary_dim=8)
