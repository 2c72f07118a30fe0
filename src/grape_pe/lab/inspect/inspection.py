"""The diagnostics of one encoding, by its name or inside a trained model.

    found = inspect("grape-ap")                 # at its initial state, on random tokens
    found = inspect("out/run")                  # a run, its final/ directory or any saved model of ours

Definitions. *Reach of the bias*: the distance at which exp(mean bias) first falls below 1/2, and below 1/e.
*Reach of attention*: the distance within which half, and 90%, of a head's attention lies, median over the
later half of the text. *Residual of the relative law*: the largest change of any causal score, relative to
max(1, |score|), when all positions are shifted by `SHIFT`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...encodings import Encoding, build, names
from ...encodings.additive import FoX, PhaseSlope
from ...encodings.base import NoPE
from ...encodings.path import PaTH
from ...encodings.rotary import ContextualRotary
from ...models import Decoder
from ...testing import TOL, relative_law_error
from ..errors import LabError
from ..written import read_name
from .capture import (
    LayerView,
    Reach,
    frequencies,
    gates,
    observe,
    observe_encoding,
    parts_of,
    reach,
    rotation_of,
)
from .figure_data import encoding_picture, picture
from .singular_values import SpectralRow, spectral_rows

#: how far positions are shifted to measure the relative law, on how many tokens
SHIFT, LAW_TOKENS = 1000, 96
BINS = 16
#: encodings whose scores never look at positions, only at running sums or at the path
WITHOUT_POSITIONS = (NoPE, FoX, PhaseSlope, ContextualRotary, PaTH)
TEXT = (
    "A vine has no trunk to stand on. It climbs: each tendril turns until it touches something, and then "
    "holds. The leaves nearest the light matter most, yet the first root still feeds them all. In spring the "
    "grower cuts the vine back to a few buds, because a plant that keeps every branch bears little fruit. By "
    "autumn the same grower counts the clusters, weighs one grape in the hand, and says: this year the vine "
    "forgot well."
)


@dataclass(frozen=True)
class Spectrum:
    """Radians a position for each plane; `moved` is the largest relative change since the start."""

    frequencies: list[list[float]]
    wavelengths: list[list[float | None]]
    moved: float | None


@dataclass(frozen=True)
class Histogram:
    """The values of one gate of one head on the text."""

    gate: str
    head: int | None
    low: float
    high: float
    median: float
    counts: list[int]


@dataclass(frozen=True)
class Law:
    """`holds` is None where the encoding itself says it does not keep the law; `note` explains."""

    shift: int
    residual: float
    tolerance: float
    holds: bool | None
    note: str


@dataclass(frozen=True)
class LayerInspection:
    """Everything about one layer."""

    layer: int
    spectrum: Spectrum | None
    reach: list[Reach]
    histograms: list[Histogram]
    law: Law
    spectral: list[SpectralRow]
    spectral_about: str


@dataclass(frozen=True)
class Inspection:
    """What `grape inspect` shows."""

    name: str
    encoding: str
    sample: str
    tokens: int
    biased: bool
    layers: list[LayerInspection]
    picture: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Everything but the picture, which has a page of its own."""
        return {key: value for key, value in asdict(self).items() if key != "picture"}


def inspect(what: str, heads: int = 8, head_dim: int = 64, tokens: int = 128) -> Inspection:
    """Inspect a checkpoint's directory or an encoding by name.

    Args:
        what: a run, its final/, a directory written by `save_decoder`, or a name such as "rope+fox" or
            "fox[forget_bias=4]".
        heads: query heads of an encoding given by name.
        head_dim: its features per head.
        tokens: length of the sequence that is looked at.
    """
    if Path(what).is_dir():
        return inspect_checkpoint(Path(what))
    name, options = read_name(what)
    try:
        encoding = build(name, heads=heads, head_dim=head_dim, width=heads * head_dim, **options)
    except (TypeError, ValueError) as problem:
        raise LabError(f"{_unknown(name)}{' '.join(str(problem).split())}") from None
    if encoding.coords > 1:
        raise LabError(f"{what}: grape inspect shows encodings over distances in a text; leave coords at 1")
    view = observe_encoding(encoding, tokens)
    drawn = encoding_picture(encoding, name, tokens)
    return _inspection(what, what, "random tokens, initial state", [view], drawn)


