"""Moving pretrained models in: unchanged at the start, learning afterwards, saved and generating."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grape_pe.hf import adapt, load_adapter, new_parameters, save_adapter
from grape_pe.testing import TOL

NAMES = ["grape-m", "grape-m-basis", "rope+alibi", "rope+fox", "rope+grape-a-qk", "rope+grape-a-phase",
         "rope+grape-ap", "grape-m+grape-ap+fox"]  # fmt: skip
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def pretrained(kind="llama", **options):
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **options))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **options))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch=2, length=12, seed=1):
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=TOL[torch.float32], atol=TOL[torch.float32])


def stir(model):
    """Away from the start, so that the new encoding matters."""
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_unchanged_at_the_start(kind, name):
    model, ids = pretrained(kind), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        want, padded = model(ids).logits, model(ids, attention_mask=mask).logits[0, 4:]
        adapt(model, name)
        close(model(ids).logits, want)
        close(model(ids, attention_mask=mask).logits[0, 4:], padded)
        stir(model)
        assert (model(ids).logits - want).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_the_new_parameters(kind, name):
    model, ids = pretrained(kind), tokens(4)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    adapt(model, name)
    before = {n: p.detach().clone() for n, p in new_parameters(model).items()}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(before)
    adam = torch.optim.Adam(new_parameters(model).values(), 2e-2)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1e-3
    assert all(not torch.equal(p, before[n]) for n, p in new_parameters(model).items())
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_training_everything():
    model, ids = pretrained(), tokens()
    adapt(model, "rope+grape-a-qk", train="all")
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters())
    amplitudes = [p for n, p in new_parameters(model).items() if n.endswith("amplitude")]
    assert all(p.grad.abs().max() > 0 for p in amplitudes)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["grape-m", "rope+fox", "rope+grape-ap", "grape-m+grape-a-qk"])
def test_generates_as_without_a_cache(kind, name):
    model = stir(adapt(pretrained(kind), name))
    ids = tokens(2, 7)
    modes = {
        "greedy": {}, "beam": {"num_beams": 3}, "static": {"cache_implementation": "static"},
        "bare": {"past_key_values": DynamicCache()},
    }  # fmt: skip
    for mode, options in modes.items():
        plain = {k: v for k, v in options.items() if k == "num_beams"}
        common = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        want = model.generate(ids, use_cache=False, **common, **plain)
        assert torch.equal(model.generate(ids, **common, **options), want), mode
    looked = model.generate(
        ids[:1].repeat(1, 2), prompt_lookup_num_tokens=2, max_new_tokens=6, do_sample=False
    )
    assert torch.equal(
        looked, model.generate(ids[:1].repeat(1, 2), max_new_tokens=6, do_sample=False, use_cache=False)
    )
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    got = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=6, do_sample=False)
    assert torch.equal(got[:, 3:], model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("shared", [False, True])
def test_adapter_file(shared, tmp_path):
    model, ids = pretrained("qwen3"), tokens()
    base = copy.deepcopy(model)
    stir(adapt(model, "grape-m+grape-ap", shared=shared, probe_dim=4))
    path = save_adapter(model, tmp_path / "ap.safetensors")
    load_adapter(base, path)
    with torch.no_grad():
        close(base(ids).logits, model(ids).logits)
    assert path.stat().st_size < 40_000 and [p.name for p in tmp_path.iterdir()] == ["ap.safetensors"]


def test_packed_positions():
    model = stir(adapt(pretrained(), "rope+fox"))
    parts = [tokens(1, 5), tokens(1, 4, seed=2)]
    positions = torch.tensor([[*range(5), *range(4)]])
    with torch.no_grad():
        want = torch.cat([model(p).logits for p in parts], 1)
        close(model(torch.cat(parts, 1), position_ids=positions).logits, want)


def test_gradient_checkpointing_and_bfloat16():
    model, ids = pretrained(), tokens()
    adapt(model, "rope+grape-ap")
    want = torch.autograd.grad(model(ids, labels=ids).loss, list(new_parameters(model).values()))
    model.train().gradient_checkpointing_enable()
    got = torch.autograd.grad(model(ids, labels=ids).loss, list(new_parameters(model).values()))
    for a, b in zip(got, want, strict=True):
        close(a, b)
    low = adapt(pretrained().to(torch.bfloat16), "grape-m+fox")
    assert low.model.layers[0].self_attn.encoding.parts["grape-m"].frequencies.delta.dtype == torch.float32
    assert low(ids).logits.isfinite().all()


def test_yarn_keeps_its_scaling():
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model, ids = pretrained(rope_parameters=rope), tokens()
    want = model(ids).logits
    close(adapt(model, "grape-m")(ids).logits, want)


# Bad input -------------------------------------------------------------------------------------------


def test_refusals():
    with pytest.raises(ValueError, match="unknown encoding 'foxx'"):
        adapt(pretrained(), "rope+foxx")
    with pytest.raises(ValueError, match=r"for example 'rope\+fox'"):
        adapt(pretrained(), "fox")
    with pytest.raises(TypeError, match="adapt takes LlamaForCausalLM"):
        adapt(torch.nn.Linear(2, 2), "grape-m")
    with pytest.raises(ValueError, match="already has 'grape-m'"):
        adapt(adapt(pretrained(), "grape-m"), "rope+fox")
    with pytest.raises(ValueError, match="dropout"):
        adapt(pretrained(attention_dropout=0.1), "grape-m")
    with pytest.raises(ValueError, match="has not been adapted"):
        new_parameters(pretrained())


@pytest.mark.parametrize("name", ["fox", "rope+fire", "rope+cope", "rope+dape", "rope+logn"])
def test_a_refused_model_is_untouched(name: str):
    model, ids = pretrained(), tokens()
    want = model(ids).logits
    with pytest.raises(ValueError, match=r"would change the logits|cannot be added to a pretrained model"):
        adapt(model, name)
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model(ids).logits, want)


def test_bad_adapter_files(tmp_path):
    pickle = tmp_path / "a.safetensors"
    torch.save({"x": torch.ones(2)}, pickle)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_adapter(pretrained(), pickle)
    with pytest.raises(FileNotFoundError, match="save_adapter"):
        load_adapter(pretrained(), tmp_path / "none")
    path = save_adapter(adapt(pretrained("llama"), "grape-m"), tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="adapter is for a llama model"):
        load_adapter(pretrained("qwen3"), path)
    other = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="does not fit"):
        load_adapter(other, path)


def test_lora_on_top():
    from peft import LoraConfig, get_peft_model

    model, ids = stir(adapt(pretrained(), "rope+fox")), tokens()
    want = model(ids).logits
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    close(lora(input_ids=ids).logits, want)
    lora(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None for n, p in lora.named_parameters() if "lora_B" in n)
    lora.generate(input_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize("hidden", [[6, 7], [2, 5, 9], [0, 3, 7, 8]])
@pytest.mark.parametrize("name", NAMES)
def test_padding_anywhere_changes_nothing(name, hidden):
    model, ids = stir(adapt(pretrained(), name)), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, hidden] = 0
    kept = mask[0].bool()
    with torch.no_grad():
        want = model(ids[:1, kept]).logits[0], model(ids[1:]).logits[0]
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for a, b in ((0, 8), (8, 9), (9, 12)):
            parts.append(model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits)
        for got in (whole, torch.cat(parts, 1)):
            close(got[0, kept], want[0])
            close(got[1], want[1])


def test_a_call_is_laid_out_once(monkeypatch):
    """Positions and padding are looked at by the first layer only."""
    from grape_pe.hf import adapted

    model, ids = adapt(pretrained(), "rope+fox"), tokens()
    calls, real = [], adapted.make_layout
    monkeypatch.setattr(adapted, "make_layout", lambda *args: calls.append(1) or real(*args))
    with torch.no_grad():
        cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache)
    assert len(calls) == 2
