"""fire, cope and dape: each against its formula written out, through attention, a cache and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import grape_pe as grape
from grape_pe import testing
from grape_pe.attention import attend
from grape_pe.models import Decoder, DecoderConfig

HEADS, KEYS, DIM = 4, 2, 8
SHAPE = {"heads": HEADS, "kv_heads": KEYS, "head_dim": DIM}
EXACT = testing.TOL[torch.float64]
NAMES = ("fire", "cope", "dape")
OPTIONS = {"fire": {"length": 6, "hidden": 5}, "cope": {"positions": 5}, "dape": {"hidden": 7}}
#: a row that starts late and one with gaps
PLACES = torch.tensor([[7, 8, 9, 10, 11, 12, 13], [0, 1, 5, 6, 40, 300, 301]])


def made(name: str, **options) -> grape.Encoding:
    """In float64, with every parameter away from where it starts."""
    torch.manual_seed(1)
    own = {key: value for part in name.split("+") for key, value in OPTIONS.get(part, {}).items()}
    enc = grape.build(name, **SHAPE, **(own | options)).double()
    for p in enc.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return enc


def drawn(tokens: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, HEADS, tokens, DIM, dtype=torch.float64)
    return q, *torch.randn(2, batch, KEYS, tokens, DIM, dtype=torch.float64)


# ------------------------------------------------------------------- the formulas, one pair of tokens at a time


def fire(enc, scores, q, b, h, t, j, at):
    c, length = enc.c.abs(), 6 * enc.stretch.abs()
    x = torch.log(1 + c * abs(at[t] - at[j])) / (torch.log(1 + c * max(length, at[t])) + 1e-6)
    return sum(enc.outer[h, i] * F.relu(enc.inner[0, i] * x + enc.inner[1, i]) for i in range(5)).squeeze()


def cope(enc, scores, q, b, h, t, j, at):
    place = sum(torch.sigmoid(scores[b, h, t, i]) for i in range(j, t + 1)) if j <= t else torch.zeros(())
    if place >= 4:
        return q[b, h, t] @ enc.embedding[4]
    low = math.floor(place.detach())
    part = place - low
    return q[b, h, t] @ ((1 - part) * enc.embedding[low] + part * enc.embedding[low + 1])


def dape(enc, scores, q, b, h, t, j, at):
    r1, r2 = F.softplus(enc.kernel.r1), F.softplus(enc.kernel.r2)
    kernel = -r1 * torch.log(1 + r2 * abs(at[t] - at[j]))
    inner = enc.inner @ torch.cat([scores[b, :, t, j], kernel]) + enc.constant[:, 0]
    return kernel[h] + enc.outer[h] @ torch.where(inner > 0, inner, 0.01 * inner)


FORMULA = {"fire": fire, "cope": cope, "dape": dape}


def by_hand(enc, name: str, q, k, places, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """scale <q, k> and the bias, (B, H, T, T) each."""
    scores = scale * q @ k.repeat_interleave(HEADS // KEYS, 1).mT
    batch, length = q.shape[0], q.shape[2]
    at = places.expand(batch, length).tolist()
    values = [
        FORMULA[name](enc, scores, q, b, h, t, j, at[b])
        for b in range(batch)
        for h in range(HEADS)
        for t in range(length)
        for j in range(length)
    ]
    return scores, torch.stack(values).view_as(scores)


@pytest.mark.parametrize("name", NAMES)
def test_bias_is_the_formula(name):
    enc, (q, k, _) = made(name), drawn(7)
    _, want = by_hand(enc, name, q, k, PLACES, DIM**-0.5)
    assert (enc(q, k, positions=PLACES).bias.dense() - want).abs().max() < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_any_tile_is_a_part_of_the_whole(name):
    """Also one that does not reach to the queries' own keys, whose sums begin beyond it."""
    enc, (q, k, _) = made(name), drawn(20)
    whole = enc(q, k).bias.dense()
    late = enc(q[:, :, 12:], k[:, :, 12:], positions=torch.arange(12, 20)).bias
    late = enc(q[:, :, :12], k[:, :, :12]).bias.extend(late)
    for rows, cols in ((slice(4, 9), slice(1, 3)), (slice(0, 2), slice(5, 20)), (slice(7, 8), slice(0, 20))):
        assert (enc(q, k).bias.tile(rows, cols) - whole[:, :, rows, cols]).abs().max() < EXACT
        if rows.stop <= 8:
            moved = slice(rows.start + 12, rows.stop + 12)
            assert (late.tile(rows, cols) - whole[:, :, moved, cols]).abs().max() < EXACT


