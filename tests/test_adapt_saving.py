"""Adapted models in transformers' own files: saving, loading, Trainer, PEFT, stock tools, copies."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from grape_pe.hf import GrapeLlamaForCausalLM, adapt, new_parameters
from grape_pe.hf.adapted import FAMILIES
from test_adapt import SIZES, close, pretrained, stir, tokens

CASES = [
    ("llama", "rope+fox", False),
    ("llama", "grape-m-basis", True),
    ("qwen2", "grape-m+grape-ap", True),
    ("qwen3", "rope+grape-a-qk", False),
    ("qwen3", "grape-m+grape-ap+fox", False),
]
PARTS = [
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
]


def adapted(kind="llama", name="rope+fox", shared=False, **options):
    return stir(adapt(pretrained(kind), name, shared=shared, **options))


def greedy(model, ids):
    return model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("kind, name, shared", CASES)
def test_round_trip(kind, name, shared, tmp_path):
    """Weights, encoding, options; whole, in shards, and without the head."""
    options = {"probe_dim": 4} if "grape-ap" in name else {}
    model, ids = adapted(kind, name, shared, **options), tokens()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back) is type(model) and back.config.encoding_options == options
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
        assert torch.equal(greedy(back, ids), greedy(model, ids))
        bare = AutoModel.from_pretrained(tmp_path)
        assert torch.equal(bare(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_reload_in_another_precision(dtype, tmp_path):
    model = adapted("qwen3", "grape-m+grape-a-qk")
    model.save_pretrained(tmp_path)
    casts = {
        "loaded": AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype),
        "cast": copy.deepcopy(model).to(dtype),
    }
    for how, low in casts.items():
        assert low.dtype == dtype
        for key, value in new_parameters(model).items():
            got = low.state_dict()[key]
            assert got.dtype.itemsize >= 4 and torch.equal(got.float(), value), (how, key)
    casts["cast"].save_pretrained(tmp_path / "low")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype="auto")
    assert again.dtype == dtype and torch.equal(again(tokens()).logits, casts["cast"](tokens()).logits)


def test_new_model_from_a_configuration():
    """Amplitudes start at 0 and frequencies are exact also where nothing is loaded."""
    config = adapted("llama", "grape-m+grape-ap").config
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        fresh = adapt(pretrained("llama"), "grape-m+grape-ap").state_dict()
        for key, value in new_parameters(model).items():
            assert "projection" in key or torch.equal(value, fresh[key]), key
        assert model(tokens()).logits.dtype == dtype


def test_frequencies_of_a_cast_model_are_exact():
    """`.to(bfloat16)` of a stock model rounds its inv_freq; the adapted model takes them from the config."""
    exact = pretrained().model.rotary_emb.inv_freq
    low = pretrained().to(torch.bfloat16)
    assert not torch.equal(low.model.rotary_emb.inv_freq.float(), exact)
    rotation = adapt(low, "grape-m").model.layers[0].self_attn.encoding
    assert torch.equal(rotation.frequencies.initial.flatten(), exact)


# Trainer -----------------------------------------------------------------------------------------------


def trainer(model, folder, steps, **options):
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 10)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-2,
        report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, save_steps=2,
        lr_scheduler_type="constant", seed=3, **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def test_trainer_checkpoints_and_resume(tmp_path):
    model, ids = adapt(pretrained(), "rope+grape-ap"), tokens()
    trainer(model, tmp_path / "a", 4).train()
    model.eval()
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    assert type(last) is GrapeLlamaForCausalLM and torch.equal(last(ids).logits, model(ids).logits)
    again = adapt(pretrained(), "rope+grape-ap")
    trainer(again, tmp_path / "b", 4).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    close(again.eval()(ids).logits, model(ids).logits)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2")
    assert (first(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_trainer_loads_the_best_model(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    run = trainer(adapt(pretrained(), "rope+fox"), tmp_path, 4, **options)
    run.train()
    best = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    assert torch.equal(best(tokens()).logits, run.model.eval()(tokens()).logits)


# PEFT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_lora_saved_reloaded_merged(shared, tmp_path):
    """LoRA on the projections, and the encoding itself trained through `modules_to_save`."""
    adapted("llama", "grape-m+grape-ap", shared).save_pretrained(tmp_path / "base")
    ids, base = tokens(), AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    what = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["encoding"]}
    lora = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", **what))
    adam = torch.optim.Adam([p for p in lora.parameters() if p.requires_grad], 3e-2)
    for _ in range(2):
        adam.zero_grad()
        lora(input_ids=ids, labels=ids).loss.backward()
        adam.step()
    assert all(p.grad.abs().max() > 0 for p in lora.parameters() if p.requires_grad)
    want, said = lora.eval()(input_ids=ids).logits, greedy(lora, ids)
    lora.save_pretrained(tmp_path / "lora")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for back in (
        PeftModel.from_pretrained(again, tmp_path / "lora"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora").eval(),
    ):
        close(back(input_ids=ids).logits, want)
        assert torch.equal(greedy(back, ids), said)
    lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged) is GrapeLlamaForCausalLM
    close(merged(ids).logits, want)


def test_peft_does_not_record_the_stock_base(tmp_path):
    """Under the stock model's name PEFT would load it without the encoding."""
    pretrained().save_pretrained(tmp_path)
    model = adapt(AutoModelForCausalLM.from_pretrained(tmp_path), "rope+fox")
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert str(tmp_path) not in str(lora.peft_config["default"].base_model_name_or_path)


