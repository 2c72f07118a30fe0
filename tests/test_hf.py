"""The Hugging Face model: saving, loading, dtypes, training, tools, bad input."""

import copy
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import grape_pe as grape
from grape_pe.hf import GrapeConfig, GrapeForCausalLM
from grape_pe.hf.pretrained import full_precision_names
from grape_pe.models import Decoder, DecoderConfig, load_decoder, save_decoder
from grape_pe.testing import TOL

NAMES = [*grape.names(), "rope+fox", "grape-m+grape-ap"]
V = 61


def config(encoding="rope", **options):
    sizes = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GrapeConfig(
        **{**sizes, "num_key_value_heads": 2, "encoding": encoding, "pad_token_id": 0, **options}
    )


def small(encoding="rope", **options):
    torch.manual_seed(0)
    model = GrapeForCausalLM(config(encoding, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch=2, length=9, seed=1):
    return torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_saved_model_loads_the_same(name, tmp_path):
    model, ids = small(name, kv_shift=True), tokens()
    with torch.no_grad():
        want = model(ids).logits
        model.save_pretrained(tmp_path)
        back = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(back) is GrapeForCausalLM
        torch.testing.assert_close(back(ids).logits, want)
    assert not list(tmp_path.glob("*.bin"))
    assert back.lm_head.weight is back.model.embed_tokens.weight


@pytest.mark.parametrize("name", NAMES)
def test_same_as_the_plain_decoder(name):
    model = small(name, kv_shift=True, shared_encoding=name == "fox")
    plain = Decoder(model.config.to_decoder()).eval()
    tied = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    plain.load_state_dict(tied)
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens()), model(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_decoder_and_hf_read_each_others_files(tmp_path):
    model = small("grape-m+grape-ap", kv_shift=True)
    model.save_pretrained(tmp_path / "a")
    plain = load_decoder(tmp_path / "a").eval()
    save_decoder(plain, tmp_path / "b")
    files = ["config.json", "model.safetensors", "modeling_grape.py"]  # the last for trust_remote_code
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == files
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        want = model(tokens()).logits
        torch.testing.assert_close(plain(tokens()), want)
        torch.testing.assert_close(back(tokens()).logits, want)


def test_bad_decoder_files(tmp_path):
    save_decoder(Decoder(config().to_decoder()), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="pickles"):
        load_decoder(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing, unexpected"):
        load_decoder(tmp_path)


def test_new_models_start_as_the_decoder_does():
    torch.manual_seed(0)
    sizes = {"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4}
    model = GrapeForCausalLM(config("grape-m+grape-ap", kv_shift=True, **sizes))
    attn = model.model.layers[1].self_attn
    std = 0.5 / 256**0.5
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert attn.q_proj.weight.std().item() == pytest.approx(std, rel=0.05)
    assert attn.o_proj.weight.std().item() == pytest.approx(std / 2, rel=0.05)
    fresh = model.config.to_decoder().build_encoding()
    for key, value in fresh.state_dict().items():
        if "projection" not in key:
            assert torch.equal(attn.encoding.state_dict()[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_uninitialised(name, tmp_path):
    """from_pretrained builds on the meta device: what it fills must be what was saved, buffers too."""
    model = small(name)
    model.save_pretrained(tmp_path)
    back = GrapeForCausalLM.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    for (key, a), (_, b) in zip(model.named_buffers(), back.named_buffers(), strict=True):
        assert torch.equal(a, b), key


def test_bfloat16_keeps_islands(tmp_path):
    model = small("grape-m+grape-a-qk", kv_shift=True)
    model.save_pretrained(tmp_path)
    want = model(tokens()).logits
    for low in (GrapeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
        encoding = low.model.layers[0].self_attn.encoding
        assert low.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
        assert {t.dtype for t in encoding.state_dict().values()} == {torch.float32}
        out = low(tokens())
        assert out.logits.dtype == torch.bfloat16
        assert (out.logits.float() - want).abs().max() < 5 * TOL[torch.bfloat16]
        low.generate(tokens(), max_new_tokens=3)


def full_precision(model):
    """The tensors that stay float32 or longer, by name."""
    keys = set(full_precision_names(model))
    return {key: t for key, t in [*model.named_parameters(), *model.named_buffers()] if key in keys}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built_under(dtype, **options):
    with default_dtype(dtype):
        return GrapeForCausalLM(config(**options))


def on_meta(**options):
    """Built without memory, as FSDP users do, and then filled."""
    with torch.device("meta"):
        model = GrapeForCausalLM(config(**options))
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    model.tie_weights()
    return model


LOW, HALF, LONG = torch.bfloat16, torch.float16, torch.float64
NEW = {
    "from_config bf16": (LOW, lambda **o: AutoModelForCausalLM.from_config(config(**o), dtype=LOW)),
    "from_config fp16": (HALF, lambda **o: AutoModelForCausalLM.from_config(config(**o), dtype=HALF)),
    "default bf16": (LOW, lambda **o: built_under(LOW, **o)),
    "default fp64": (LONG, lambda **o: built_under(LONG, **o)),
    "meta": (torch.float32, on_meta),
}


#: all their parameters start as random numbers
RANDOM = ("liere", "t5", "kerple-log", "kerple-power", "relative", "dape")


@pytest.mark.parametrize("name", NAMES)
def test_new_models_have_exact_frequencies_and_slopes(name):
    """However a model is built: tensors kept in float32 start as in float32, all but random ones."""
    options = {"encoding": name, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    torch.manual_seed(1)
    first = full_precision(GrapeForCausalLM(config(**options)))
    second = full_precision(GrapeForCausalLM(config(**options)))
    fixed = [key for key in first if torch.equal(first[key], second[key])]
    assert fixed or not first or name in RANDOM
    for how, (dtype, make) in NEW.items():
        model = make(**options)
        assert model.dtype == dtype, how
        got = full_precision(model)
        assert got.keys() == first.keys() and all(t.dtype.itemsize >= 4 for t in got.values()), how
        assert all(torch.equal(got[key].float(), first[key]) for key in fixed), how
        assert all(t.isfinite().all() for t in model.parameters()), how
        assert model(tokens()).logits.dtype == dtype, how


LOADED = {
    "bf16": lambda path, model: AutoModelForCausalLM.from_pretrained(path, dtype=LOW),
    "fp16": lambda path, model: AutoModelForCausalLM.from_pretrained(path, dtype=HALF),
    "auto": lambda path, model: AutoModelForCausalLM.from_pretrained(path, dtype="auto"),
    "device_map": lambda path, model: AutoModelForCausalLM.from_pretrained(path, dtype=LOW, device_map="cpu"),
    "to": lambda path, model: copy.deepcopy(model).to(LOW),
    "half": lambda path, model: copy.deepcopy(model).half(),
    "double and back": lambda path, model: copy.deepcopy(model).double().to(LOW),
}


@pytest.mark.parametrize("name", NAMES)
def test_loaded_and_cast_models_keep_full_precision(name, tmp_path):
    model = small(name, kv_shift=True)
    model.save_pretrained(tmp_path)
    for how, make in LOADED.items():
        with default_dtype(LOW if how == "auto" else torch.float32):
            low = make(tmp_path, model)
        assert low.dtype == {"fp16": HALF, "half": HALF, "auto": torch.float32}.get(how, LOW), how
        for key, value in full_precision(model).items():
            got = low.state_dict()[key]
            assert got.dtype.itemsize >= 4 and torch.equal(got.float(), value), (how, key)
        assert low(tokens()).logits.isfinite().all(), how


def test_trainer_resumes(tmp_path):
    """Trainer reads config.json as a configuration of no particular type."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]

    def run(folder, **options):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=4, per_device_train_batch_size=4, save_steps=2,
            report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(GrapeForCausalLM(config("grape-ap")), arguments, train_dataset=data)
        trainer.train(**options)
        return trainer.model.eval()(tokens()).logits

    want = run("a")
    got = run("b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    torch.testing.assert_close(got, want)


def test_loss_logits_and_options():
    model, ids = small("grape-ap"), tokens(2, 8)
    labels = ids.clone()
    labels[0, :3] = -100
    want = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).loss, want)
    scaled = model(ids, labels=labels, num_items_in_batch=100).loss
    torch.testing.assert_close(scaled * 100, want * (labels[:, 1:] != -100).sum())
    model.train()
    assert model(ids, labels=labels).logits is None
    assert model(ids, labels=labels, return_logits=True).logits.shape == (2, 8, V)
    model.eval()
    full = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, full[:, -2:])
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, full)
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap"])
def test_attentions_and_hidden_states(name):
    model, ids = small(name), tokens()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    out = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2 and len(out.hidden_states) == 3
    rows = out.attentions[0]
    assert rows.shape == (2, 4, 9, 9)
    torch.testing.assert_close(rows[1].sum(-1), torch.ones(4, 9))
    assert rows[0, :, 2:, :2].abs().max() == 0 and rows.triu(1).abs().max() == 0
    first = model(ids[:, :5], use_cache=True)
    later = model(ids[:, 5:], past_key_values=first.past_key_values, output_attentions=True)
    want = model(ids, output_attentions=True).attentions[1][:, :, 5:]
    torch.testing.assert_close(later.attentions[1], want)


def test_gradient_checkpointing_changes_nothing():
    model, ids = small("grape-m+grape-ap", kv_shift=True).train(), tokens()
    want = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    got = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_resizing_embeddings():
    model, ids = small("fox"), tokens()
    want = model(ids).logits
    model.resize_token_embeddings(V + 3)
    got = model(ids).logits
    assert got.shape[-1] == V + 3 and model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(got[..., :V], want)


def test_remote_code_needs_only_the_package(tmp_path, monkeypatch):
    small("grape-m").save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["auto_map"]["AutoModelForCausalLM"] == "modeling_grape.GrapeForCausalLM"
    code = (
        "from transformers import AutoModelForCausalLM;"
        f"m = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True);"
        "print(type(m).__name__, m.config.encoding)"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert "GrapeForCausalLM grape-m" in done.stdout, done.stderr
    monkeypatch.setitem(sys.modules, "grape_pe.hf", None)
    with pytest.raises(ImportError, match=r"pip install 'grape-pe\[hf\]'"):
        exec((tmp_path / "modeling_grape.py").read_text(), {})


def test_missing_transformers_gives_the_command():
    code = "import sys; sys.modules['transformers'] = None\nimport grape_pe.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'grape-pe[hf]'" in done.stderr


def test_import_needs_no_transformers():
    code = "import sys, grape_pe, grape_pe.models; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_trainer_runs(tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GrapeForCausalLM(config("grape-m+grape-ap"))
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 12).repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=2e-2,
        report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, gradient_checkpointing=True,
        eval_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]


def test_lora(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model, ids = small("grape-m"), tokens()
    base = small("grape-m")
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    want = base(ids).logits
    torch.testing.assert_close(lora(ids).logits, want)
    adam = torch.optim.Adam([p for p in lora.parameters() if p.requires_grad], 1e-2)
    lora.train()
    losses = []
    for _ in range(5):
        loss = lora(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    lora.eval().save_pretrained(tmp_path)
    back = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(back(ids).logits, lora(ids).logits)
    back.generate(input_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize("name", ["rope", "grape-ap"])
def test_forward_compiles(name):
    torch._dynamo.reset()  # every case is another model in the same code
    model, ids = small(name).train(), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_what_a_checkpoint_lacks_starts_as_in_a_new_model(tmp_path):
    """The parts of an encoding that are missing are filled by its own reset, the others left as loaded."""
    model = small("grape-m+grape-a-qk")
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.self_attn.encoding.parts.grape-a-qk.strength"
    save_file({k: v for k, v in held.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    back, info = PreTrainedModel.from_pretrained.__func__(
        GrapeForCausalLM, tmp_path, output_loading_info=True
    )
    state = back.state_dict()
    assert set(info["missing_keys"]) == {gone}
    assert torch.allclose(torch.nn.functional.softplus(state[gone]), torch.ones(4, 1))
    for key, value in held.items():
        assert key == gone or torch.equal(state[key], value), key


# Bad input -------------------------------------------------------------------------------------------


def test_unknown_encoding_in_a_config(tmp_path):
    small("grape-m").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"encoding": "grape-m"', '"encoding": "grape-n"'))
    with pytest.raises(ValueError, match="unknown encoding 'grape-n'; did you mean grape-m"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_checkpoint(tmp_path):
    small().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(Exception, match=r"(?i)safetensor|header|incomplete|invalid"):
        GrapeForCausalLM.from_pretrained(tmp_path)


def test_a_foreign_checkpoint(tmp_path):
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
        )
    )
    llama.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="llama"):
        GrapeForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_with_tensors_missing(tmp_path):
    small("grape-m").save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.0.self_attn.encoding.frequencies.delta"
    save_file({k: v for k, v in held.items() if k != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors, first '.*delta'"):
        GrapeForCausalLM.from_pretrained(tmp_path)


def test_pickles_are_refused(tmp_path):
    model = small()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        GrapeForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pickles"):
        GrapeForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"hidden_act": "gelu"}, "silu"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 0}, "width"),
    ],
)
def test_bad_configs(wrong, says):
    with pytest.raises(Exception, match=says):
        config(**wrong)


def test_masks_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        small()(tokens(), attention_mask=torch.ones(2, 1, 9, 9))


@pytest.mark.parametrize("qk_norm", [True, False, "after"])
def test_options_of_the_layer_are_saved(tmp_path, qk_norm):
    model = small("rope", qk_norm=qk_norm, output_norm=True, output_gate=qk_norm is True)
    model.save_pretrained(tmp_path)
    back = GrapeForCausalLM.from_pretrained(tmp_path)
    assert back.config.qk_norm == qk_norm and back.model.layers[0].self_attn.qk_norm == qk_norm
    assert (back.model.layers[0].self_attn.g_proj is not None) == (qk_norm is True)
    torch.testing.assert_close(back.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_auto_config_round_trip(tmp_path):
    config("grape-ap", encoding_options={"probe_dim": 4}, kv_shift=True).save_pretrained(tmp_path)
    back = AutoConfig.from_pretrained(tmp_path)
    assert back.encoding_options == {"probe_dim": 4} and back.kv_shift
    assert back.to_decoder() == DecoderConfig.from_hf(back.to_decoder().to_hf())


def test_a_configuration_of_an_earlier_version_loads():
    saved = config("rope").to_decoder().to_hf()
    for name in ("output_norm", "output_gate"):
        del saved[name]
    assert DecoderConfig.from_hf(saved) == config("rope").to_decoder()