def test_the_last_embedding_of_cope_counts_all_that_is_further():
    enc, (q, k, _) = made("cope"), drawn(40, 1)
    far = enc(10 + q, 10 + k).bias.dense()[..., 0]  # every gate is 1
    assert (far[..., 5:] - ((10 + q) @ enc.embedding[4])[..., 5:]).abs().max() < EXACT


@pytest.mark.parametrize("impl", ("reference", "blocks", "auto"))
@pytest.mark.parametrize("scale", (None, 0.9))
@pytest.mark.parametrize("name", NAMES)
def test_attention_and_its_gradients_are_those_of_the_formula(name, scale, impl):
    """Also where attention has a scale of its own, which the products that cope and dape read must follow."""
    enc, leaves = made(name), [x.requires_grad_() for x in drawn(7)]
    q, k, v = leaves
    scores, bias = by_hand(enc, name, q, k, PLACES, DIM**-0.5 if scale is None else scale)
    logits = (scores + bias).masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    want = logits.softmax(-1) @ v.repeat_interleave(HEADS // KEYS, 1)
    weight, learned = torch.randn_like(want), [*leaves, *enc.parameters()]
    truth = torch.autograd.grad((want * weight).sum(), learned)
    code = enc(q, k, positions=PLACES)
    y = attend(code.q, code.k, v, bias=code.bias, scale=scale, impl=impl)
    assert (y - want).abs().max() < EXACT
    for got, expected in zip(torch.autograd.grad((y * weight).sum(), learned), truth, strict=True):
        assert (got - expected).abs().max() < EXACT * (1 + expected.abs().max())


@pytest.mark.parametrize("name", (*NAMES, "rope+cope", "grape-m+dape+fire"))
@pytest.mark.parametrize("window", (None, 5))
def test_a_cache_gives_the_full_computation(name, window):
    """Any cut, padding in the batch, a window, tokens taken back."""
    enc, (q, k, v) = made(name), drawn(23)
    code = enc(q, k)
    want = attend(code.q, code.k, v, bias=code.bias, window=window)
    cache, got, at = grape.StreamingCache(enc, window=window), [], 0
    with torch.no_grad():
        for count in (9, 1, 1, 4, 8):
            part = slice(at, at + count)
            y = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part])
            cache.crop(count)
            again = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part])
            assert (again - y).abs().max() < EXACT
            got.append(y)
            at += count
    assert (torch.cat(got, 2) - want).abs().max() < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_and_padding_are_sequences_of_their_own(name):
    enc, (q, k, v) = made(name), drawn(12, 1)
    alone = [
        grape.StreamingCache(enc).attend(*(x[:, :, part] for x in (q, k, v)))
        for part in (slice(0, 5), slice(5, 12))
    ]
    ids = torch.tensor([0] * 5 + [1] * 7)
    packed = grape.StreamingCache(enc).attend(q, k, v, documents=ids)
    assert (packed - torch.cat(alone, 2)).abs().max() < EXACT
    padding = torch.tensor([[True] * 5 + [False] * 7])
    padded = grape.StreamingCache(enc).attend(q, k, v, padding=padding)
    assert (padded[:, :, 5:] - alone[1]).abs().max() < EXACT


@pytest.mark.parametrize("name", ("fire", "dape"))
def test_sinks_where_a_pair_needs_no_token_in_between(name):
    enc, (q, k, v) = made(name), drawn(15)
    code = enc(q, k)
    want = attend(code.q, code.k, v, bias=code.bias, window=4, sinks=2)
    cache = grape.StreamingCache(enc, window=4, sinks=2)
    with torch.no_grad():
        got = [cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(15)]
    assert (torch.cat(got, 2) - want).abs().max() < EXACT


