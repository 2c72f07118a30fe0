"""Streaming equals the full computation, for every encoding, however the sequence is cut."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grape_pe as grape
from grape_pe import testing
from grape_pe.bias import ScoreBias
from grape_pe.layers import KVShift

EXACT = testing.TOL[torch.float64]
NAMES = [*grape.names(), "rope+fox", "grape-m-ctx+grape-a-phase", "grape-m+grape-ap", "path+fox"]
WIDTH, DIM, KV = 5, 8, 2
OPERATIONS = ("one", "some", "ragged", "crop", "each", "fork", "select", "save")
FIELDS = ("q", "k", "v", "x")
TOKEN_AXIS = {"q": 1, "k": 1, "v": 1, "x": 0}


def build(name: str, group: int = 2, dtype: torch.dtype = torch.float64, **options):
    torch.manual_seed(0)
    enc = grape.build(name, heads=KV * group, kv_heads=KV, head_dim=DIM, width=WIDTH, **options)
    with torch.no_grad():
        for parameter in enc.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return enc.to(dtype)


def fresh_tokens(enc, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    shape = enc.shape
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    return {name: draw(n, count, DIM) for name, n in heads.items()} | {"x": draw(count, WIDTH)}


class Oracle:
    """Every sequence kept whole, without padding, and computed anew each time."""

    def __init__(self, enc, shift, batch: int, window: int | None = None):
        self.enc, self.shift, self.window = enc, shift, window
        self.sequences = [fresh_tokens(enc, 0, torch.Generator()) for _ in range(batch)]

    def feed(self, b: int, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        held = self.sequences[b]
        self.sequences[b] = {f: torch.cat([held[f], tokens[f]], TOKEN_AXIS[f]) for f in FIELDS}
        return self.full(b)[:, -tokens["x"].shape[0] :]

    def full(self, b: int) -> torch.Tensor:
        q, k, v, x = (self.sequences[b][f][None] for f in FIELDS)
        if self.shift is not None:
            k, v, _ = self.shift(k, v, x)
        code = self.enc(q, k, x=x, v=v)
        return grape.attend(code.q, code.k, v, bias=code.bias, window=self.window, impl="reference")[0]

    def crop(self, b: int, count: int) -> None:
        keep = self.length(b) - count
        self.sequences[b] = {f: self.sequences[b][f].narrow(TOKEN_AXIS[f], 0, keep) for f in FIELDS}

    def select(self, index: list[int]) -> None:
        self.sequences = [dict(self.sequences[i]) for i in index]

    def length(self, b: int) -> int:
        return self.sequences[b]["x"].shape[0]


def feed(cache, oracle: Oracle, counts: list[int], generator, side: str = "left") -> None:
    """Feed counts[b] tokens to sequence b, padded to the longest, and compare every output."""
    longest = max(counts)
    new = [fresh_tokens(oracle.enc, count, generator) for count in counts]
    pads = [(longest - c, 0) if side == "left" else (0, longest - c) for c in counts]
    stacked = {}
    for f in FIELDS:
        pad = [torch.nn.functional.pad(t[f], (0, 0, *p)) for t, p in zip(new, pads, strict=True)]
        stacked[f] = torch.stack(pad)
    padding = torch.ones(len(counts), longest, dtype=torch.bool)
    for row, (left, _), count in zip(padding, pads, counts, strict=True):
        row[left : left + count] = False
    got = cache.attend(stacked["q"], stacked["k"], stacked["v"], x=stacked["x"], padding=padding)
    for b, (tokens, (left, _)) in enumerate(zip(new, pads, strict=True)):
        want = oracle.feed(b, tokens)
        testing.assert_close(got[b, :, left : left + counts[b]], want, torch.float64, f"sequence {b}")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_the_full_computation(name: str, data):
    enc = build(name, group=data.draw(st.integers(1, 2), "group"))
    shift = KVShift(WIDTH, KV).double() if data.draw(st.booleans(), "shift") else None
    batch = data.draw(st.integers(1, 3), "batch")
    capacity = data.draw(st.sampled_from([None, 200]), "capacity")
    cache, oracle = grape.StreamingCache(enc, shift=shift, capacity=capacity), Oracle(enc, shift, batch)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), "seed"))
    with torch.no_grad():
        feed(cache, oracle, [data.draw(st.integers(1, 5)) for _ in range(batch)], generator)
        for _ in range(data.draw(st.integers(1, 6), "operations")):
            batch = len(oracle.sequences)
            shortest = min(oracle.length(b) for b in range(batch))
            match data.draw(
                st.sampled_from(["one", "some", "ragged", "crop", "each", "fork", "select", "save"])
            ):
                case "one":
                    feed(cache, oracle, [1] * batch, generator)
                case "some":
                    feed(cache, oracle, [data.draw(st.integers(1, 5))] * batch, generator)
                case "ragged":
                    counts = [data.draw(st.integers(1, 4)) for _ in range(batch)]
                    feed(cache, oracle, counts, generator, data.draw(st.sampled_from(["left", "right"])))
                case "crop" if shortest > 1:
                    count = data.draw(st.integers(0, shortest - 1))
                    cache.crop(count)
                    for b in range(batch):
                        oracle.crop(b, count)
                case "each" if shortest > 1:
                    counts = [data.draw(st.integers(0, shortest - 1)) for _ in range(batch)]
                    cache.crop(torch.tensor(counts))
                    for b, count in enumerate(counts):
                        oracle.crop(b, count)
                case "fork":
                    twin = cache.fork()
                    junk = testing.sample(enc, batch=batch, tokens=2, dtype=torch.float64)
                    cache.attend(junk.q, junk.k, junk.v, x=junk.x)
                    cache = twin
                case "select":
                    index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
                    cache.reorder(torch.tensor(index))
                    oracle.select(index)
                case "save":
                    saved = cache.state_dict()
                    cache = grape.StreamingCache(enc, shift=shift, capacity=capacity).load_state_dict(saved)
        feed(cache, oracle, [2] * len(oracle.sequences), generator)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_sliding_window_drops_keys_exactly(name: str, data):
    enc, window = build(name), data.draw(st.integers(1, 9), "window")
    shift = KVShift(WIDTH, KV).double()
    cache = grape.StreamingCache(enc, window=window, shift=shift, rollback=3)
    oracle = Oracle(enc, shift, 2, window)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(12):
            fed = data.draw(st.integers(1, 12))
            feed(cache, oracle, [fed] * 2, generator)
            if data.draw(st.booleans()):
                count = data.draw(st.integers(0, min(3, fed, cache.length - 1)))
                cache.crop(count)
                for b in range(2):
                    oracle.crop(b, count)
    assert cache.tokens.size <= max(64, 4 * (window + 3 + 12))


@pytest.mark.parametrize("name", ["rope", "grape-m-ctx", "alibi", "fox", "grape-a-qk", "grape-a-phase"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_sinks_outlive_the_window(name: str, data):
    enc = build(name)
    window, sinks = data.draw(st.integers(1, 6), "window"), data.draw(st.integers(1, 4), "sinks")
    cache = grape.StreamingCache(enc, window=window, sinks=sinks, rollback=2)
    tokens = testing.sample(enc, tokens=90, dtype=torch.float64)
    code = enc(tokens.q, tokens.k, x=tokens.x)
    want = grape.attend(
        code.q, code.k, tokens.v, bias=code.bias, window=window, sinks=sinks, impl="reference"
    )
    start = 0
    with torch.no_grad():
        while start < 90:
            stop = min(90, start + data.draw(st.integers(1, 30)))
            piece = tokens.cut(slice(start, stop))
            got = cache.attend(piece.q, piece.k, piece.v, x=piece.x)
            testing.assert_close(got, want[:, :, start:stop], torch.float64, f"{start} to {stop}")
            start = stop


class ByIndex(grape.Encoding):
    """A bias of the tokens' indices, which are others once tokens in between are dropped."""

    def encode(self, tokens: grape.Tokens, state: None) -> grape.Encoded:
        zero = tokens.q.new_zeros(1, 1, tokens.q.shape[2])
        bias = ScoreBias(lambda t, j, query, key: 0.5 * (j - t) + key["zero"], {"zero": zero}, {"zero": zero})
        return grape.Encoded(tokens.q, tokens.k, bias)


