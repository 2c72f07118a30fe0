"""`grape.Attention`: the decoder's own attention as a layer; cached = uncached, packed = alone, padded = unpadded."""

import copy
import itertools

import pytest
import torch

import grape_pe as grape
from grape_pe.layers import Attention
from grape_pe.models import Decoder, DecoderConfig
from grape_pe.testing import TOL

NAMES = [*grape.names(), "rope+fox", "grape-m+grape-ap"]
C, T = 32, 13
CUTS = [(0, 13), (0, 1, 5, 13), (0, 6, 7, 8, 13), tuple(range(14))]


def made(encoding="rope+fox", dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = Attention(C, 4, encoding=encoding, **{"kv_heads": 2, "kv_shift": True, **options}).to(dtype)
    with torch.no_grad():  # away from the initial values, where gates are still
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def inputs(batch=2, tokens=T, dtype=torch.float64, seed=1):
    return torch.randn(batch, tokens, C, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got, want, dtype=torch.float64):
    torch.testing.assert_close(got, want, rtol=TOL[dtype], atol=TOL[dtype])


def stream(layer, x, cuts, **where):
    cache = layer.cache()
    parts = (
        layer(x[:, a:b], **{n: t[..., a:b] for n, t in where.items()}, cache=cache)
        for a, b in itertools.pairwise(cuts)
    )
    return torch.cat(list(parts), 1)


def test_it_is_the_layer_of_both_models():
    from grape_pe.hf import GrapeConfig, GrapeForCausalLM

    plain = Decoder(DecoderConfig(vocab_size=7, width=C, layers=1, heads=2))
    hf = GrapeForCausalLM(
        GrapeConfig(vocab_size=7, hidden_size=C, num_hidden_layers=1, num_attention_heads=2)
    )
    for model in (plain, hf):
        assert type(model.model.layers[0].self_attn) is grape.Attention


@pytest.mark.parametrize("name", ["rope", "grape-a-qk", "grape-m+grape-ap"])
def test_a_model_of_layers_is_the_decoder(name):
    """The decoder computed by hand from the public call of each layer, with documents and with padding."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=61, width=C, layers=2, heads=4, kv_heads=2, encoding=name, kv_shift=True
    )
    model, ids = Decoder(config).double(), torch.randint(0, 61, (2, T))
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, :4] = True
    for where in ({}, {"documents": torch.tensor([0] * 5 + [1] * 8)}, {"padding": padding}):
        x = model.model.embed_tokens(ids)
        for block in model.model.layers:
            x = x + block.self_attn(block.input_layernorm(x), **where)
            x = x + block.mlp(block.post_attention_layernorm(x))
        close(model.model.norm(x), model.hidden(ids, **where))


def test_it_is_its_formula():
    """Projections, the norm, the rotation and the softmax written out."""
    layer, x = made("rope", kv_shift=False), inputs()
    q, k, v = (p(x).view(2, T, -1, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    code = layer.encoding(layer.q_norm(q), layer.k_norm(k))
    k, v = (t.repeat_interleave(2, 1) for t in (code.k, v))
    scores = (code.q @ k.mT / 8**0.5).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    close(layer(x), layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


def test_norm_after_is_its_formula():
    """KV-shift, then the rotation, then the learned norm, then the softmax, written out."""
    layer, x = made("rope", qk_norm="after"), inputs()
    q, k, v = (p(x).view(2, T, -1, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v, _ = layer.kv_shift(k, v, x)
    code = layer.encoding(q, k)
    q, k = (
        side / (side.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        for side, norm in ((code.q, layer.q_norm), (code.k, layer.k_norm))
    )
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    close(layer(x), layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("name", ["rope", "grape-m", "grape-m-ctx", "grape-m-basis", "rope+fox"])
def test_norm_after_equals_norm_before_with_equal_weights_only(name):
    """A rotation keeps the length and commutes with one scale; with a weight for each coordinate it does not."""
    before, x = made(name), inputs()
    after = made(name, qk_norm="after")
    assert before(x).sub(after(x)).abs().max() > 1e-3
    with torch.no_grad():
        for layer in (before, after):
            layer.q_norm.weight.fill_(1.3)
            layer.k_norm.weight.fill_(0.7)
    close(after(x), before(x))


@pytest.mark.parametrize("name", ["nope", "alibi", "fox", "grape-a-qk", "grape-ap", "path"])
def test_norm_after_without_a_rotation_is_the_norm_before(name):
    x = inputs()
    assert torch.equal(made(name, qk_norm="after")(x), made(name)(x))


@pytest.mark.parametrize("name", ["rope", "grape-m", "rope+grape-a-qk"])
def test_norm_after_breaks_the_relative_law(name):
    """Shifted positions change the output with learned weights, and do not with weights of one."""
    layer, x, positions = made(name, qk_norm="after"), inputs(), torch.arange(T)
    moved = layer(x, positions=positions + 5) - layer(x, positions=positions)
    assert moved.abs().max() > 1e-4
    with torch.no_grad():
        layer.q_norm.weight.fill_(1.0)
        layer.k_norm.weight.fill_(1.0)
    close(layer(x, positions=positions + 5), layer(x, positions=positions))


def test_norm_after_refuses_what_needs_the_law():
    layer, x = made("rope", qk_norm="after"), inputs()
    cache = layer.cache()
    with torch.no_grad():
        layer(x, cache=cache)
    with pytest.raises(ValueError, match="after the rotation"):
        cache.rebase(3)
    saved, other = cache.state_dict(), made("rope").cache()
    with pytest.raises(ValueError, match="norm after"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match='"after"'):
        made("rope", qk_norm="behind")


def test_norm_after_refuses_a_running_phase_over_documents():
    x, documents = inputs(), torch.tensor([0] * 5 + [1] * 8)
    with pytest.raises(ValueError, match=r"packed documents are not possible .* breaks the relative law"):
        made("grape-m-ctx", qk_norm="after")(x, documents=documents)
    layer = made("rope", qk_norm="after")  # positions begin again: exact
    close(layer(x, documents=documents)[:, 5:], layer(x[:, 5:]))


@pytest.mark.parametrize("norm, gate", [(True, False), (False, True), (True, True)])
def test_output_norm_and_gate_are_their_formula(norm, gate):
    """Each head's output over its root mean square, times its weight, times sigmoid(W x); then the projection."""
    layer, x = made("rope+fox", output_norm=norm, output_gate=gate), inputs()
    plain = copy.deepcopy(layer)
    plain.o_norm = plain.g_proj = None
    plain.o_proj = torch.nn.Identity()
    read = plain(x)
    want = torch.empty_like(read)
    for h in range(4):
        part = slice(8 * h, 8 * h + 8)
        want[..., part] = read[..., part]
        if norm:
            size = (read[..., part].pow(2).sum(-1, keepdim=True) / 8 + 1e-5).sqrt()
            want[..., part] = read[..., part] / size * layer.o_norm.weight
        if gate:
            want[..., part] *= 1 / (1 + torch.exp(-x @ layer.g_proj.weight[part].T))
    close(layer(x), want @ layer.o_proj.weight.T)
    with torch.no_grad():
        for cuts in CUTS:
            close(stream(layer, x, cuts), layer(x))
    layer(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())


@pytest.mark.parametrize("qk_norm", [True, "after"])
@pytest.mark.parametrize("name", NAMES)
def test_cached_is_uncached(name, qk_norm):
    layer, x = made(name, qk_norm=qk_norm), inputs()
    if qk_norm == "after" and layer.encoding.sets_norms:
        with pytest.raises(ValueError, match="would undo"):
            layer(x)
        return
    with torch.no_grad():
        want = layer(x)
        for cuts in CUTS:
            close(stream(layer, x, cuts), want)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("name", ["rope", "fox", "grape-a-qk", "rope+fox", "grape-ap"])
def test_window_and_sinks(name, sinks):
    """Against each query alone with the keys it may see; the cache the same, or refused by name."""
    layer, x = made(name, window=4, sinks=sinks, kv_shift=False), inputs()
    full = copy.deepcopy(layer)
    full.window, full.sinks = None, 0
    assert full(x).sub(layer(x)).abs().max() > 1e-3
    close(layer(x)[:, : 4 + sinks], full(x)[:, : 4 + sinks])
    with torch.no_grad():
        moved = x.clone()
        moved[:, sinks : T - 4] += 1.0  # outside the window of the last token, and no sink
        if name == "rope":
            close(layer(moved)[:, -1], layer(x)[:, -1])
        if name == "grape-ap" and sinks:
            with pytest.raises(ValueError, match="sinks"):
                stream(layer, x, CUTS[1])
            return
        for cuts in CUTS:
            close(stream(layer, x, cuts), layer(x))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["rope", "fox", "grape-m-ctx", "grape-ap", "rope+fox"])