@pytest.mark.parametrize("scale", (None, 0.9))
@pytest.mark.parametrize("name", ("cope", "dape"))
def test_products_keep_their_scale_beside_an_encoding_that_widens_q_and_k(name, scale):
    """PoPE doubles the features, for which attend's default scale is smaller; the products have the old number."""
    enc, (q, k, v) = made(f"pope+{name}"), drawn(7)
    given = {} if scale is None else {"scale": scale / math.sqrt(2)}  # as PoPE asks for
    scale = DIM**-0.5 if scale is None else scale
    _, bias = by_hand(enc.parts[name], name, q, k, PLACES, scale)
    code, pope = enc(q, k, positions=PLACES), enc.parts["pope"](q, k, positions=PLACES)
    logits = scale / math.sqrt(2) * pope.q @ pope.k.repeat_interleave(HEADS // KEYS, 1).mT + bias
    logits = logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    y = attend(code.q, code.k, v, bias=code.bias, **given)
    assert (y - logits.softmax(-1) @ v.repeat_interleave(HEADS // KEYS, 1)).abs().max() < EXACT
    assert (
        code.bias.dense() - by_hand(enc.parts[name], name, q, k, PLACES, DIM**-0.5)[1]
    ).abs().max() < EXACT


@pytest.mark.parametrize("impl", ("cpu", "triton", "flex", "sdpa"))
@pytest.mark.parametrize("name", NAMES)
def test_kernels_refuse_them_by_name(name, impl):
    q, k, v = (x.float() for x in drawn(4))
    code = made(name).float()(q, k)
    with pytest.raises(ValueError, match=r"TileBias|ProductBias"):
        attend(code.q, code.k, v, bias=code.bias, impl=impl)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_layers(name):
    """The bias is formed in float32: bfloat16 costs what rounding q, k and v does."""
    enc, (q, k, v) = made(name), (x.bfloat16() for x in drawn(200))
    truth = enc(q.double(), k.double())
    want = attend(truth.q, truth.k, v.double(), bias=truth.bias, impl="reference")
    code = enc.float()(q, k)
    assert F.mse_loss(attend(code.q, code.k, v, bias=code.bias).double(), want) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_and_continues_from_its_cache(name):
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=11, width=16, layers=2, heads=2, encoding=name, encoding_options=OPTIONS[name]
    )
    model, tokens = Decoder(config), torch.randint(0, 11, (2, 20))
    model(tokens, targets=tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        full, cache = model(tokens), model.cache()
        parts = [
            model(tokens[:, :13], cache=cache),
            *(model(tokens[:, i : i + 1], cache=cache) for i in range(13, 20)),
        ]
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name, options, words",
    (
        ("fire", {"length": 0}, "length of fire must be a positive integer"),
        ("cope", {"positions": 1}, "positions of cope must be an integer of at least 2"),
        ("dape", {"hidden": 0}, "hidden of dape must be a positive integer"),
        ("dape", {"kernel": "alibi"}, 'kernel must be "log" or "power"'),
    ),
)
def test_wrong_options_are_refused_by_name(name, options, words):
    with pytest.raises(ValueError, match=words):
        grape.build(name, **SHAPE, **options)


@pytest.mark.slow
def test_cope_is_that_of_x_transformers():
    """Run with x-transformers 2.31.10. No package on the index has FIRE or DAPE."""
    theirs = pytest.importorskip("x_transformers.x_transformers").CoPE(DIM, HEADS, max_pos=6).double()
    torch.nn.init.normal_(theirs.pos_emb)
    enc, (q, k, _) = made("cope", positions=6), drawn(30)
    enc.embedding.data.copy_(theirs.pos_emb.data)
    scores = q @ k.repeat_interleave(HEADS // KEYS, 1).mT * DIM**-0.5
    hidden = torch.ones(30, 30).triu(1).bool()
    want = theirs(q, scores.masked_fill(hidden, -math.inf))
    assert ((enc(q, k).bias.dense() - want).abs().masked_fill(hidden, 0)).max() < EXACT
