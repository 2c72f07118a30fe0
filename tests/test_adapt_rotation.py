"""Longer contexts by `adapt(scaling=…)`, and leaving RoPE by `RotationFade`."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from grape_pe.hf import RotationFade, adapt, export, new_parameters
from test_adapt_families import close, greedy, stir, stock, tokens

YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"type": "llama3", "factor": 8.0}


def scaled_stock(case, parameters, **options):
    """The stock model with transformers' own scaling in its configuration."""
    return stock(case, rope_parameters=parameters, max_position_embeddings=16, **options)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "ntk", "factor": 4.0}, {"rope_type": "default", "rope_theta": 1e4 * 4.0 ** (8 / 6)}),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        (
            LLAMA3,
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16},
        ),
    ],
    ids=["linear", "ntk", "yarn", "llama3"],
)  # fmt: skip
def test_scaling_equals_the_stock_models(scaling, parameters, tmp_path):
    """Logits of transformers' own scaling; saved and loaded; exported under its name, and as longrope if learned."""
    ids, parameters = tokens(length=40), {"rope_theta": 1e4, **parameters}
    with torch.no_grad():
        want = scaled_stock("Llama", parameters)(ids).logits
        plain = stock("Llama", max_position_embeddings=16)
        assert (plain(ids).logits - want).abs().max() > 1e-3
        model = adapt(plain, "rope+fox", scaling=scaling)
        close(model(ids).logits, want)
        assert model.config.max_position_embeddings == 16 * scaling["factor"]
        stir(model).save_pretrained(tmp_path / "a")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        close(back(ids).logits, model(ids).logits)
        assert torch.equal(greedy(back, ids), greedy(model, ids, use_cache=False))
        export(adapt(stock("Llama", max_position_embeddings=16), "rope", scaling=scaling), tmp_path / "b")
        home = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        assert home.config.rope_parameters["rope_type"] == parameters["rope_type"]
        close(home(ids).logits, want)
        learned = adapt(stock("Llama", max_position_embeddings=16), "grape-m", shared=True, scaling=scaling)
        export(stir(learned), tmp_path / "c")
        home = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
        assert home.config.rope_parameters["rope_type"] == "longrope"
        close(home(ids).logits, learned(ids).logits)


def test_scaling_of_partial_rope(tmp_path):
    """GPT-NeoX turns a quarter of the features; YaRN then counts those planes only."""
    ids = tokens(length=40)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    with torch.no_grad():
        want = scaled_stock("GPTNeoX", {**yarn, "partial_rotary_factor": 0.25})(ids).logits
        model = adapt(stock("GPTNeoX", max_position_embeddings=16), "rope+alibi", scaling=YARN)
        close(model(ids).logits, want)
        own = adapt(scaled_stock("GPTNeoX", {**yarn, "partial_rotary_factor": 0.25}), "grape-m", shared=True)
        close(own(ids).logits, want)
        export(stir(own), tmp_path)
        close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, own(ids).logits)


def test_scaling_refusals():
    with pytest.raises(ValueError, match="type 'default', but those of the model have type 'yarn'"):
        adapt(stock("Llama-yarn"), "rope+fox", scaling=YARN)
    with pytest.raises(ValueError, match='"dynamic" changes the frequencies'):
        adapt(stock("Llama"), "rope+fox", scaling={"type": "dynamic", "factor": 2.0})


