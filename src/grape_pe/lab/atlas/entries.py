"""An entry of the atlas: facts, options, laws and cache of an encoding, and its reach at initialization.

entry = measure("fox", timed=False)
entry.laws.relative, entry.extra_bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import grape_pe

from ...cache import StreamingCache
from ...encodings import Encoding, Facts, build, names
from ...encodings.base import Encoded
from ...encodings.registry import entry, facts
from ...testing import LawErrors, law_errors, moved, sample
from ..errors import LabError
from ..inspect.figure_data import encoding_picture
from .cost import Cost, layer_cost, one_thread

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
#: random tokens for the picture
TOKENS = 256
#: shape for the laws, which do not depend on it
SMALL = {"heads": 4, "head_dim": 16, "width": 24}


@dataclass(frozen=True)
class AtlasEntry:
    """One encoding; its facts are empty where its class has none.

    Bytes per token are for a float32 cache with 8 heads of 64 features. `picture` is that of `inspect` at
    initialization, on random tokens.
    """

    name: str
    facts: Facts
    options: Mapping[str, Any]
    kind: str
    bias: str
    contextual: bool
    parameters: int
    laws: LawErrors
    broken: str | None
    only_1d: bool
    bytes_per_token: int
    picture: Mapping[str, Any] | None = None
    cost: Cost | None = None

    @property
    def extra_bytes(self) -> int:
        """Bytes per token beyond key and value."""
        return self.bytes_per_token - 4 * 2 * WIDTH

    @property
    def relative(self) -> str:
        """Whether the relative law holds, as in the README."""
        if self.broken is None:
            return "yes (1D)" if self.only_1d else "yes"
        listed = ", ".join(f'{key}="{value}"' for key, value in self.facts.law_with.items())
        return f"with `{listed}`" if listed else "no"


@torch.random.fork_rng(devices=[])
def measure(name: str, *, timed: bool = True) -> AtlasEntry:
    """The entry of one encoding; without `timed`, only what is the same on every machine."""
    torch.manual_seed(0)
    encoding = built(name)
    code = _encoded(encoding)
    return AtlasEntry(
        name=name,
        facts=facts(name) or Facts(name, "", "", "", ""),
        options=entry(name).options(),
        kind="transforms q and k" if encoding.transforms else "adds a bias",
        bias=bias_kind(code),
        contextual=encoding.contextual,
        parameters=sum(p.numel() for p in encoding.parameters()),
        laws=law_errors(moved(build(name, **SMALL))),
        broken=encoding.breaks_relative_law,
        only_1d=_only_1d(name),
        bytes_per_token=_cache_bytes(encoding),
        picture=encoding_picture(encoding, name, TOKENS) if timed else None,
        cost=layer_cost(name, WIDTH, HEADS) if timed else None,
    )


def measure_all(
    which: Sequence[str] | None = None, show: Callable[[int, str], None] = lambda done, name: None
) -> list[AtlasEntry]:
    """The entries of all or some names; calls `show` with the number done before each."""
    found = []
    with one_thread():
        for done, name in enumerate(which or names()):
            show(done, name)
            found.append(measure(name))
    return found


def built(name: str) -> Encoding:
    try:
        return build(name, heads=HEADS, head_dim=HEAD_DIM, width=WIDTH)
    except (TypeError, ValueError) as problem:
        raise LabError(str(problem)) from None


def bias_kind(code: Encoded) -> str:
    """The public kind of the bias: none, slope, path, …"""
    known = (c.__name__ for c in type(code.bias).__mro__ if getattr(grape_pe, c.__name__, None) is c)
    found = next(known).removesuffix("Bias").lower()
    return "none" if found == "no" else found


@torch.no_grad()
def _encoded(encoding: Encoding) -> Encoded:
    data = sample(encoding, batch=1, tokens=2)
    return encoding(data.q, data.k, x=data.x, v=data.v, positions=data.positions)


@torch.no_grad()
def _cache_bytes(encoding: Encoding) -> int:
    data, cache = sample(encoding, batch=1, tokens=2), StreamingCache(encoding)
    cache.attend(data.q, data.k, data.v, x=data.x)
    return cache.bytes_per_token


def _only_1d(name: str) -> bool:
    """Whether the relative law fails with two coordinates."""
    return "coords" in entry(name).options() and bool(build(name, **SMALL, coords=2).breaks_relative_law)
