"""Static caches: `generate(cache_implementation="static")`, compiled or not, gives what a growing cache gives."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from grape_pe.hf import GrapeConfig, GrapeForCausalLM, adapt
from grape_pe.testing import TOL

KINDS = [
    "rope",
    "grape-m",
    "alibi",
    "fox",
    "grape-a-qk",
    "grape-ap",
    "rope+fox",
    "grape-m-ctx",
    "grape-a-phase",
    "t5",
    "kerple-log",
    "rope+relative",
    "rope+logn",
    "xpos",
    "pope",
]
MIXED = ["grape-m@w3", "grape-m@w5", "grape-a-qk"]
ADAPTED = ["grape-m", "rope+fox", "rope+grape-a-qk", "rope+grape-ap"]
V = 61
NEAR = {"rtol": TOL[torch.float32], "atol": TOL[torch.float32]}


def small(encoding="rope", layers=2, **options):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = GrapeForCausalLM(GrapeConfig(vocab_size=V, **sizes, encoding=encoding, pad_token_id=0, **options))
    return stir(model.eval())


def small_adapted(encoding, kind="llama"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config, cls = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    stock = cls(config(vocab_size=V, intermediate_size=128, head_dim=16, pad_token_id=0, **sizes))
    return stir(adapt(stock, encoding).eval())


def stir(model):
    """Random weights large enough that a lost bias changes the tokens."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def prompts(batch=2, length=9, padded=4, seed=1):
    ids = torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[0, :padded] = 0
    return ids


def generate(model, ids, count=8, **options):
    out = model.generate(
        ids, attention_mask=(ids != 0).long(), max_new_tokens=count, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def same(got, want):
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], **NEAR)


def compiled(backend="eager"):
    """How `generate` compiles its steps, and the graphs it made."""
    graphs = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend=lambda *graph: graphs(*graph), mode=None)
    config._compile_all_devices = True  # else on GPUs only
    return {"cache_implementation": "static", "compile_config": config}, graphs


def check_compiled(model, backend):
    """Calls of the same shape, padded and not: one graph, for all of their steps."""
    options, graphs = compiled(backend)
    for ids in (prompts(), prompts(padded=0, seed=2)):
        same(generate(model, ids, **options), generate(model, ids))
    assert graphs.frame_count == 1
    same(generate(model, prompts(), 5, **options), generate(model, prompts(), 5))  # the cache keeps its size
    assert graphs.frame_count == 1