def test_sinks_are_refused_for_a_function_of_indices():
    enc = ByIndex(grape.HeadShape(2, 4, 2))
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    with pytest.raises(ValueError, match="without sinks"):
        grape.StreamingCache(enc, window=4, sinks=1).append(q, k, v)


@pytest.mark.parametrize("name", ["grape-ap", "path", "rope+grape-ap", "cope"])
def test_sinks_are_refused_where_the_tokens_between_count(name: str):
    cache = grape.StreamingCache(build(name), window=4, sinks=1)
    data = testing.sample(cache.encoding)
    with pytest.raises(ValueError, match="without sinks"), torch.no_grad():
        cache.append(data.q, data.k, data.v, x=data.x)


@pytest.mark.parametrize("name", ["alibi", "fox", "grape-a-qk", "grape-ap", "rope+alibi"])
def test_decoding_skips_keys_without_changing_the_result(name: str):
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, kv_heads=2, head_dim=16, width=8, **SHARP.get(name, {}))
    data = testing.sample(enc, batch=2, tokens=3000, dtype=torch.float32)
    cache = grape.StreamingCache(enc)
    last = data.cut(slice(2998, 3000))
    with torch.no_grad():
        first = data.cut(slice(0, 2998))
        cache.append(first.q, first.k, first.v, x=first.x)
        twin = cache.fork()
        with grape.record_pruning() as report:
            got = cache.attend(last.q, last.k, last.v, x=last.x)
        want = twin.attend(last.q, last.k, last.v, x=last.x, prune=None)
    assert report.fraction > 0.1, report
    testing.assert_close(got, want, torch.float32, name, slack=0.1)