def test_documents_are_alone(name, window):
    layer, x = made(name, window=window), inputs()
    documents = torch.tensor([0] * 5 + [1] * 3 + [2] * 5)
    with torch.no_grad():
        want = torch.cat([layer(x[:, a:b]) for a, b in ((0, 5), (5, 8), (8, 13))], 1)
        positions = torch.tensor([*range(5), *range(3), *range(5)])
        for where in ({"documents": documents}, {"positions": positions}):
            close(layer(x, **where), want)
        close(layer(x, positions=positions, documents=documents), want)
        for cuts in CUTS:
            close(stream(layer, x, cuts, documents=documents), want)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["rope", "fox", "grape-m-ctx", "grape-ap", "path"])
def test_padding_anywhere_changes_nothing(name, window):
    layer, x = made(name, window=window), inputs()
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, [0, 1, 6, 12]] = True
    kept = ~padding[0]
    with torch.no_grad():
        alone = layer(x[:1, kept])[0], layer(x[1:])[0]
        for got in (layer(x, padding=padding), stream(layer, x, (0, 3, 9, 10, 13), padding=padding)):
            close(got[0, kept], alone[0])
            close(got[1], alone[1])
            assert not got[0, ~kept].any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_keys_are_repeated_heads(kv_heads):
    layer, x = made("alibi", kv_heads=kv_heads, kv_shift=False), inputs()
    full = made("alibi", kv_heads=4, kv_shift=False)
    state = layer.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].view(kv_heads, 8, C).repeat_interleave(4 // kv_heads, 0).reshape(-1, C)
    full.load_state_dict(state)
    close(layer(x), full(x))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    layer, x = made(name), inputs().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()
    for parameter, tensor in layer.named_parameters():
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any(), parameter


def test_bfloat16():
    layer, x = made("grape-m+grape-ap", torch.float32), inputs(dtype=torch.float32)
    want = layer(x)
    layer.to(torch.bfloat16)
    with torch.no_grad():
        got = layer(x.bfloat16())
        assert got.dtype == torch.bfloat16
        close(got.float(), want.detach(), torch.bfloat16)
        close(stream(layer, x.bfloat16(), CUTS[1]), got, torch.bfloat16)
    assert layer.encoding.parts["grape-m"].frequencies.delta.dtype == torch.float32


def test_positions_go_where_they_are_given():
    layer, x = made("rope", kv_shift=False), inputs(tokens=3)
    assert layer(x, positions=torch.tensor([0, 5, 9])).sub(layer(x)).abs().max() > 1e-3
    close(layer(x, positions=torch.tensor([7, 8, 9])), layer(x))
    plane = made("rope", kv_shift=False, encoding_options={"coords": 2})
    spots = torch.tensor([[0, 0], [0, 1], [1, 0]])
    close(plane(x, positions=spots), plane(x, positions=spots + 5))


def test_names_of_parameters_and_meta():
    with torch.device("meta"):
        layer = Attention(C, 4, encoding="grape-a-qk", kv_shift=True)
    first = {name.split(".")[0] for name in layer.state_dict()}
    assert first == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "kv_shift", "encoding"}
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(inputs(dtype=torch.float32)).isfinite().all()


