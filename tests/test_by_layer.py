"""Encodings and windows by layer: the plan, the decoder, Hugging Face, files, export, the lab."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from grape_pe.hf import GrapeConfig, GrapeForCausalLM, export
from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.inspect.figure_data import picture
from grape_pe.models import Decoder, DecoderConfig, load_decoder, save_decoder
from grape_pe.testing import TOL
from test_hf_generate import MODES, generated, same

V = 61
MIX = ["grape-m@w4", "grape-a-qk", "nope", "rope+fox@w3"]
SIZES = {"vocab_size": V, "width": 32, "layers": 4, "heads": 4, "kv_heads": 2}


def moved(model):
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def small(encoding=tuple(MIX), **options):
    torch.manual_seed(0)
    return moved(Decoder(DecoderConfig(**{**SIZES, "encoding": encoding, **options})))


def hf(encoding=tuple(MIX), seed=0, **options):
    torch.manual_seed(seed)
    config = GrapeConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        encoding=list(encoding), pad_token_id=0, **options,
    )  # fmt: skip
    return moved(GrapeForCausalLM(config))


def tokens(batch=2, length=14, seed=1):
    return torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOL[torch.float64], atol=TOL[torch.float64])


def test_patterns_repeat_over_the_layers():
    config = DecoderConfig(layers=8, encoding=["grape-m@w128"] * 3 + ["grape-a-qk"])
    assert [(each.encoding, each.window) for each in config.by_layer] == (
        [("grape-m", 128)] * 3 + [("grape-a-qk", None)]
    ) * 2
    assert config.encoding_label == "grape-m@w128 x3, grape-a-qk"
    windows = DecoderConfig(layers=4, window=[64, None], sinks=2)
    assert [each.window for each in windows.by_layer] == [64, None, 64, None]
    assert {each.window for each in DecoderConfig(layers=4, encoding="rope@w9").by_layer} == {9}


def test_each_layer_has_its_own():
    model = small(window=None, sinks=0)
    layers = [block.self_attn for block in model.model.layers]
    assert [type(layer.encoding).__name__ for layer in layers] == [
        "Rotary",
        "GatedSlope",
        "NoPE",
        "Composite",
    ]
    assert [layer.window for layer in layers] == [4, None, None, 3]
    assert [layer.window for layer in model.cache().layers] == [4, None, None, 3]
    assert [layer.window for layer in model.cache(window=3).layers] == [3, 3, 3, 3]
    both = small("rope", window=[5, None], sinks=1)
    assert [(layer.window, layer.sinks) for layer in both.cache().layers] == [(5, 1), (None, 0)] * 2


def test_the_mixture_is_its_layers():
    """Computed by hand: each block with the layer it should have."""
    model, ids = small(), tokens()
    x = model.model.embed_tokens(ids)
    for block, (name, window) in zip(
        model.model.layers,
        [("grape-m", 4), ("grape-a-qk", None), ("nope", None), ("rope+fox", 3)],
        strict=True,
    ):
        alone = small(name, layers=1, window=window).model.layers[0].self_attn
        alone.load_state_dict(block.self_attn.state_dict())
        x = x + alone(block.input_layernorm(x))
        x = x + block.mlp(block.post_attention_layernorm(x))
    close(model.hidden(ids), model.model.norm(x))


@pytest.mark.parametrize(
    "options", [{}, {"kv_shift": True}, {"encoding": "rope", "window": [5, None], "sinks": 2}]
)
def test_cached_is_uncached(options):
    model, ids = small(**options), tokens()
    with torch.no_grad():
        want = model(ids)
        for cuts in ((0, 1, 6, 14), (0, 9, 10, 11, 12, 14), tuple(range(15))):
            cache = model.cache()
            close(torch.cat([model(ids[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)], 1), want)
        cache = model.cache()
        model(ids[:, :12], cache=cache)
        cache.crop(5)
        close(model(ids[:, 7:], cache=cache), want[:, 7:])


def test_packing_and_padding():
    model, ids = small(kv_shift=True), tokens()
    documents = torch.tensor([0] * 5 + [1] * 9)
    padding = torch.zeros(2, 14, dtype=torch.bool)
    padding[0, [0, 1, 7]] = True
    with torch.no_grad():
        alone = torch.cat([model(ids[:, :5]), model(ids[:, 5:])], 1)
        close(model(ids, documents=documents), alone)
        cache = model.cache()
        parts = [
            model(ids[:, a:b], documents=documents[a:b], cache=cache) for a, b in ((0, 3), (3, 8), (8, 14))
        ]
        close(torch.cat(parts, 1), alone)
        want = model(ids[:1, ~padding[0]])[0]
        cache = model.cache()
        parts = [model(ids[:, a:b], padding=padding[:, a:b], cache=cache) for a, b in ((0, 6), (6, 14))]
        for got in (model(ids, padding=padding), torch.cat(parts, 1)):
            close(got[0, ~padding[0]], want)
    with pytest.raises(ValueError, match="conv"):  # in a layer other than the first
        small(["rope", "path"])(ids, documents=documents)


@pytest.mark.parametrize("mode", MODES)
def test_generate(mode):
    model, ids = hf(kv_shift=True), tokens(length=9)
    options = dict(MODES[mode])
    plain = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "cache_implementation")}
    same(model, ids, generated(model, ids, use_cache=False, **plain), **options)


def test_assisted_prompt_lookup_and_left_padding():
    model, assistant, ids = hf(kv_shift=True), hf(seed=3), tokens(1, 4).repeat(1, 3)
    want = generated(model, ids, do_sample=False, use_cache=False)
    same(model, ids, want, do_sample=False, prompt_lookup_num_tokens=3)
    same(model, ids, want, do_sample=False, assistant_model=assistant)
    padded = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1), tokens(1, 17, seed=4)])
    both = generated(model, padded, attention_mask=(padded != 0).long(), do_sample=False)
    assert torch.equal(both[0][0, 5:], want[0][0])


def test_files_and_both_models(tmp_path):
    model, ids = small(), tokens()
    save_decoder(model.float(), tmp_path / "plain")
    again = load_decoder(tmp_path / "plain")
    assert again.config == model.config and again.config.encoding == MIX
    other = GrapeForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids))
        torch.testing.assert_close(other(ids).logits, model(ids), rtol=1e-5, atol=1e-5)
    other.save_pretrained(tmp_path / "hf")
    assert load_decoder(tmp_path / "hf").config.by_layer == model.config.by_layer


def test_export_refuses_by_name(tmp_path):
    with pytest.raises(ValueError, match="no stock form: the exported model"):
        export(small("rope", window=[4, None]), tmp_path)
    with pytest.raises(ValueError, match="one encoding for all layers, got rope x3, nope"):
        export(small(["rope", "rope", "rope", "nope"]), tmp_path)
    with pytest.raises(ValueError, match="no stock form: the exported model"):
        export(hf(["rope@w4"]), tmp_path)


def test_shared_encoding_needs_equal_entries():
    model = small(["rope+fox@w4", "rope+fox"], shared_encoding=True)
    assert all(block.self_attn.encoding is None for block in model.model.layers)
    with torch.no_grad():
        cache, ids = model.cache(), tokens()
        close(torch.cat([model(ids[:, :6], cache=cache), model(ids[:, 6:], cache=cache)], 1), model(ids))
    with pytest.raises(ValueError, match="shared_encoding needs one encoding"):
        small(MIX, shared_encoding=True)


def test_options_go_where_they_belong():
    model = small(["rope", "grape-ap"], encoding_options={"base": 100.0, "grape-ap": {"probe_dim": 4}})
    one, two = (model.model.layers[i].self_attn.encoding for i in (0, 1))
    assert "base=100.0" in repr(one) and "probe_dim" in repr(two) and "base" not in repr(two)
    with pytest.raises(TypeError, match="encoding_options: 'bse'"):
        small(["rope", "grape-ap"], encoding_options={"bse": 1})


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"encoding": ["rope", "fox", "nope"]}, r"the list encoding .* must divide layers=4, got 3"),
        ({"encoding": []}, "the list encoding .* got 0"),
        ({"encoding": ["rope", 3]}, "encoding must be a name or a list of names, got 3"),
        ({"encoding": "rope@128"}, "after @ .* got 'rope@128'"),
        ({"encoding": "rope@w0"}, "after @ .* got 'rope@w0'"),
        ({"encoding": ["rope", "ropee"]}, "unknown encoding 'ropee'"),
        ({"encoding": "rope@w4", "window": 8}, "layer 0 has two windows"),
        ({"window": [4, 0]}, "window must be None or"),
        ({"window": [4, 5, 6]}, "the list window .* got 3"),
        ({"sinks": 3}, "sinks=3"),
        (
            {"encoding": ["rope", "alibi"], "encoding_options": {"coords": 2}},
            "coords needs one encoding for all layers",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        small(**{"encoding": "rope", **wrong})


def test_a_half_cropped_cache_is_noticed():
    """A layer that carries a running state can take back fewer tokens than one without."""
    model, ids = small(["nope", "grape-m-ctx"]), tokens()
    cache = model.cache(rollback=1)
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="cannot remove"):
            cache.crop(9)
        with pytest.raises(ValueError, match="different numbers of tokens"):
            model(ids[:, :1], cache=cache)
        model = hf(["nope", "grape-m-ctx"], rollback=1)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="cannot remove"):
            cache.crop(-9)
        with pytest.raises(ValueError, match="different numbers of tokens"):
            model(ids[:, :1], past_key_values=cache)


def test_recipes():
    config = load("demo", {"model.encoding": "[grape-m@w8, nope]", "model.layers": 2})
    assert config.model.encoding == ["grape-m@w8", "nope"]
    assert [each.window for each in config.model.decoder().by_layer] == [8, None]
    assert load("demo", {"model.window": "16"}).model.decoder().by_layer[0].window == 16
    with pytest.raises(LabError, match="model: the list encoding repeats over the layers"):
        load("demo", {"model.encoding": ["rope", "fox", "nope"], "model.layers": 4}).model.decoder()
    with pytest.raises(LabError, match="model: unknown encoding 'noope'"):
        load("demo", {"model.encoding": ["rope", "noope"], "model.layers": 2}).model.decoder()


def test_a_picture_of_a_mixture():
    model, ids = small().float(), tokens(1, 14)
    found = picture(model, ids, [f"{i}" for i in range(14)])
    assert found["encoding"] == ", ".join(MIX) and found["heatmap_of"] == "attention"
