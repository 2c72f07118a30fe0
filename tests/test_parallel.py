"""Context parallelism: several ranks give what one process gives, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import grape_pe as grape
from grape_pe.cache import Layout
from grape_pe.models import Decoder, DecoderConfig
from grape_pe.parallel import ContextParallel
from grape_pe.parallel.over_ring import pairs
from grape_pe.parallel.ring import Ring
from grape_pe.testing import assert_close, sample
from ring_ranks import CASES, DTYPES, HOW, build, learn, learn_language, on_ranks

ALONG_TOKENS = {"y": 2, "x": 1, "q": 2, "k": 2, "v": 2}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[ContextParallel]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield ContextParallel()
    dist.destroy_process_group()


def whole(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The sequence in order, from the chunks 0 and 2N-1, 1 and 2N-2, … of N ranks."""
    chunks = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in chunks] + [second for _, second in reversed(chunks)], dim)


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_give_what_one_process_gives(name: str, ranks: list) -> None:
    for dtype in DTYPES[len(ranks)]:
        assert all(isinstance(each[name, dtype], dict) for each in ranks), ranks[0][name, dtype]
        want = learn(name, dtype, None)
        for n, truth in want.items():
            parts = [each[name, dtype][n] for each in ranks]
            got = whole(parts, ALONG_TOKENS[n]) if n in ALONG_TOKENS else sum(parts[1:], start=parts[0])
            # gradients of parameters in bfloat16 are rounded before they are added up
            if n in ALONG_TOKENS or dtype != torch.bfloat16:
                assert_close(got, truth, dtype, f"{n} of {name} on {len(ranks)} ranks")


def test_the_same_bits_every_time(ranks: list) -> None:
    for each in ranks:
        first, second = each["rope+grape-ap+fox", torch.float64], each["again"]
        assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("how", HOW)
def test_a_language_model_learns_the_same(how: str, ranks: list) -> None:
    """Loss and gradients of all ranks add up to those of one process; KV-shift crosses the borders."""
    found = [each[how] for each in ranks]
    assert all(isinstance(each, dict) for each in found), found[0]
    for n, truth in learn_language(None).items():
        got, size = sum((each[n] for each in found[1:]), start=found[0][n]), truth.abs().max()
        # losses, and gradients of the head, are summed in float32, and divided by `count` in it
        rounded = n in ("loss", "model.embed_tokens.weight") or how in ("ddp", "fsdp")
        assert_close(got / size, truth / size, torch.float32 if rounded else torch.float64, n)


def test_nothing_of_other_ranks_is_kept(ranks: list) -> None:
    _, data = build("fox", torch.float64)
    assert [each["most saved"] for each in ranks] == [data.q.numel() // len(ranks)] * len(ranks)


@pytest.mark.parametrize("name", ["rope", "fox", "grape-ap"])
def test_a_block_keeps_no_more_than_the_docs_state(name: str, alone: ContextParallel) -> None:
    """In bytes a token and feature of the width; the block's parameters apart."""
    model = Decoder(DecoderConfig(width=512, layers=1, heads=4, vocab_size=8, encoding=name)).bfloat16()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    x = torch.randn(1, 32, 512, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.model.layers[0](x, Layout(alone.tokens(32), parallel=alone), model.model.encoding)
    assert 60 < sum(storage.nbytes() for storage in kept.values()) / (32 * 512) < 80


def test_ranks_with_other_shapes_are_refused_by_all(ranks: list) -> None:
    for each in ranks:
        assert "same shapes and dtypes, got [(1, 1, 6, 2) torch.float32" in each["uneven"]
        assert "[(1, 1, 4, 2) torch.float32" in each["uneven"] and "in rank 1" in each["uneven"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_has_the_same_work_in_every_step(size: int) -> None:
    """All pairs of chunks on or below the diagonal, once; two a step, and one more in a rank's own."""
    seen = []
    for rank in range(size):
        ring = Ring(dist.GroupMember.NON_GROUP_MEMBER, rank, size)
        for other in range(size):
            found = list(pairs(ring, other, 8))
            assert len(found) == (3 if other == rank else 2)
            held = dict(zip((0, 4), ring.chunks_of(rank), strict=True))
            seen += [(held[pair.rows.start], pair.number) for pair in found]
    assert sorted(seen) == [(row, col) for row in range(2 * size) for col in range(row + 1)]


def test_one_rank_is_one_device(alone: ContextParallel) -> None:
    for name in ("fox", "grape-ap"):
        got, want = learn(name, torch.float64, alone), learn(name, torch.float64, None)
        for n in want:
            assert_close(got[n], want[n], torch.float64, f"{n} of {name}")


def test_the_layer_takes_part(alone: ContextParallel) -> None:
    layer = grape.Attention(16, heads=2, encoding="rope+fox").double()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    for each in (layer, torch.compile(layer, backend="eager")):
        assert_close(each(alone.split(x), parallel=alone), layer(x), torch.float64, "the layer")


@pytest.mark.parametrize(
    "given, says",
    [
        ({"window": 4}, "without further masks, got window"),
        ({"sinks": 1}, "without further masks, got sinks"),
        ({"documents": torch.zeros(8, dtype=torch.long)}, "without further masks, got documents"),
        ({"bias": grape.TileBias(lambda *_: torch.zeros(1), {}, {})}, "cannot split a TileBias"),
        ({"k": torch.zeros(1, 2, 6, 4)}, "got 8 queries, 6 keys and 8 values"),
        ({"q": torch.zeros(1, 2, 7, 4)}, r"an even number T >= 4 .* got \(1, 2, 7, 4\)"),
        ({"q": torch.zeros(1, 2, 2, 4)}, r"an even number T >= 4 .* got \(1, 2, 2, 4\)"),
    ],
    ids=lambda case: case if isinstance(case, str) else ", ".join(case),
)
def test_what_attend_refuses(given: dict, says: str, alone: ContextParallel) -> None:
    tensors = {name: torch.zeros(1, 2, 8, 4) for name in "qkv"} | given
    with pytest.raises(ValueError, match=says):
        alone.attend(**tensors)


@pytest.mark.parametrize("name", ["xpos", "path", "fox+xpos"])
def test_a_state_that_is_no_sum_is_refused(name: str, alone: ContextParallel) -> None:
    enc = grape.build(name, heads=2, head_dim=8, width=16)
    data = sample(enc)
    with pytest.raises(ValueError, match=r"cannot continue the state of (XPos|PaTH).*state_adds = True"):
        alone.encode(enc, data.q, data.k, x=data.x)


@pytest.mark.parametrize("length", [2, 3, 0])
def test_a_sequence_that_cannot_be_cut_is_refused(length: int, alone: ContextParallel) -> None:
    with pytest.raises(ValueError, match=f"multiple of 2 and at least 4, got {length}"):
        alone.split(torch.zeros(1, length))


def test_what_a_model_refuses(alone: ContextParallel) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model = Decoder(DecoderConfig(width=16, layers=1, heads=2, vocab_size=5))
    given = {"documents": tokens[0], "padding": tokens > 0, "cache": model.cache()}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"parallel=… and {name}=… cannot be used together"):
            model(tokens, parallel=alone, **{name: value})
    windowed = grape.Attention(16, heads=2, encoding="rope", window=3, sinks=1)
    with pytest.raises(ValueError, match="got window"):
        windowed(torch.zeros(1, 8, 16), parallel=alone)


def test_there_is_no_second_derivative(alone: ContextParallel) -> None:
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    (first,) = torch.autograd.grad(alone.attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="context parallelism has no second derivative"):
        first.sum().backward()


def test_it_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="start with torchrun"):
        ContextParallel()
