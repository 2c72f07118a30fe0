"""Statistics of an encoding in training: frequencies, rates, and bias by distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...bias import Bias
from ...encodings import Encoding
from ...encodings.frequencies import STEP_DIVISOR, Frequencies
from ..inspect.capture import added, watch


def encoding_summary(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Over all layers: frequencies, gates and slopes on tokens (1, T), the bias at some distances."""
    with torch.compiler.set_stance("force_eager"):  # a compiled model ignores new hooks
        found = watch(model, [part for part in model.modules() if isinstance(part, Encoding)], tokens)
    seen = [code.bias for _, _, code in found]
    return _frequencies(model) | _rates(seen) | _reach(seen, tokens.shape[1])


def _frequencies(model: nn.Module) -> dict[str, float]:
    learned = [(m, m.delta) for m in model.modules() if isinstance(m, Frequencies) and m.delta is not None]
    if not learned:
        return {}
    with torch.no_grad():
        moved = torch.stack([whole(delta.double()) for _, delta in learned])
        spectra = torch.stack([each.initial.double() for each, _ in learned]) * (moved / STEP_DIVISOR).exp()
    return {
        "frequency/largest": float(spectra.max()),
        "frequency/smallest": float(spectra.min()),
        "frequency/moved": float(moved.abs().mean()),
    }


def _rates(seen: list[Bias]) -> dict[str, float]:
    found: dict[str, list[Tensor]] = {}
    for bias in seen:
        for name, tensor in {**bias.query_tensors(), **bias.key_tensors()}.items():
            short = name.rpartition(".")[2]
            if short.startswith("rate"):
                found.setdefault(short, []).append(tensor.detach().double().flatten())
    out = {}
    for name, each in found.items():
        values = torch.cat(each)
        out[f"{name}/mean"], out[f"{name}/spread"] = float(values.mean()), float(values.std(correction=0))
    return out


def _reach(seen: list[Bias], length: int) -> dict[str, float]:
    """Mean bias of the last token at distances 1, 16 and 64."""
    row = slice(length - 1, length)
    tiles = [
        tile.detach().double() for bias in seen if (tile := added(bias, row, slice(0, length))) is not None
    ]
    out = {}
    for distance in (1, 16, 64):
        if tiles and distance < length:
            out[f"bias/at_{distance}"] = float(
                torch.stack([t[..., -1 - distance].mean() for t in tiles]).mean()
            )
    return out


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; any other unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