def test_it_compiles_as_one_graph():
    torch._dynamo.reset()
    layer, x = made("rope+fox", window=5), inputs()
    close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_a_cache_keeps_the_layers_settings():
    cache = made("rope", window=4, sinks=1).cache(capacity=20, rollback=3)
    assert (cache.window, cache.sinks, cache.capacity, cache.rollback) == (4, 1, 20, 3)
    layer, x = made("fox"), inputs()
    with torch.no_grad():
        cache, want = layer.cache(), layer(x)
        layer(x[:, :9], cache=cache)
        cache.crop(2)
        close(layer(x[:, 7:], cache=cache), want[:, 7:])


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"width": 0}, "width must be a positive integer, got 0"),
        ({"heads": 5}, "heads must divide width .* heads=5 and width=32"),
        ({"heads": True}, "heads must be a positive integer"),
        ({"kv_heads": 3}, "multiple of kv_heads, got heads=4 and kv_heads=3"),
        ({"kv_heads": 0}, "kv_heads must be a positive integer"),
        ({"head_dim": -1}, "head_dim must be a positive integer"),
        ({"encoding": "ropee"}, "unknown encoding 'ropee'; did you mean rope"),
        ({"encoding_options": {"bse": 1}}, "unknown option 'bse'"),
        ({"window": 0}, "window must be None or the number of tokens"),
        ({"window": 2.5}, "window must be None or the number of tokens"),
        ({"sinks": -1}, "sinks must be a number"),
        ({"sinks": 2}, "sinks=2 .* set window"),
    ],
)
def test_bad_settings_are_refused_by_name(wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        Attention(**{"width": C, "heads": 4, **wrong})


IDS = torch.tensor([0] * 6 + [1] * 7)


@pytest.mark.parametrize(
    "where, says",
    [
        ({"positions": torch.arange(4)}, "positions must have shape"),
        ({"documents": torch.zeros(4)}, "documents must have shape"),
        ({"documents": torch.zeros(3, T)}, "documents must have shape"),
        ({"padding": torch.zeros(2, T)}, "padding must be a bool tensor"),
        ({"padding": torch.zeros(T, dtype=torch.bool)}, "padding must be a bool tensor"),
        ({"positions": torch.tensor([*range(4), *range(9)]), "documents": IDS}, "positions must .* increase"),
        ({"cache": "none"}, "cache must come from layer.cache"),
        ({"positions": list(range(T))}, "positions must be a torch.Tensor, got list"),
        ({"positions": torch.ones(T, dtype=torch.bool)}, "positions must be integer or real, got torch.bool"),
        ({"positions": torch.arange(T) + 0j}, "positions must be integer or real, got torch.complex64"),
        ({"positions": torch.arange(T).bfloat16()}, "positions in torch.bfloat16 are wrong from 256"),
        ({"positions": torch.tensor([*range(T - 1), torch.nan])}, "positions must be finite, got nan"),
        ({"documents": [0] * T}, "documents must be a torch.Tensor, got list"),
        ({"documents": torch.zeros(T)}, "documents must be integer ids, got torch.float32"),
        ({"padding": [[False] * T] * 2}, "padding must be a torch.Tensor, got list"),
    ],
)
def test_bad_arguments_are_refused_by_name(where, says):
    with pytest.raises((ValueError, TypeError), match=says):
        made()(inputs(), **where)


def test_a_cache_of_another_library_is_refused_by_name():
    class DynamicCache:
        layers = (None,)

    model = Decoder(DecoderConfig(vocab_size=7, width=C, layers=2, heads=2))
    with pytest.raises(TypeError, match=r"cache must come from model.cache\(\), got DynamicCache"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=DynamicCache())
    with pytest.raises(TypeError, match=r"cache must come from model.cache\(\), got StreamingCache"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=model.cache().layers[0])
    with pytest.raises(TypeError, match=r"cache must come from layer.cache\(\), got DynamicCache"):
        made()(inputs(), cache=DynamicCache())
    with pytest.raises(TypeError, match=r"cache must come from layer.cache\(\), got DecoderCache"):
        made()(inputs(), cache=model.cache())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.float64])
