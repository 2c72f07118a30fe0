"""Generation through Hugging Face: every mode with a cache gives what it gives without one."""

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import grape_pe as grape
from grape_pe.hf import GrapeConfig, GrapeForCausalLM
from grape_pe.testing import TOL

NAMES = [*grape.names(), "rope+fox", "grape-m+grape-ap"]
V = 61


def small(encoding="rope", seed=0, **options):
    torch.manual_seed(seed)
    config = GrapeConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        encoding=encoding, pad_token_id=0, **options,
    )  # fmt: skip
    model = GrapeForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch=2, length=9, seed=1):
    return torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(model, ids, **options):
    torch.manual_seed(7)
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, out.logits


def same(model, ids, expected=None, **options):
    """Tokens equal, and scores too, so that an accidental agreement of arg max does not pass."""
    got = generated(model, ids, **options)
    want = expected or generated(model, ids, **{**options, "use_cache": False, "cache_implementation": None})
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=TOL[torch.float32], atol=TOL[torch.float32])
    return got


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beam": {"num_beams": 3, "do_sample": False},
    "beam-sampling": {"num_beams": 2, "do_sample": True},
    "static": {"cache_implementation": "static", "do_sample": False},
    "chunked": {"prefill_chunk_size": 4, "do_sample": False},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_cached_is_uncached(name, mode):
    if mode == "static" and name in ("path", "fire", "cope", "dape"):
        pytest.skip("refused: tests/test_static_cache.py")
    options = dict(MODES[mode])
    model, ids = small(name, kv_shift=True), tokens()
    plain = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "cache_implementation")}
    same(model, ids, generated(model, ids, use_cache=False, **plain), **options)


@pytest.mark.parametrize("name", NAMES)
def test_assisted_and_prompt_lookup(name):
    """Rejected candidates are cropped from the cache: what is left must be as if they had never come."""
    model, assistant = small(name, kv_shift=True), small(name, seed=3)
    ids = tokens(1, 4).repeat(1, 3)
    want = generated(model, ids, do_sample=False, use_cache=False)
    same(model, ids, want, do_sample=False, prompt_lookup_num_tokens=3)
    same(model, ids, want, do_sample=False, assistant_model=assistant)


