"""Draw encodings and compositions with random options."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...encodings import Encoding, build
from .draw import Sizes

Options = Callable[[random.Random], dict[str, Any]]
WIDTH = 6  # of the block's input

LAYOUTS = ("half", "interleaved")
OPTIONS: dict[str, Options] = {
    "nope": lambda r: {},
    "rope": lambda r: {
        "layout": r.choice(LAYOUTS),
        "per_head": r.random() < 0.3,
        "rotary_heads": r.choice((None, 1)),
    },
    "grape-m": lambda r: {"layout": r.choice(LAYOUTS), "per_head": r.random() < 0.5},
    "grape-m-ctx": lambda r: {
        "gate": r.choice(("sigmoid", "softplus")),
        "phase_per_head": r.random() < 0.5,
        "phase_per_plane": r.random() < 0.5,
    },
    "string-cayley": lambda r: {"basis_per_head": r.random() < 0.5},
    "string-circulant": lambda r: {"layout": r.choice(LAYOUTS)},
    "xpos": lambda r: {"scale_base": r.choice((64.0, 512.0)), "layout": r.choice(LAYOUTS)},
    "pope": lambda r: {},
    "grape-m-basis": lambda r: {"basis_per_head": r.random() < 0.5, "layout": r.choice(LAYOUTS)},
    "grape-m-plane": lambda r: {"tied": r.random() < 0.5},
    "grape-m-mix": lambda r: {"rank": 2, "per_head": r.random() < 0.5},
    "liere": lambda r: {"per_head": r.random() < 0.5},
    # not rank 1: without a convolution the gradient of `down` would be exactly zero, which leaves only rounding errors
    "path": lambda r: {"rank": r.choice((2, 4)), "conv": r.choice((0, 3))},
    "alibi": lambda r: {"both": r.random() < 0.3},
    "t5": lambda r: {"buckets": r.choice((4, 32)), "max_distance": 20, "both": r.random() < 0.5},
    "kerple-log": lambda r: {},
    "kerple-power": lambda r: {},
    "sandwich": lambda r: {"dim": r.choice((2, 16))},
    "relative": lambda r: {
        "tables": r.choice((1, 3)),
        "reach": r.choice((1, 8, 100)),
        "both": r.random() < 0.5,
        "beyond": r.choice(("zero", "last", "-inf")),
    },
    "logn": lambda r: {"length": r.choice((2, 8))},
    "fox": lambda r: {"forget_bias": r.choice((0.0, 3.0))},
    "grape-a-shift": lambda r: {},
    "grape-a-q": lambda r: {},
    "grape-a-k": lambda r: {},
    "grape-a-qk": lambda r: {},
    "grape-a-dict": lambda r: {"atoms": r.choice((1, 3))},
    "grape-a-phase": lambda r: {
        "gate": r.choice(("sigmoid", "softplus")),
        "phase_per_head": r.random() < 0.5,
    },
    "grape-ap": lambda r: {
        "probe_rotation": r.choice(("key", "relative", "none")),
        "link": r.choice(("logsigmoid", "bounded")),
        "normalize_query": r.random() < 0.5,
        **r.choice(({}, {"probe_dim": 3}, {"probe": "q"}, {"probe": "k"})),
    },
}
GRAPE_M = ("grape-m", "grape-m-ctx", "grape-m-basis", "grape-m-plane", "grape-m-mix")
ROTATIONS = ("rope", *GRAPE_M, "liere", "string-cayley", "string-circulant", "xpos", "pope")
WIDE = ("grape-m-plane", "grape-m-mix", "path", "string-circulant")
DISTANCES = ("t5", "kerple-log", "kerple-power", "sandwich", "relative")
BIASES = [name for name in OPTIONS if name.startswith(("alibi", "fox", "grape-a")) and name != "grape-a-dict"]
BIASES += DISTANCES


def draw_encoding(rng: random.Random, s: Sizes) -> Encoding:
    """Draw an encoding, or a rotation with one or two biases, and add noise to its parameters."""
    if rng.random() < 0.6:
        parts = [rng.choice(list(OPTIONS))]
    else:
        parts = [rng.choice((*ROTATIONS, "nope", "path")), *rng.sample(BIASES, rng.choice((1, 2)))]
    if s.width < 3:  # too few features for these encodings
        parts = [part for part in parts if part not in WIDE] or ["nope"]
    options: dict[str, Any] = {part: OPTIONS[part](rng) for part in parts}
    if len(parts) == 1:
        options = options[parts[0]]
        several = parts[0] in ("rope", "grape-m", "alibi", "grape-a-qk", "liere") and not options.get("both")
        if several and rng.random() < 0.3:
            options["coords"] = rng.choice((2, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 30))
        encoding = build(
            "+".join(parts), heads=s.heads, kv_heads=s.kv_heads, head_dim=s.width, width=WIDTH, **options
        )
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return encoding


def draw_positions(
    rng: random.Random, generator: torch.Generator, encoding: Encoding, s: Sizes, far: bool
) -> Tensor | None:
    """Draw positions: default, shifted, different by sequence, or real; for several coordinates a random grid.

    `far` positions are for outputs only, because the gradient of a frequency is then a difference of huge numbers.
    """
    if encoding.coords > 1:
        return torch.randint(0, 9, (s.keys, encoding.coords), generator=generator)
    kind = rng.choice(("default", "default", "shifted", "rows", "real"))
    if kind == "default":
        return None
    if kind == "real":
        return torch.rand(s.keys, generator=generator).cumsum(-1)
    start = rng.choice((3, 1000, 1 << 20)) if far else rng.choice((3, 50))
    if kind == "shifted":
        return torch.arange(start, start + s.keys)
    return torch.arange(s.keys) + torch.randint(0, start, (s.batch, 1), generator=generator)