# Stock tools and shared configurations ------------------------------------------------------------------


STOCK = """
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for cls, trust in ((LlamaForCausalLM, {}), (AutoModelForCausalLM, {"trust_remote_code": False})):
    try:
        cls.from_pretrained(PATH, **trust)
    except Exception as error:
        print("refused:", error)
print("loaded:", AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True).config.encoding)
"""


def test_stock_processes_refuse_the_configuration(tmp_path):
    """Without this package imported: the class, the Auto class, and the Auto class allowed to import it."""
    adapted().save_pretrained(tmp_path)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", STOCK.replace("PATH", repr(str(tmp_path)))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.stdout.count("refused:") == 2 and "grape_attention" in done.stdout, done.stderr
    assert "trust_remote_code=True" in done.stdout and "loaded: rope+fox" in done.stdout, done.stderr


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_stock_classes_refuse_the_configuration_after_our_import(kind, tmp_path):
    model = adapted(kind)
    model.save_pretrained(tmp_path)
    stock = next(cls for cls, ours in FAMILIES.items() if ours is type(model))
    for load in (stock.from_pretrained, stock.config_class.from_pretrained):
        with pytest.raises(Exception, match="grape_attention"):
            load(tmp_path)
    for config in (model.config, AutoConfig.from_pretrained(tmp_path)):
        with pytest.raises(
            (TypeError, KeyError), match="grape"
        ):  # a new model, with the configuration of ours
            stock(config)(tokens(), use_cache=False)


def test_what_config_json_says(tmp_path):
    adapted().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "grape_llama" and config["encoding"] == "rope+fox"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_grape.GrapeLlamaForCausalLM"
    assert config["architectures"] == ["GrapeLlamaForCausalLM"]


def test_adapt_changes_only_its_model():
    config, ids = LlamaConfig(**SIZES), tokens()
    before, kept = config.to_dict(), LlamaForCausalLM(config)
    want = kept(ids).logits
    models = [
        stir(adapt(LlamaForCausalLM(config), name)) for name in ("rope+fox", "grape-m", "rope+grape-ap")
    ]
    assert config.to_dict() == before and config._attn_implementation == "sdpa"
    assert torch.equal(kept(ids).logits, want)
    LlamaForCausalLM(config)(ids)
    assert len({m(ids).logits.sum().item() for m in models}) == 3  # several encodings in one process


def test_a_checkpoint_of_another_encoding_is_refused(tmp_path):
    adapted("llama", "grape-m+fox").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks"):
        AutoModelForCausalLM.from_pretrained(tmp_path, encoding="grape-m+grape-ap")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.self_attn.encoding.parts.alibi.slopes": torch.ones(4)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="of another encoding"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_attention_is_refused(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="would lose the encoding"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="would lose the encoding"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.raises(ValueError, match="would lose the encoding"):  # a stock class would run without it
        LlamaForCausalLM._from_config(model.config, attn_implementation="sdpa")
    with pytest.raises(TypeError, match="is for models changed by"):
        LlamaForCausalLM(model.config)(tokens(), use_cache=False)


@pytest.mark.parametrize("option", [{"base": 5e5}, {"layout": "interleaved"}, {"grape-m": {"coords": 2}}])
def test_options_that_would_change_the_logits_are_refused(option):
    with pytest.raises(ValueError, match="is set by the model's own RoPE"):
        adapt(pretrained(), "grape-m+fox", **option)


def test_options_that_cannot_be_saved_are_refused():
    with pytest.raises(TypeError, match=r"JSON.*tolist"):
        adapt(pretrained(), "rope+alibi", slopes=torch.ones(4))


# Copies, devices, hooks --------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_copies(shared):
    model, ids = adapted("qwen2", "grape-m+grape-ap", shared), tokens()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, model(ids).logits)
        stir(twin)
        assert not torch.equal(twin(ids).logits, model(ids).logits)


def test_hidden_states_and_attentions():
    model = adapted()
    out = model(tokens(), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 12))


def test_tied_and_resized_embeddings(tmp_path):
    model, ids = stir(adapt(pretrained(tie_word_embeddings=True), "rope+fox")), tokens()
    want = model(ids).logits
    model.resize_token_embeddings(70)
    close(model(ids).logits[..., :61], want)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.equal(back(ids).logits, model(ids).logits)


def test_models_with_hooks_of_accelerate():
    """A hook keeps the `forward` it found; adapting must not leave the old one running."""
    from accelerate import dispatch_model

    model, ids = pretrained(), tokens()
    want = model(ids).logits
    places = [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    dispatch_model(model, dict.fromkeys(places, "cpu"), main_device="cpu", force_hooks=True)
    close(adapt(model, "rope+fox")(ids).logits, want)
    assert (stir(model)(ids).logits - want).abs().max() > 1e-3


def test_device_maps(tmp_path):
    model, ids = adapted("llama", "grape-m+grape-ap"), tokens()
    model.save_pretrained(tmp_path)
    for place in ("cpu", {"": "cpu"}):
        back = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
        assert torch.equal(back(ids).logits, model(ids).logits)
    split = {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}
    with pytest.raises(ValueError, match="offloading"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=split, offload_folder=tmp_path / "off")


def test_compiles():
    torch._dynamo.reset()
    model, ids = adapted("llama", "grape-m+grape-ap", shared=True).train(), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)