def _unknown(what: str) -> str:
    near = difflib.get_close_matches(what, names(), n=1)
    return f"no directory {what}, and as an encoding: " if not near or "/" in what else ""


def inspect_checkpoint(directory: Path) -> Inspection:
    """Inspect a trained model on a sample text."""
    from ..train.saved_model import load_model

    try:
        model = load_model(directory)
    except (OSError, ValueError) as problem:
        raise LabError(str(problem)) from None
    broken = [name for name, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if broken:
        raise LabError(
            f"the model in {directory} diverged: {broken[0]} and {len(broken) - 1} others are not finite"
        )
    tokens, words, about = _sample_text(directory, model)
    views = observe(model, tokens)
    return _inspection(
        str(directory), model.config.encoding_label, about, views, picture(model, tokens, words)
    )


def _sample_text(where: Path, model: Decoder) -> tuple[Tensor, list[str], str]:
    """The sample text in the model's own tokens; random tokens where it has no tokenizer."""
    from ..data import load_tokenizer
    from ..train.saved_model import tokenizer_directory

    try:
        tokenizer = load_tokenizer(tokenizer_directory(where))
    except LabError:  # a model of a generated task, or one saved by hand
        return _random_tokens(model)
    ids = tokenizer.encode(TEXT)[:256]
    return torch.tensor(ids), [tokenizer.decode([i]) for i in ids], f"a text of {len(ids)} tokens"


def _random_tokens(model: Decoder) -> tuple[Tensor, list[str], str]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(model.config.vocab_size, (128,), generator=generator)
    return drawn, [str(i) for i in drawn.tolist()], "128 random tokens (the model has no tokenizer)"


def _inspection(
    name: str, encoding: str, about: str, views: Sequence[LayerView], drawn: dict[str, Any]
) -> Inspection:
    layers = [inspect_layer(view) for view in views]
    return Inspection(name, encoding, about, views[0].length, views[0].bias() is not None, layers, drawn)


@torch.no_grad()
def inspect_layer(view: LayerView) -> LayerInspection:
    """All diagnostics of one observed layer."""
    rows, about = spectral_rows(view)
    return LayerInspection(
        view.layer, _spectrum(view), reach(view), _histograms(view), _law(view), rows, about
    )


def _spectrum(view: LayerView) -> Spectrum | None:
    part = rotation_of(view.encoding)
    found = None if part is None else frequencies(part)
    if found is None:
        return None
    now, initial = found
    moved = None
    if initial is not None:
        change = (now / initial - 1).abs()
        moved = float(change[initial.expand_as(now) != 0].max()) if now.numel() else None
    rows = now.tolist()
    return Spectrum(rows, [[2 * math.pi / f if f else None for f in row] for row in rows], moved)


def _histograms(view: LayerView) -> list[Histogram]:
    out = []
    for gate in gates(view):
        shared = gate.values.shape[0] == 1
        for head, values in enumerate(gate.values):
            low, high = float(values.min()), float(values.max())
            wide = high - low > 1e-12
            counts = torch.histc(values, BINS, low, high).long().tolist() if wide else [len(values)]
            middle = float(values.median())
            out.append(Histogram(gate.name, None if shared else head, low, high, middle, counts))
    return out


def _law(view: LayerView) -> Law:
    residual = relative_law_error(view.encoding, view.data.cut(slice(0, LAW_TOKENS)), shift=SHIFT)
    tolerance = TOL[view.data.q.dtype]
    return Law(SHIFT, residual, tolerance, *_judged(view.encoding, residual, tolerance))


def _judged(encoding: Encoding, residual: float, tolerance: float) -> tuple[bool | None, str]:
    broken = encoding.breaks_relative_law
    if broken:
        return None, f"not promised: {broken}"
    if all(isinstance(part, WITHOUT_POSITIONS) for part in parts_of(encoding)):
        return residual <= tolerance, "holds of itself: scores read running sums of content, never positions"
    if residual <= tolerance:
        return True, "holds: scores depend on distances only"
    return False, f"BROKEN: more than the {tolerance:g} that rounding explains"