@pytest.mark.parametrize("where", ["positions", "documents"])
def test_numbers_of_any_dtype_are_the_same(dtype, where):
    """Also where a step of the cache has another dtype than the one before."""
    if where == "documents" and dtype in (torch.uint16, torch.float64):
        pytest.skip("refused: ids are integers, of the dtypes torch computes with")
    layer, x = made(), inputs()
    given = {"positions": torch.arange(T) * 2 + 3, "documents": IDS}[where]
    want = layer(x, **{where: given})
    close(layer(x, **{where: given.to(dtype)}), want)
    cache = layer.cache()
    parts = [layer(x[:, :4], **{where: given[:4].to(dtype)}, cache=cache)]
    with torch.no_grad():
        for t in range(4, T):
            kind = dtype if t % 2 else torch.int64
            parts.append(layer(x[:, t : t + 1], **{where: given[t : t + 1].to(kind)}, cache=cache))
    close(torch.cat(parts, 1), want)


def test_wrong_inputs_and_caches_are_refused():
    layer, x = made(), inputs()
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        layer(x.tolist())
    for bad in (x[0], x[..., :5]):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, tokens, width=32\)"):
            layer(bad)
    with pytest.raises(ValueError, match="another layer"):
        layer(x, cache=made().cache())
    cache = layer.cache()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="the cache holds 2 sequences, the call has 1"):
        layer(x[:1], cache=cache)
    with pytest.raises(ValueError, match="conv"):
        made("path")(x, documents=IDS)
    with pytest.raises(ValueError, match="encoding=None"):
        Attention(C, 4, encoding=None)(x.float())


