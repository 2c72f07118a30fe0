"""Sequences of different lengths, and everything a cache must keep through every operation."""

from __future__ import annotations

import pytest
import torch

import grape_pe as grape
from grape_pe import testing
from grape_pe.attention import key_bound
from grape_pe.layers import KVShift

WIDTH, DIM, KV = 5, 8, 2


def build(name: str, dtype: torch.dtype = torch.float64, **options):
    torch.manual_seed(0)
    enc = grape.build(name, heads=2 * KV, kv_heads=KV, head_dim=DIM, width=WIDTH, **options)
    return enc.to(dtype)


def filled(name: str = "rope", tokens: int = 200, batch: int = 2, **options):
    """A cache, all the tokens it is fed, and how many of them it holds."""
    cache = grape.StreamingCache(build(name), **options)
    data = testing.sample(cache.encoding, batch=batch, tokens=tokens + 40, dtype=torch.float64)
    first = data.cut(slice(0, tokens))
    with torch.no_grad():
        cache.append(first.q, first.k, first.v, x=first.x)
    return cache, data


def next_tokens(cache, data, kept: list[int], count: int = 3, **masks):
    """Feed `count` new tokens after the first kept[b] of each sequence; compare with each alone."""
    new = data.cut(slice(data.q.shape[2] - count, data.q.shape[2]))
    with torch.no_grad():
        got = cache.attend(new.q, new.k, new.v, x=new.x)
        for b, n in enumerate(kept):
            index = torch.tensor([*range(n), *range(data.q.shape[2] - count, data.q.shape[2])])
            q, k, v = (t[b : b + 1].index_select(2, index) for t in (data.q, data.k, data.v))
            x = data.x[b : b + 1, index]
            if cache.shift is not None:
                k, v, _ = cache.shift(k, v, x)
            code = cache.encoding(q, k, x=x)
            want = grape.attend(code.q, code.k, v, bias=code.bias, impl="reference", **masks)[:, :, n:]
            testing.assert_close(got[b : b + 1], want, torch.float64, f"sequence {b}")


@pytest.mark.parametrize("name", ["rope", "fox", "grape-m-ctx", "grape-ap"])
def test_cropping_each_sequence_twice(name):
    cache, data = filled(name, rollback=200, shift=KVShift(WIDTH, KV).double())
    cache.crop(torch.tensor([120, 0]))
    cache.crop([10, 0])
    assert cache.next_position.tolist() == [70, 200] and cache.sequences.lengths == [70, 200]
    next_tokens(cache, data, [70, 200])


@pytest.mark.parametrize("name", ["rope", "fox"])
def test_a_padded_call_and_a_crop_with_a_small_rollback(name):
    cache, data = filled(name, tokens=20, rollback=2, shift=KVShift(WIDTH, KV).double())
    new = data.cut(slice(20, 24))
    padding = torch.tensor([[True, False, False, True], [False] * 4])
    with torch.no_grad():
        cache.append(new.q, new.k, new.v, x=new.x, padding=padding)
        assert cache.sequences.lengths == [22, 24]
        cache.crop(1)
        with pytest.raises(ValueError, match="rollback=2"):
            cache.crop(torch.tensor([0, 2]))
        cache.crop(torch.tensor([0, 1]))
    assert cache.next_position.tolist() == [21, 22]
    order = torch.tensor([[*range(20), 21], [*range(21)]])
    rows = [data.x[b, index] for b, index in enumerate(order)]
    assert all(len(row) == 21 for row in rows)
    # sequence 1 holds its first 22 tokens; sequence 0 its first 20 and token 21
    data = testing.Sample(
        *(torch.cat([t[:, :, :20], torch.cat([t[:1, :, 21:22], t[1:, :, 20:21]]), t[:, :, 21:]], 2)
          for t in (data.q, data.k, data.v)),
        torch.cat([data.x[:, :20], torch.cat([data.x[:1, 21:22], data.x[1:, 20:21]]), data.x[:, 21:]], 1),
        data.positions,
    )  # fmt: skip
    next_tokens(cache, data, [21, 22])


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("counts", [[2, 2], [2, 0]])
def test_windows_and_sinks_survive_cropping_each_sequence(sinks, counts):
    cache, data = filled("fox", tokens=30, window=4, sinks=sinks, rollback=3)
    cache.crop(torch.tensor(counts))
    twin = cache.fork()
    next_tokens(cache, data, [30 - c for c in counts], window=4, **({"sinks": sinks} if sinks else {}))
    with torch.no_grad():
        for t in range(300):
            one = testing.sample(twin.encoding, tokens=1, seed=t, dtype=torch.float64)
            twin.append(one.q, one.k, one.v, x=one.x)
    assert twin.tokens.size <= 64 and not twin.tokens.lead


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_a_window_counts_tokens_and_not_padding(side):
    enc = build("grape-ap")
    data = testing.sample(enc, tokens=9, dtype=torch.float64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, {"left": [0, 1, 2], "right": [6, 7, 8], "between": [1, 4, 6]}[side]] = True
    kept = torch.nonzero(~padding[0]).flatten()
    cache = grape.StreamingCache(enc, window=3)
    with torch.no_grad():
        got = []
        for part in (slice(0, 5), slice(5, 9)):
            p = data.cut(part)
            got.append(cache.attend(p.q, p.k, p.v, x=p.x, padding=padding[:, part]))
        got = torch.cat(got, 2)
        q, k, v = (t[:1, :, kept] for t in (data.q, data.k, data.v))
        code = enc(q, k, x=data.x[:1, kept])
        want = grape.attend(code.q, code.k, v, bias=code.bias, window=3, impl="reference")
    testing.assert_close(got[:1, :, kept], want, torch.float64, side)
    assert not got[0, :, padding[0]].any()