@pytest.mark.parametrize("mode", ["greedy", "beam", "static", "chunked"])
@pytest.mark.parametrize("name", NAMES)
def test_left_padding_generates_the_same(name, mode):
    if mode == "static" and name in ("path", "fire", "cope", "dape"):
        pytest.skip("refused: tests/test_static_cache.py")
    model, ids = small(name, kv_shift=True), tokens(1, 6)
    padded = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1), tokens(1, 11, seed=4)])
    mask = (padded != 0).long()
    alone = generated(model, ids, **MODES["beam" if mode == "beam" else "greedy"])
    together = generated(model, padded, attention_mask=mask, **MODES[mode])
    assert torch.equal(together[0][0, 5:], alone[0][0])
    rows = 3 if mode == "beam" else 1
    for a, b in zip(together[1], alone[1], strict=True):
        torch.testing.assert_close(a[:rows], b[:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [[6, 7], [2, 5, 9], [0, 3, 7, 8]])
@pytest.mark.parametrize("name", NAMES)
def test_padding_anywhere_changes_nothing(name, hidden):
    """A right-padded prompt goes on; padding in between; with a cache and without."""
    model, ids = small(name, kv_shift=True), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, hidden] = 0
    kept = mask[0].bool()
    with torch.no_grad():
        want = model(ids[:1, kept]).logits[0], model(ids[1:]).logits[0]
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for a, b in ((0, 8), (8, 9), (9, 12)):
            parts.append(model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits)
        assert cache.get_seq_length() == 12
        for got in (whole, torch.cat(parts, 1)):
            torch.testing.assert_close(got[0, kept], want[0])
            torch.testing.assert_close(got[1], want[1])
        cache.crop(-6)  # columns of the mask
        again = model(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(again[0, kept[6:]], want[0][kept[:6].sum() :])
        torch.testing.assert_close(again[1], want[1][6:])


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap", "rope+fox"])
def test_packed_position_ids(name):
    model = small(name, kv_shift=True)
    parts = [tokens(1, n, seed=n) for n in (5, 3)]
    ids = torch.cat(parts, 1)
    positions = torch.tensor([[*range(5), *range(3)]])
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in parts], 1)
        for cached in (False, True):
            got = model(ids, position_ids=positions, use_cache=cached)
            torch.testing.assert_close(got.logits, want)
        after = model(ids[:, :1], position_ids=torch.tensor([[3]]), past_key_values=got.past_key_values)
        alone = model(torch.cat([parts[1], ids[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(after.logits, alone)


def test_generation_continues_a_packed_prompt():
    model = small("rope+fox", kv_shift=True)
    first, second = tokens(1, 5), tokens(1, 4, seed=2)
    positions = torch.tensor([[*range(5), *range(4)]])
    want = generated(model, second, do_sample=False)[0][0, 4:]
    got = generated(model, torch.cat([first, second], 1), do_sample=False, position_ids=positions)[0][0, 9:]
    assert torch.equal(got, want)


class Forgetful:
    """Negative control: breaks one thing a cache must do, and sees that it is noticed."""

    def __init__(self, monkeypatch, name):
        monkeypatch.setattr(f"grape_pe.hf.cache.GrapeDynamicLayer.{name}", lambda *_: None)


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap", "grape-m-ctx"])
def test_a_cache_that_does_not_reorder_is_noticed(name, monkeypatch):
    model, ids = small(name, kv_shift=True), tokens()
    want = generated(model, ids, use_cache=False, **MODES["beam"])
    Forgetful(monkeypatch, "reorder_cache")
    with pytest.raises(AssertionError):
        same(model, ids, want, **MODES["beam"])


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap"])
def test_a_cache_that_does_not_crop_is_noticed(name, monkeypatch):
    model, ids = small(name), tokens(1, 4).repeat(1, 3)
    want = generated(model, ids, do_sample=False, use_cache=False)
    Forgetful(monkeypatch, "crop")
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        same(model, ids, want, do_sample=False, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", ["fox", "grape-ap", "grape-a-qk"])
def test_a_bias_lost_in_the_cache_is_noticed(name, monkeypatch):
    model, ids = small(name), tokens()
    want = generated(model, ids, use_cache=False, do_sample=False)
    real = grape.StreamingCache._inputs

    def without_bias(self, code, *rest):
        return dataclasses.replace(real(self, code, *rest), bias=grape.NoBias())

    monkeypatch.setattr(grape.StreamingCache, "_inputs", without_bias)
    with pytest.raises(AssertionError):
        same(model, ids, want, do_sample=False)


@pytest.mark.parametrize("name", ["fox", "grape-m-ctx", "grape-ap"])
def test_cache_operations(name):
    model, ids = small(name, kv_shift=True), tokens(2, 10)
    with torch.no_grad():
        want = model(ids).logits
        cache = model(ids[:, :8]).past_key_values
        assert cache.get_seq_length() == 8 and cache.is_croppable
        twin = copy.deepcopy(cache)
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([2, 0]))
        got = model(ids[[1, 0], 5:], past_key_values=cache).logits
        torch.testing.assert_close(got, want[[1, 0], 5:])
        torch.testing.assert_close(model(ids[:, 8:], past_key_values=twin).logits, want[:, 8:])
        twin.reset()
        torch.testing.assert_close(model(ids, past_key_values=twin).logits, want)
    assert twin.layers[0].stream.encoding is model.model.encoding_of(0)


def test_caches_users_bring():
    model, ids = small("fox"), tokens()
    with torch.no_grad():
        want = model(ids).logits
        for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, 20)):
            first = model(ids[:, :4], past_key_values=cache).logits
            rest = model(ids[:, 4:], past_key_values=cache).logits
            torch.testing.assert_close(torch.cat([first, rest], 1), want)
        foreign = DynamicCache()
        foreign.layers.append(DynamicLayer())
        foreign.layers[0].update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8))
        with pytest.raises(ValueError, match="key-side tensors of the bias"):
            model(ids, past_key_values=foreign)
        with pytest.raises(ValueError, match="max_cache_len"):
            model(ids, past_key_values=StaticCache(model.config, 3))


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_filled_by_another_model_is_refused(static):
    """It would go on with the other model's encoding."""
    ids, first, second = tokens(), small("fox"), small("fox", seed=3)
    cache = StaticCache(config=first.config, max_cache_len=20) if static else DynamicCache()
    with torch.no_grad():
        want = first(ids).logits
        first(ids[:, :5], past_key_values=cache)
        with pytest.raises(ValueError, match="another model"):
            second(ids[:, 5:6], past_key_values=cache)
        torch.testing.assert_close(first(ids[:, 5:], past_key_values=cache).logits, want[:, 5:])
        cache.reset()  # an empty one serves any model
        second(ids[:, :5], past_key_values=cache)
        got = second(ids[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(got, second(ids).logits[:, 5:])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_in_training_mode_with_checkpointing(cache):
    """Without gradients nothing is recomputed, so the cache is filled as usual."""
    model, ids = small("grape-m+grape-ap"), tokens()
    want = generated(model, ids, do_sample=False, use_cache=False)
    model.gradient_checkpointing_enable()
    same(model.train(), ids, want, do_sample=False, cache_implementation=cache)
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, past_key_values=filled, labels=ids)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["rope", "fox"])
def test_caches_filled_in_inference_mode_go_on_outside(name, static):
    model, ids = small(name, kv_shift=True), tokens(length=12)
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache()
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 0] = 0
    with torch.inference_mode():
        model(ids[:, :5], attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        cache.batch_repeat_interleave(2)
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        want = model(ids[:1, 1:]).logits[:, 4:].expand(4, -1, -1)
        for each in (cache, twin):
            got = [model(ids[:1, i : i + 1].expand(4, -1), past_key_values=each).logits for i in range(5, 12)]
            torch.testing.assert_close(torch.cat(got, 1), want)


def test_a_static_cache_after_its_model_changed_dtype():
    model, ids = small("rope+fox"), tokens()
    cache = StaticCache(config=model.config, max_cache_len=20)
    generated(model, ids, past_key_values=cache, do_sample=False)
    cache.reset()
    want = generated(model.float(), ids, do_sample=False)
    same(model, ids, want, past_key_values=cache, do_sample=False)


def test_a_static_cache_refuses_a_call_without_tokens():
    model, ids = small(), tokens()
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad(), pytest.raises(ValueError, match="at least one token per call"):
        model(ids[:, :0], past_key_values=cache)