@pytest.mark.parametrize("name", ["rope", "grape-m-ctx", "rope+fox", "grape-ap", "path"])
def test_a_call_of_no_tokens_changes_nothing(name):
    layer, x = made(name), inputs()
    assert layer(x[:, :0]).shape == (2, 0, C)
    close(stream(layer, x, (0, 0, 5, 5, 6, 13, 13)), layer(x))
    assert layer(x[:0]).shape == (0, T, C)


def test_a_copied_cache_belongs_to_the_same_layer():
    layer, x = made(), inputs()
    cache = layer.cache()
    layer(x[:, :6], cache=cache)
    twin = copy.deepcopy(cache)
    layer(x[:, :3], cache=cache)  # not seen by the copy
    close(layer(x[:, 6:], cache=twin), layer(x)[:, 6:])


def test_on_meta_it_gives_shapes():
    layer, x = made(dtype=torch.float32).to("meta"), inputs(dtype=torch.float32).to("meta")
    cache = layer.cache()
    assert layer(x).shape == layer(x, cache=cache).shape == (2, T, C)
    assert layer(x[:, :1], cache=cache).device.type == "meta"


@pytest.mark.parametrize("name", ["rope+fox", "grape-m+grape-ap"])
def test_torch_func(name):
    """An ensemble by vmap, gradients of each sample, forward mode."""
    from torch.func import functional_call, grad, jvp, stack_module_state, vmap

    layers, x = [made(name, output_norm=True), made(name, output_norm=True)], inputs()
    layers[1].load_state_dict({n: p * 1.1 for n, p in layers[1].state_dict().items()})
    stacked = vmap(lambda *state: functional_call(layers[0], state, (x,)))(*stack_module_state(layers))
    close(stacked, torch.stack([layer(x) for layer in layers]))

    def loss(parameters, x):
        return functional_call(layers[0], parameters, (x[None],)).square().sum()

    each = vmap(grad(loss), (None, 0))(dict(layers[0].named_parameters()), x)
    layers[0](x).square().sum().backward()
    close(each["q_proj.weight"].sum(0), layers[0].q_proj.weight.grad)
    want = (layers[0](x + 1e-6 * x) - layers[0](x - 1e-6 * x)) / 2e-6
    torch.testing.assert_close(jvp(layers[0], (x,), (x,))[1], want, rtol=1e-6, atol=1e-6)


def test_packed_documents_with_sinks_are_refused():
    """Alone, every document has sinks; packed, only the first would."""
    layer, x, documents = made("fox", window=4, sinks=2), inputs(), torch.tensor([0] * 6 + [1] * 7)
    with pytest.raises(ValueError, match="sinks=2"):
        layer(x, documents=documents)
    with pytest.raises(ValueError, match="sinks=2"):
        layer(x, positions=torch.tensor([*range(6), *range(7)]))
    model = Decoder(DecoderConfig(vocab_size=7, width=C, layers=2, heads=2, window=[3, None], sinks=1))
    with pytest.raises(ValueError, match="sinks=1"):
        model(torch.zeros(1, T, dtype=torch.long), documents=documents)