def test_forks_and_saves_do_not_follow_the_original():
    cache, data = filled("fox")
    cache.crop(1)
    twin, saved = cache.fork(), cache.state_dict()
    next_tokens(cache, data, [199, 199], count=20)
    assert twin.next_position.tolist() == [199, 199] and saved["next"] == [199, 199]
    next_tokens(twin, data, [199, 199])
    next_tokens(grape.StreamingCache(twin.encoding).load_state_dict(saved), data, [199, 199])


@pytest.mark.parametrize("setting", ["window", "sinks", "rollback", "shift"])
def test_a_saved_cache_loads_only_into_one_with_the_same_settings(setting):
    cache, _ = filled("rope", tokens=30, window=16, sinks=1)
    options = {"window": 16, "sinks": 1, "rollback": 128}
    options |= {"shift": KVShift(WIDTH, KV).double()} if setting == "shift" else {setting: 2}
    other = grape.StreamingCache(cache.encoding, **options)
    with pytest.raises(ValueError, match=f"the saved cache has {setting}="):
        other.load_state_dict(cache.state_dict())
    assert other.length == 0


def test_rebasing_by_a_float_is_whole_or_nothing():
    cache, data = filled("grape-m", tokens=30)
    one, other = cache.fork().rebase(2), cache.fork().rebase(2.0)
    assert one.next_position.tolist() == other.next_position.tolist() == [28, 28]
    assert torch.equal(one.tokens.view("k"), other.tokens.view("k"))
    next_tokens(other, data, [30, 30])
    broken, _ = filled("grape-ap", tokens=5)
    before = broken.state_dict()
    with pytest.raises(ValueError, match="relative"):
        broken.rebase(2.0)
    assert all(torch.equal(t, before[f"tokens.{n}"]) for n, t in broken.tokens.stored().items())
    assert broken.next_position.tolist() == [5, 5]


def test_no_tokens_and_only_padding():
    for name in ("rope", "fox", "path", "grape-ap"):
        cache, none = grape.StreamingCache(build(name)), testing.sample(build(name), tokens=0)
        with torch.no_grad():
            assert cache.attend(none.q, none.k, none.v, x=none.x).shape == (2, 2 * KV, 0, DIM)
            data = testing.sample(build(name), tokens=6)
            hidden = torch.ones(2, 6, dtype=torch.bool)
            assert not cache.attend(data.q, data.k, data.v, x=data.x, padding=hidden).any()
            assert cache.length == 0
            want = grape.StreamingCache(cache.encoding).attend(data.q, data.k, data.v, x=data.x)
            got = cache.attend(data.q, data.k, data.v, x=data.x)
            testing.assert_close(got, want, torch.float64, name)
            assert not cache.attend(data.q, data.k, data.v, x=data.x, padding=hidden).any()
            assert cache.length == 6


def test_several_coordinates_take_padding():
    enc = build("rope", coords=2)
    data = testing.sample(enc, batch=2, tokens=6, dtype=torch.float64)
    padding = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    kept = torch.nonzero(~padding[0]).flatten()
    cache = grape.StreamingCache(enc)
    with torch.no_grad():
        got = cache.attend(data.q, data.k, data.v, positions=data.positions, padding=padding)
        code = enc(data.q[:1, :, kept], data.k[:1, :, kept], positions=data.positions[kept])
        want = grape.attend(code.q, code.k, data.v[:1, :, kept], bias=code.bias, impl="reference")
    testing.assert_close(got[:1, :, kept], want, torch.float64, "coords=2")