SHARP = {"grape-ap": {"slopes": [0.5, 0.5, 0.25, 0.25]}, "grape-a-qk": {"slopes": [0.5, 0.25, 0.25, 0.125]}}


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap", "grape-a-qk"])
def test_a_split_stream_matches_in_lower_precision(name: str):
    for dtype in (torch.float32, torch.bfloat16):
        enc = build(name, dtype=dtype)
        data = testing.sample(enc, tokens=40, dtype=dtype)
        code = enc(data.q, data.k, x=data.x)
        want = grape.attend(code.q, code.k, data.v, bias=code.bias, impl="reference")
        cache = grape.StreamingCache(enc)
        with torch.no_grad():
            parts = [data.cut(slice(t, min(t + 7, 40))) for t in range(0, 40, 7)]
            got = torch.cat([cache.attend(p.q, p.k, p.v, x=p.x) for p in parts], 2)
        testing.assert_close(got, want, dtype, name)


@pytest.mark.parametrize("part", ["bias", "state", "shift"])
def test_losing_any_part_of_the_cache_is_noticed(part: str):
    """The negative control: drop one thing a token left behind, and the comparison must fail."""
    enc = build({"bias": "fox", "state": "grape-m-ctx", "shift": "rope"}[part])
    shift = KVShift(WIDTH, KV).double() if part == "shift" else None
    cache, oracle = grape.StreamingCache(enc, shift=shift), Oracle(enc, shift, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        feed(cache, oracle, [6, 6], generator)
        table = cache.tokens if part == "bias" else cache.states
        lost = [name for name in table.storage if name.startswith(part)]
        assert lost
        for name in lost:
            table.storage[name].zero_()
        with pytest.raises(AssertionError, match="off by"):
            feed(cache, oracle, [1, 1], generator)


# Positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", grape.names())
def test_rebasing_is_exact_or_refused(name: str):
    enc = build(name)
    data = testing.sample(enc, tokens=9, dtype=torch.float64)
    cache = grape.StreamingCache(enc)
    with torch.no_grad():
        first, rest = data.cut(slice(0, 6)), data.cut(slice(6, 9))
        cache.attend(first.q, first.k, first.v, x=first.x, positions=first.positions + 100)
        before = {key: value.clone() for key, value in cache.tokens.stored().items()}
        if name in ("grape-ap", "path", "logn", "fire"):
            with pytest.raises(ValueError, match="cannot be moved"):
                cache.rebase(90)
            assert all(torch.equal(value, before[key]) for key, value in cache.tokens.stored().items())
            return
        cache.rebase(90)
        got = cache.attend(rest.q, rest.k, rest.v, x=rest.x)
        code = enc(data.q, data.k, x=data.x, positions=data.positions + 10)
        want = grape.attend(code.q, code.k, data.v, bias=code.bias, impl="reference")[:, :, 6:]
    assert cache.next_position.tolist() == [19, 19]
    testing.assert_close(got, want, torch.float64, "rebased", slack=10)


def test_rebasing_a_path_integral_needs_relative_probes():
    enc = build("grape-ap", probe_rotation="relative")
    data = testing.sample(enc, tokens=8)
    cache = grape.StreamingCache(enc)
    with torch.no_grad():
        for part in (slice(0, 5), slice(5, 8)):
            piece = data.cut(part)
            got = cache.attend(piece.q, piece.k, piece.v, x=piece.x)
            cache.rebase(2)
        code = enc(data.q, data.k, x=data.x)
        want = grape.attend(code.q, code.k, data.v, bias=code.bias, impl="reference")[:, :, 5:]
    testing.assert_close(got, want, torch.float64, "relative probes", slack=10)


def test_given_positions_may_have_gaps_and_are_taken_back_exactly():
    enc = build("grape-m")
    data = testing.sample(enc, tokens=6)
    cache = grape.StreamingCache(enc)
    places = torch.tensor([0, 3, 4, 9, 12, 13])
    with torch.no_grad():
        cache.append(data.q, data.k, data.v, x=data.x, positions=places)
        cache.crop(2)
    assert cache.next_position.tolist() == [10, 10]  # after position 9, the last that is left


# Size ---------------------------------------------------------------------------------------------

NUMBERS = {  # beyond keys and values, a token of one sequence, with H heads on Hkv key heads
    "rope": lambda heads, kv: 0,
    "grape-m-ctx": lambda heads, kv: 0,
    "alibi": lambda heads, kv: 1,
    "fox": lambda heads, kv: heads,
    "grape-a-q": lambda heads, kv: 1,
    "grape-a-qk": lambda heads, kv: 1 + heads,
    "grape-a-phase": lambda heads, kv: 1,
    "grape-ap": lambda heads, kv: 8 * kv,
    "path": lambda heads, kv: (DIM + DIM + 1) * kv,
    "pope": lambda heads, kv: DIM * kv,
    "t5": lambda heads, kv: 1,
    "sandwich": lambda heads, kv: 1,
    "relative": lambda heads, kv: 1,
    "fire": lambda heads, kv: 1,
    "cope": lambda heads, kv: DIM * kv,
    "dape": lambda heads, kv: DIM * kv + 1,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_kept_for_a_token(name: str):
    enc = build(name, group=2)
    cache = grape.StreamingCache(enc)
    data = testing.sample(enc, tokens=5)
    with torch.no_grad():
        cache.append(data.q, data.k, data.v, x=data.x)
    assert cache.bytes_per_token == 8 * (2 * KV * DIM + NUMBERS[name](2 * KV, KV))


def test_storage_grows_by_doubling_and_a_static_cache_never_moves():
    enc = build("fox")
    grown, static = grape.StreamingCache(enc), grape.StreamingCache(enc, capacity=300)
    sizes, places = set(), set()
    with torch.no_grad():
        for t in range(300):
            data = testing.sample(enc, tokens=1, seed=t)
            for cache in (grown, static):
                cache.append(data.q, data.k, data.v, x=data.x)
            sizes.add(grown.tokens.size)
            places.add(static.tokens.storage["k"].data_ptr())
    assert sizes == {64, 128, 256, 512} and len(places) == 1
    with pytest.raises(ValueError, match="holds 300 of 300 tokens, and 1 more do not fit"):
        static.append(data.q, data.k, data.v, x=data.x)
    assert static.length == 300 and grown.nbytes > 300 * grown.bytes_per_token


def test_moving_keeps_sums_exact():
    cache = grape.StreamingCache(build("fox", dtype=torch.float32))
    data = testing.sample(cache.encoding, tokens=4, dtype=torch.float32)
    with torch.no_grad():
        cache.append(data.q, data.k, data.v, x=data.x)
    cache.to(dtype=torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in cache.tokens.stored().items()}
    assert kinds["k"] == kinds["v"] == torch.bfloat16 and kinds["bias.0.c_k"] == torch.float64


# Wrong use ----------------------------------------------------------------------------------------


def filled(name: str = "rope", tokens: int = 5, **options):
    cache = grape.StreamingCache(build(name), **options)
    data = testing.sample(cache.encoding, tokens=tokens)
    with torch.no_grad():
        cache.append(data.q, data.k, data.v, x=data.x)
    return cache, data


MISUSES = {
    "continue from": lambda c, d: c.append(d.q, d.k, d.v, x=d.x, positions=torch.arange(5)),
    "and increase": lambda c, d: c.append(d.q, d.k, d.v, x=d.x, positions=torch.tensor([5, 6, 6, 7, 8])),
    "another model, dtype or batch": lambda c, d: c.append(d.q.float(), d.k.float(), d.v.float(), x=d.x),
    "the cache has 5": lambda c, d: c.crop(6),
    "not a saved cache": lambda c, d: c.load_state_dict({}),
    "offset must be finite": lambda c, d: c.rebase(float("inf")),
    "one for each of the 2 sequences": lambda c, d: c.crop(torch.tensor([1])),
    "padding must be a bool tensor": lambda c, d: c.attend(d.q, d.k, d.v, x=d.x, padding=torch.ones(2, 4)),
}


@pytest.mark.parametrize("words", MISUSES)
def test_misuse_is_refused_and_changes_nothing(words: str):
    cache, data = filled()
    before = {key: value.clone() for key, value in cache.tokens.stored().items()}
    with pytest.raises(ValueError, match=words), torch.no_grad():
        MISUSES[words](cache, data)
    assert cache.length == 5 and cache.next_position.tolist() == [5, 5]
    assert all(torch.equal(value, before[key]) for key, value in cache.tokens.stored().items())


@pytest.mark.parametrize("how", ["append", "attend"])
@pytest.mark.parametrize("queries", [1, 5])
def test_values_of_another_kind_than_keys_are_refused_and_change_nothing(how, queries):
    """They would be read by their address in the next step."""
    enc = build("rope+alibi", dtype=torch.float32)
    data = testing.sample(enc, tokens=queries, dtype=torch.float32)
    for v in (
        data.v.double(),
        data.v.bfloat16(),
        data.v[:, :1],
        data.v[:1],
        data.v[:, :, 1:],
        data.v.to("meta"),
    ):
        cache = grape.StreamingCache(enc)
        with pytest.raises((ValueError, TypeError), match=r"\bv\b"), torch.no_grad():
            getattr(cache, how)(data.q, data.k, v)
        assert not cache.length


REFUSED = {
    "crop takes whole numbers of tokens, got 1.5": lambda c: c.crop(1.5),
    "crop takes whole numbers of tokens, got True": lambda c: c.crop(True),
    r"crop takes whole numbers of tokens, got \[1.0, 1.0\]": lambda c: c.crop(torch.ones(2)),
    "select takes a 1-D integer tensor of rows, got list": lambda c: c.select([1, 0]),
    "select takes a 1-D integer tensor of rows, got torch.bool": lambda c: c.select(
        torch.tensor([True, False])
    ),
    "scale must be a number, got Tensor": lambda c: step(c, scale=torch.ones(())),
    "scale must be finite, got nan": lambda c: step(c, scale=float("nan")),
    r"encoding must come from grape.build\(…\), got str": lambda c: grape.StreamingCache("rope"),
}


def step(cache, **options):
    data = testing.sample(cache.encoding, tokens=1)
    return cache.attend(data.q, data.k, data.v, x=data.x, **options)


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_of_the_wrong_kind_are_refused_by_name(words):
    with pytest.raises((ValueError, TypeError), match=words), torch.no_grad():
        REFUSED[words](filled()[0])


def test_settings_are_whole_numbers():
    for wrong in ({"capacity": 2.5}, {"rollback": 1.5}, {"capacity": "8"}):
        with pytest.raises(ValueError, match="capacity must be at least 1 and rollback at least 0"):
            grape.StreamingCache(build("rope"), **wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16, torch.float16, "meta"), ids=str)
def test_torchs_defaults_change_nothing(name, default):
    """Dtypes and devices come from the tensors at hand, whatever a cache is asked to do."""
    options = {"probe_rotation": "relative"} if name == "grape-ap" else {}  # which can be rebased
    enc = build(name, dtype=torch.float32, **options)
    data = testing.sample(enc, tokens=40, dtype=torch.float32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, :2] = True
    ids, places = torch.tensor([0, 0, 1, 1]), torch.tensor([300.0, 301, 302, 304])
    which = torch.tensor([1, 0])

    def feed(cache, first: int, count: int, **where) -> torch.Tensor:
        part = slice(first, first + count)
        q, k, v = (t[:, :, part] for t in (data.q, data.k, data.v))
        return cache.attend(q, k, v, x=data.x[:, part], **where)

    def run(change: bool) -> list[torch.Tensor]:
        try:
            if change:
                (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
            ragged, real, packed = (grape.StreamingCache(enc) for _ in range(3))
            found = [feed(ragged, 0, 6, padding=padding), feed(ragged, 6, 1), feed(ragged, 7, 5)]
            ragged.crop([1, 2]).select(which).repeat(2).crop(1)
            ragged = ragged.select(which).fork()
            found += [ragged.next_position, feed(ragged, 12, 1), feed(ragged, 13, 3)]
            found.append(feed(ragged.load_state_dict(ragged.state_dict()), 16, 1))
            found += [feed(real, 0, 4, positions=places), real.next_position]
            found += [feed(real, 4, 1), feed(real, 5, 3)]
            with contextlib.suppress(ValueError):  # refused by some: then also under the other default
                found += [feed(real.rebase(2), 8, 1), feed(packed, 0, 4, documents=ids)]
                found.append(feed(packed, 4, 1, documents=ids[3:]))
            found.append(feed(grape.StreamingCache(enc), 0, 0))
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        return found

    with torch.no_grad():
        for want, got in zip(run(False), run(True), strict=True):
            assert got.dtype == want.dtype and torch.equal(want, got)


@pytest.mark.parametrize("after", [2**24, 0.5 + 2**24, 2**40])
def test_positions_far_out_go_on_exactly(after):
    """Also where one sequence has no token yet."""
    enc = build("alibi", dtype=torch.float32)
    data = testing.sample(enc, tokens=12, dtype=torch.float32)
    cache = grape.StreamingCache(enc)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True
    places = torch.arange(3, dtype=torch.float64 if isinstance(after, float) else torch.long) + after
    parts = [slice(0, 3), slice(3, 4), slice(4, 6)]
    with torch.no_grad():
        q, k, v = (t[:, :, parts[0]] for t in (data.q, data.k, data.v))
        cache.append(q, k, v, positions=places, padding=padding)
        for part in parts[1:]:
            q, k, v = (t[:, :, part] for t in (data.q, data.k, data.v))
            cache.append(q, k, v, positions=torch.arange(part.start, part.stop, dtype=places.dtype) + after)
        assert cache.next_position.tolist() == [6 + after, 6 + after]
        cache.append(q, k, v)
    assert cache.next_position.tolist() == [8 + after, 8 + after]


def test_bad_settings_and_lost_history_are_named():
    enc = build("rope")
    for options, words in (
        ({"window": 0}, "window must be None or the number of tokens"),
        ({"sinks": 2}, "set window"),
        ({"rollback": -1}, "rollback at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            grape.StreamingCache(enc, **options)
    stateful, _ = filled("grape-m-ctx", tokens=40, rollback=4)
    with pytest.raises(ValueError, match="rollback=30"):
        stateful.crop(30)
    assert filled("rope", tokens=40, rollback=4)[0].crop(30).length == 10
    saved = filled("rope")[0].state_dict()
    with pytest.raises(ValueError, match="this cache has"):
        grape.StreamingCache(build("fox")).load_state_dict(saved)
    shifted = grape.StreamingCache(enc, shift=KVShift(WIDTH, KV).double())
    data = testing.sample(enc)
    with pytest.raises(ValueError, match="KV-shift needs"):
        shifted.append(data.q, data.k, data.v)


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_skipping_keys_is_exact_with_any_number_of_threads(threads, monkeypatch):
    """Heads that are attended together read from the first key that any of them needs."""
    torch.manual_seed(0)
    heads, count = 5, 2300
    enc = grape.build("alibi", heads=heads, head_dim=8)
    q, k, v = (torch.randn(1, heads, count, 8) for _ in range(3))
    cache = grape.StreamingCache(enc)
    cache.append(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with grape.record_pruning() as report:
        got = cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:])
    assert report.fraction > 0.1
    code = enc(q, k)
    bias = code.bias.queries(slice(count - 1, count))
    want = grape.attend(code.q[:, :, -1:], code.k, v, bias=bias, impl="reference")
    torch.testing.assert_close(got, want, rtol=testing.TOL[torch.float32], atol=testing.TOL[torch.float32])