# Fading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["Llama", "Llama-yarn", "GPTNeoX", "SmolLM3"])
@pytest.mark.parametrize("name", ["rope+fox", "grape-m+grape-ap+alibi", "rope", "grape-m-basis+fox"])
def test_faded_to_the_additive_model(case, name, tmp_path):
    """At 0: the model built without a rotation, bit for bit where no basis was; saved, loaded, trained further."""
    model, ids = stir(adapt(stock(case), name, train="all")), tokens()
    fade, kind = RotationFade(model, steps=4), type(model)
    with torch.no_grad():
        logits = [model(ids).logits]
        for want in (0.75, 0.5, 0.25):
            assert fade.step() == want == model.config.rotation
            logits.append(model(ids).logits)
        assert all((a - b).abs().max() > 1e-4 for a, b in itertools.pairwise(logits))
        nearly = {n: p.clone() for n, p in model.state_dict().items()}
        assert fade.step() == 0.0 and fade.finished and fade.step() == 0.0
        left = "+".join(name.split("+")[1:]) or "nope"
        assert model.config.encoding == left and not any(
            "rope" in n or "grape-m" in n for n in model.state_dict()
        )
        fresh = kind(
            type(model.config)(**{**model.config.to_dict(), "encoding": left, "rotation": 0.0})
        ).eval()
        fresh.load_state_dict(model.state_dict())
        got = model(ids).logits
        assert torch.equal(fresh(ids).logits, got)
        assert nearly.keys() >= {n for n in model.state_dict() if "encoding" not in n}
        model.save_pretrained(tmp_path)
        back = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(back) is kind and torch.equal(back(ids).logits, got)
        assert torch.equal(greedy(back, ids), greedy(model, ids, use_cache=False))
        turned = model(ids, position_ids=5 + torch.arange(12)[None]).logits  # no rotation is left
        if "grape-ap" not in name:
            close(turned, got)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in new_parameters(model).items() if "amplitude" in n)


def test_strength_zero_is_the_model_without_a_rotation():
    """The step at which the rotation is taken out changes nothing."""
    model, ids = stir(adapt(stock("Llama"), "rope+fox")), tokens()
    for part in model.modules():
        if hasattr(part, "frequencies"):
            part.frequencies.strength = 0.0
    with torch.no_grad():
        want = model(ids).logits
        RotationFade(model, steps=1).step()
        assert torch.equal(model(ids).logits, want)


def test_a_fade_goes_on_after_loading(tmp_path):
    model, ids = stir(adapt(stock("Qwen3"), "grape-m+fox", shared=True)), tokens()
    fade = RotationFade(model, steps=10)
    for _ in range(3):
        fade.step()
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
        again = RotationFade(back, steps=10)
        assert again.strength == pytest.approx(0.7) and again.done == 3
        while not again.finished:
            assert again.step() == fade.step()
            assert torch.equal(back(ids).logits, model(ids).logits)
    assert back.config.encoding == "fox" and again.done == 10


def test_half_faded_models_are_exported(tmp_path):
    model, ids = adapt(stock("Llama"), "rope"), tokens()
    fade = RotationFade(model, steps=2)
    fade.step()
    export(model, tmp_path)
    with torch.no_grad():
        close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    fade.step()
    with pytest.raises(ValueError, match="no layer of this model has a rotation"):
        export(model, tmp_path / "none")


def test_options_of_the_rotation_go_with_it(tmp_path):
    options = {"probe_dim": 4, "per_head": True, "scaling": {"type": "linear", "factor": 2.0}}
    model, ids = stir(adapt(stock("Llama"), "grape-m+grape-ap", **options)), tokens()
    RotationFade(model, steps=1).step()
    assert model.config.encoding_options == {"probe_dim": 4}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_with_lora():
    from peft import LoraConfig, get_peft_model

    model = adapt(stock("Llama"), "rope+fox")
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert RotationFade(lora, steps=1).step() == 0.0 and lora(input_ids=tokens()).logits.isfinite().all()
    wrapped = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["encoding"], task_type="CAUSAL_LM")
    with pytest.raises(TypeError, match="wrapped in a ModulesToSaveWrapper"):
        RotationFade(get_peft_model(adapt(stock("Llama"), "rope+fox"), wrapped), steps=1)


def test_fade_refusals():
    with pytest.raises(TypeError, match="takes a model changed by adapt"):
        RotationFade(stock("Llama"), steps=3)
    with pytest.raises(ValueError, match="steps must be a positive integer"):
        RotationFade(adapt(stock("Llama"), "rope+fox"), steps=0)
    with pytest.raises(ValueError, match="attention factor cannot be faded out"):
        RotationFade(adapt(stock("Llama"), "rope+fox", scaling=YARN), steps=3)
    for name, way in (("fox", "rope+fox"), ("nope", "rope")):
        with pytest.raises(
            ValueError, match=rf"adapt to '{way.replace('+', '[+]')}' and fade the rotation out.*RotationFade"
        ):
            adapt(stock("Llama"), name)