def test_documents_see_only_themselves():
    enc = build("rope+fox")
    shift = KVShift(WIDTH, KV).double()
    data = testing.sample(enc, tokens=9, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    cache = grape.StreamingCache(enc, shift=shift)
    with torch.no_grad():
        parts = [data.cut(part) for part in (slice(0, 4), slice(4, 5), slice(5, 9))]
        got = [
            cache.attend(p.q, p.k, p.v, x=p.x, documents=ids[p.positions[0] : p.positions[-1] + 1])
            for p in parts
        ]
        for start, stop in ((0, 3), (3, 7), (7, 9)):
            p = data.cut(slice(start, stop))
            k, v, _ = shift(p.k, p.v, p.x)
            code = enc(p.q, k, x=p.x)
            want = grape.attend(code.q, code.k, v, bias=code.bias, impl="reference")
            testing.assert_close(torch.cat(got, 2)[:, :, start:stop], want, torch.float64, f"{start}")
        cache.crop(2)  # the third document; the second goes on
    assert cache.next_position.tolist() == [4, 4]
    with pytest.raises(ValueError, match="convolution"):
        grape.StreamingCache(build("path")).append(data.q, data.k, data.v, x=data.x, documents=ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_key_bound_is_an_upper_bound(dtype):
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1.0, 1e4):
        k = (scale * torch.randn(2, 3, 500, 64, generator=generator, dtype=torch.float64)).to(dtype)
        exact = k.double().norm(dim=-1).amax(-1)
        bound = key_bound(k)
        assert (bound.double() >= exact).all()
        assert ((bound.double() <= exact * 1.001 + 1e-17) | bound.isinf()).all()


def test_the_key_bound_follows_every_operation(monkeypatch):
    monkeypatch.setattr("grape_pe.cache.stream.BOUND_FROM", 1)
    cache, _ = filled("fox", tokens=20, batch=3, rollback=20)

    def right() -> bool:
        true = cache.tokens.view("k").norm(dim=-1).amax(-1)
        return bool((cache._key_bound() >= true).all())

    with torch.no_grad():
        for t, change in enumerate(
            [
                lambda: cache.crop(3),
                lambda: cache.select(torch.tensor([2, 0])),
                lambda: cache.crop(torch.tensor([1, 4])),
                lambda: cache.rebase(3),
                lambda: cache.to(dtype=torch.float64),
            ]
        ):
            assert right()
            change()
            assert right()
            new = testing.sample(cache.encoding, batch=len(cache.sequences.lengths), tokens=2, seed=t)
            cache.append(9 * new.q, 9 * new.k, new.v, x=new.x)
            assert right()


def test_gradients_pass_through_the_call_and_stop_at_the_cache():
    enc = build("fox")
    data = testing.sample(enc, tokens=8, dtype=torch.float64)
    first, rest = data.cut(slice(0, 5)), data.cut(slice(5, 8))
    cache = grape.StreamingCache(enc)
    k0 = first.k.clone().requires_grad_()
    y = cache.attend(first.q, k0, first.v, x=first.x)  # a first call: all gradients
    code = enc(first.q, first.k, x=first.x)
    again = first.k.clone().requires_grad_()
    want = grape.attend(code.q, enc(first.q, again, x=first.x).k, first.v, bias=code.bias, impl="reference")
    expected = torch.autograd.grad(want.square().sum(), again)[0]
    testing.assert_close(torch.autograd.grad(y.square().sum(), k0)[0], expected, torch.float64, "first call")
    assert not any(t.requires_grad for t in cache.tokens.storage.values())
    k1 = rest.k.clone().requires_grad_()
    y = cache.attend(rest.q, k1, rest.v, x=rest.x)
    k2 = rest.k.clone().requires_grad_()
    code = enc(data.q, torch.cat([first.k, k2], 2), x=data.x)
    want = grape.attend(code.q, code.k, data.v, bias=code.bias, impl="reference")[:, :, 5:]
    got, expected = (torch.autograd.grad(o.square().sum(), k)[0] for o, k in ((y, k1), (want, k2)))
    testing.assert_close(got, expected, torch.float64, "second call")
    with pytest.raises(ValueError, match=r"no_grad"):
        cache.attend(rest.q, k1, rest.v, x=rest.x, padding=torch.tensor([[True, False, False], [False] * 3]))
    assert cache.length == 8


def test_inference_mode_and_no_grad_write_to_the_same_cache():
    cache, data = filled("fox", tokens=10)
    with torch.inference_mode():
        one = data.cut(slice(10, 11))
        fresh = grape.StreamingCache(cache.encoding)
        fresh.append(one.q, one.k, one.v, x=one.x)
        cache.append(one.q, one.k, one.v, x=one.x)
    with torch.no_grad():
        cache.append(one.q, one.k, one.v, x=one.x)
        fresh.append(one.q, one.k, one.v, x=one.x)
    assert cache.length == 12 and fresh.length == 2


@pytest.mark.parametrize(
    "name", ["rope", "fox", "grape-m-ctx", "grape-ap", "grape-a-qk", "path", "t5", "relative", "sandwich"]
)
def test_a_step_reads_no_values(name, monkeypatch):
    """On a GPU every such read waits for the device."""
    cache, data = filled(name, tokens=20, shift=KVShift(WIDTH, KV).double())
    cache.crop(torch.tensor([3, 0]))
    one = data.cut(slice(20, 21))

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for method in ("__bool__", "item", "tolist", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    with torch.no_grad():
        layout = cache._layout(one.q, one.k, one.x)
        seen = cache.extend(one.q, one.k, one.v, one.x, layout)
    assert seen.k.shape[2] == 21
