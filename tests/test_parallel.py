"""Context parallelism: several ranks give what one process gives, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import grape_pe as grape
from grape_pe.parallel import ContextParallel
from grape_pe.parallel.ring import Ring
from grape_pe.testing import assert_close
from ring_ranks import CASES, DTYPES, TOKENS, learn, on_ranks, refusal

ALONG_TOKENS = {"y": 2, "x": 1, "q": 2, "k": 2, "v": 2}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(request.param, tmp_path_factory.mktemp("ranks"))


def whole(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The sequence in order, from the chunks 0 and 2N-1, 1 and 2N-2, … of N ranks."""
    chunks = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in chunks] + [second for _, second in reversed(chunks)], dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_several_ranks_give_what_one_process_gives(name: str, dtype: torch.dtype, ranks: list) -> None:
    found = [each[name, dtype] for each in ranks]
    assert all(isinstance(each, tuple) for each in found), found[0]
    for each, again in found:
        assert all(torch.equal(each[n], again[n]) for n in each)
    parts = [each for each, _ in found]
    want = learn(name, dtype, None)
    assert parts[0].keys() == want.keys()
    for n, truth in want.items():
        mine = [part[n] for part in parts]
        got = whole(mine, ALONG_TOKENS[n]) if n in ALONG_TOKENS else sum(mine[1:], start=mine[0])
        assert_close(got, truth, dtype, f"{n} of {name} on {len(ranks)} ranks")