def quick(names, kept):
    """All names, those not kept only among the slow tests."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name",
    quick([*KINDS, MIXED], ["rope", "grape-a-qk", "grape-ap", "rope+fox", "t5", "rope+relative", MIXED]),
)
def test_one_graph_serves_every_step(name):
    check_compiled(small(name, layers=3 if name is MIXED else 2, kv_shift=True), "eager")


@pytest.mark.parametrize("kind", quick(["llama", "qwen3"], ["llama"]))
@pytest.mark.parametrize("name", quick(ADAPTED, ["rope+fox", "rope+grape-ap"]))
def test_one_graph_serves_every_step_of_an_adapted_model(name, kind):
    check_compiled(small_adapted(name, kind), "eager")


@pytest.mark.parametrize("name", quick([*KINDS, MIXED], ["rope+fox"]))
def test_inductor(name):
    check_compiled(small(name, layers=3 if name is MIXED else 2, kv_shift=True), "inductor")


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_larger_caches_share_one_more_graph(backend):
    model, (options, graphs) = small("rope+fox"), compiled(backend)
    for count in (8, 12, 16):
        same(generate(model, prompts(), count, **options), generate(model, prompts(), count))
    assert graphs.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_inductor_of_adapted_models(name):
    check_compiled(small_adapted(name), "inductor")


@pytest.mark.parametrize("name", ["rope+fox", "grape-ap"])
def test_forward_compiled_by_the_user(name):
    """torch.compile of `forward` compiles the prompt as well: two graphs."""
    model, ids = small(name, kv_shift=True), prompts()
    want = generate(model, ids)
    graphs = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    for _ in range(2):
        same(generate(model, ids, cache_implementation="static"), want)
        assert graphs.frame_count == 2


MODES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "chunked": {"prefill_chunk_size": 3},  # the padding is longer than a chunk
    "one by one": {"prefill_chunk_size": 1},
}
SETTINGS = {
    "window": {"encoding": "rope+fox", "window": 4},
    "window of a path": {"encoding": "grape-ap", "window": 4},
    "sinks": {"encoding": "grape-m+alibi", "window": 4, "sinks": 2},
    "by layer": {"encoding": MIXED, "layers": 3},
    "shared": {"encoding": "rope+fox", "shared_encoding": True},
    "norm after": {"encoding": "grape-m+grape-a-qk", "qk_norm": "after"},
    "four terms": {"encoding": "alibi+fox+grape-a-qk+grape-ap"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_modes_and_settings(setting, mode):
    """Against no cache at all, for generation past the window."""
    model, ids = small(**SETTINGS[setting], kv_shift=True), prompts(3)
    plain = {name: value for name, value in MODES[mode].items() if name == "num_beams"}
    want = generate(model, ids, use_cache=False, **plain)
    same(generate(model, ids, cache_implementation="static", **MODES[mode]), want)


@pytest.mark.parametrize("name", [*KINDS, MIXED])
def test_padding_anywhere_and_pieces_of_any_length(name):
    model, ids = small(name, layers=3 if name is MIXED else 2, kv_shift=True), prompts(padded=0, length=80)
    mask = torch.ones_like(ids)
    mask[0, [0, 1, 5, 76]] = 0
    mask[1, 70:75] = 0
    cache, parts = StaticCache(config=model.config, max_cache_len=80), []
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits
        for first, last in ((0, 2), (2, 4), (4, 74), (74, 75), (75, 76), (76, 77), (77, 80)):
            given = {"attention_mask": mask[:, :last], "past_key_values": cache}
            parts.append(model(ids[:, first:last], **given).logits)
            assert cache.get_seq_length() == last
    shown = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[shown], want[shown], **NEAR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["rope", "rope+fox", "grape-ap"])
def test_dtypes(name, dtype):
    model, ids = small(name).to(dtype), prompts()
    got, want = generate(model, ids, cache_implementation="static"), generate(model, ids)
    torch.testing.assert_close(got[1][:2], want[1][:2], rtol=4 * TOL[dtype], atol=4 * TOL[dtype])


@pytest.mark.parametrize("name", ["rope+fox", "grape-ap"])
def test_a_cache_goes_on_and_starts_again(name):
    model, ids = small(name, kv_shift=True), prompts(padded=0)
    cache = StaticCache(config=model.config, max_cache_len=40)
    want = generate(model, ids, 6)
    first, _ = generate(model, ids, 6, past_key_values=cache)
    twin = copy.deepcopy(cache)
    longer = torch.cat([first, prompts(padded=0, length=3, seed=4)], 1)
    for each in (cache, twin):
        assert torch.equal(generate(model, longer, 6, past_key_values=each)[0], generate(model, longer, 6)[0])
    cache.reset()
    assert cache.get_seq_length() == 0
    same(generate(model, ids, 6, past_key_values=cache), want)
    cache.reset()
    same(generate(model, ids[:1], 6, past_key_values=cache), generate(model, ids[:1], 6))  # another batch


def filled(model, ids, length=20):
    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def test_selected_and_repeated_sequences():
    model, ids = small("rope+fox", kv_shift=True), prompts(padded=0)
    cache = filled(model, ids)
    with torch.no_grad():
        want = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        for layer in cache.layers:
            layer.batch_repeat_interleave(2)
            layer.batch_select_indices(torch.tensor([False, True, True, True]))
            layer.reorder_cache(torch.tensor([2, 1, 0]))
        got = model(ids[[1, 1, 0], :1], past_key_values=cache).logits
    torch.testing.assert_close(got, want[[1, 1, 0]], **NEAR)


def test_refused_by_name():
    model, ids = small("rope+fox"), prompts(padded=0)
    with pytest.raises(ValueError, match=r"path.*cache_implementation='dynamic'"):
        generate(small("path"), ids, cache_implementation="static")
    with pytest.raises(ValueError, match=r"PaTHBias.*cache_implementation='dynamic'"):
        generate(small("path", encoding_options={"conv": 0}), ids, cache_implementation="static")
    with pytest.raises(ValueError, match="offloaded caches are not supported"):
        generate(model, ids, cache_implementation="offloaded_static")
    cache = filled(model, ids, 12)
    with pytest.raises(ValueError, match=r"cannot remove tokens.*dynamic"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="holds 2 sequences, the call has 1"), torch.no_grad():
        model(ids[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"not support gradients.*no_grad"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"output_attentions.*dynamic"), torch.no_grad():
        model(ids[:, :1], past_key_values=cache, output_attentions=True)


@pytest.mark.parametrize("compile_it", [False, True])
def test_what_only_values_show_is_refused_too(compile_it):
    """Positions that fall (packed documents) and a full cache: an assertion in a compiled step."""
    model, ids = small("alibi"), prompts(padded=0)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="eager") if compile_it else model
    error = RuntimeError if compile_it else ValueError
    packed = torch.tensor([[*range(5), *range(4)]])
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=12)
        with pytest.raises(ValueError, match="without packed documents"):
            model(ids, position_ids=packed, past_key_values=cache)
        with pytest.raises(error, match="without packed documents"):
            step(ids[:, :1], position_ids=torch.tensor([[3]]), past_key_values=filled(model, ids))
        full = filled(model, ids, 9)
        with pytest.raises(error, match="the static cache is full"):
            step(ids[:, :1], past_key_values=full)
        gap = step(ids[:, :1], position_ids=torch.tensor([[11]]), past_key_values=filled(model, ids)).logits
        positions = torch.tensor([[*range(9), 11]])
        want = model(torch.cat([ids, ids[:, :1]], 1), position_ids=positions).logits[:, -1:]
    torch.testing.assert_close(gap, want, **NEAR)
