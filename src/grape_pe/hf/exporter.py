"""Moving out: a rotary model as a directory that stock transformers loads without this package.

A learned spectrum becomes `rope_parameters` of type longrope, whose factors express any spectrum; a learned
basis is folded into the q and k projections where no norm stands between. What has no stock form is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..extras import require

require("transformers", "hf")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ..encodings import Encoding, convert_layout  # noqa: E402
from ..encodings.rotary import BasisRotary, Rotary  # noqa: E402
from ..models.config import DecoderConfig  # noqa: E402
from ..models.decoder import Decoder  # noqa: E402
from .adapted import AdaptedForCausalLM  # noqa: E402
from .model import GrapeForCausalLM  # noqa: E402

Source = Decoder | PreTrainedModel


def export(model: Source, directory: str | os.PathLike[str]) -> Path:
    """Write a stock model with the same logits: Llama, or Qwen3 where queries and keys are normalised.

    Takes a `Decoder`, a `GrapeForCausalLM`, or a model changed by `adapt`. When refused, nothing is written.
    """
    stock = to_stock(model)
    stock.save_pretrained(directory)
    return Path(directory)


def to_stock(model: Source) -> PreTrainedModel:
    """The stock model itself, in memory."""
    encodings = [_rotary(encoding) for encoding in _encodings(model)]
    spectrum = _one_spectrum(encodings)
    normed = _has_qk_norm(model)
    for encoding in encodings:
        if normed and isinstance(encoding, BasisRotary):
            raise ValueError(
                "a learned basis cannot be exported behind a QK norm: the norm stands between projection and "
                "basis, and its weights do not commute with it. Train grape-m-basis with qk_norm=False"
            )
    config = _stock_config(model, normed)
    config.rope_parameters = longrope(
        spectrum, config.head_dim, config.max_position_embeddings, _attention_factor(model)
    )
    stock = (Qwen3ForCausalLM if normed else LlamaForCausalLM)(config)
    stock.to(dtype=_dtype(model))  # type: ignore[call-arg]
    lost = stock.load_state_dict(_stock_state(model, encodings), strict=False)
    wrong = {*lost.missing_keys, *lost.unexpected_keys} - {"lm_head.weight"}
    assert not wrong, f"names differ from the stock model's: {sorted(wrong)}"
    stock.tie_weights()
    return stock.eval()


def longrope(
    spectrum: Tensor, head_dim: int, max_positions: int, attention_factor: float = 1.0
) -> dict[str, Any]:
    """`rope_parameters` whose frequencies are `spectrum`, for every length.

    transformers computes 1 / (factor * base^(2i/d)) in float32; both sets of factors are the same, and the
    lengths are equal, so that nothing else is scaled.
    """
    base = 10_000.0
    power = base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    factors = (1.0 / (spectrum.double() * power.double())).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": max_positions,
    }


def _encodings(model: Source) -> list[Encoding]:
    """The encoding of each layer."""
    if isinstance(model, Decoder):
        _check_stock(model.config)
        return [model.model.encoding_of(i) for i in range(model.config.layers)]
    if isinstance(model, GrapeForCausalLM):
        _check_stock(model.config.to_decoder())
        return [model.model.encoding_of(i) for i in range(model.config.num_hidden_layers)]
    if isinstance(model, AdaptedForCausalLM):
        return [model.model.encoding or layer.self_attn.encoding for layer in model.model.layers]
    raise TypeError(
        f"export takes a Decoder, a GrapeForCausalLM or an adapted model, got {type(model).__name__}"
    )


def _check_stock(config: DecoderConfig) -> None:
    if config.qk_norm == "after":
        raise ValueError(
            'qk_norm="after" has no stock form: Qwen3 normalises before the rotation; train with qk_norm=True to export'
        )
    for name in ("output_norm", "output_gate"):
        if getattr(config, name):
            raise ValueError(f"{name} has no stock form; train with {name}=False to export")
    if config.kv_shift:
        raise ValueError("KV-shift has no stock form; train with kv_shift=False to export")
    if any(each.window is not None for each in config.by_layer):
        raise ValueError("window: the exported model would see all tokens; train without a window to export")
    if len({each.encoding for each in config.by_layer}) > 1:
        raise ValueError(
            f"encoding: the exported model has one encoding for all layers, and this one has "
            f"{config.encoding_label}; train with one encoding to export"
        )


def _rotary(encoding: Encoding) -> Rotary:
    if not isinstance(encoding, Rotary) or encoding.coords != 1:
        raise ValueError(
            f"{encoding!r} has no stock form: stock RoPE turns coordinate planes at fixed frequencies, "
            "so rope, grape-m and grape-m-basis can be exported, and nothing with a bias"
        )
    if encoding.shape.head_dim % 2:
        raise ValueError(f"stock RoPE needs an even head_dim, got {encoding.shape.head_dim}")
    return encoding


def _one_spectrum(encodings: list[Rotary]) -> Tensor:
    """(D/2,) float32, the same for every layer and head, or an error."""
    spectra = torch.cat([encoding.frequencies()[:, 0].detach().float() for encoding in encodings])
    if not torch.equal(spectra, spectra[:1].expand_as(spectra)):
        raise ValueError(
            "stock RoPE has one spectrum for the whole model, and here layers or heads have different ones; "
            "train with shared_encoding=True (adapt: shared=True) and without per_head"
        )
    if not bool((spectra > 0).all()):
        raise ValueError("longrope can only express positive frequencies")
    return spectra[0]


def _has_qk_norm(model: Source) -> bool:
    if isinstance(model, Decoder | GrapeForCausalLM):
        return bool(model.config.qk_norm)
    return isinstance(model, Qwen3ForCausalLM)


def _attention_factor(model: Source) -> float:
    if isinstance(model, Decoder | GrapeForCausalLM):
        return 1.0
    rotary: Any = model.model.rotary_emb
    return float(rotary.attention_scaling)


def _dtype(model: Source) -> torch.dtype:
    return model.model.embed_tokens.weight.dtype


def _stock_config(model: Source, normed: bool) -> PreTrainedConfig:
    if not isinstance(model, Decoder | GrapeForCausalLM):
        if not isinstance(model, LlamaForCausalLM | Qwen3ForCausalLM):
            raise ValueError(f"{type(model).__name__} cannot be exported; Llama and Qwen3 can")
        return model.config.to_stock()  # type: ignore[no-any-return]
    plain: DecoderConfig = model.config if isinstance(model, Decoder) else model.config.to_decoder()
    positions, special = 4096, {}
    if isinstance(model, GrapeForCausalLM):
        positions = model.config.max_position_embeddings
        ids = ("pad_token_id", "bos_token_id", "eos_token_id")
        special = {name: model.config.to_dict()[name] for name in ids}
    else:
        special = {"bos_token_id": None, "eos_token_id": None}
    return (Qwen3Config if normed else LlamaConfig)(
        vocab_size=plain.vocab_size,
        hidden_size=plain.width,
        intermediate_size=plain.hidden,
        num_hidden_layers=plain.layers,
        num_attention_heads=plain.heads,
        num_key_value_heads=plain.kv_heads,
        head_dim=plain.head_dim,
        rms_norm_eps=plain.norm_eps,
        tie_word_embeddings=plain.tied,
        max_position_embeddings=positions,
        **special,
    )


def _stock_state(model: Source, encodings: list[Rotary]) -> dict[str, Tensor]:
    """The weights under stock names, which are ours, without the encodings and with bases folded in."""
    ours = [f"model.layers.{i}.self_attn.encoding." for i in range(len(encodings))]
    ours.append("model.encoding.")
    state = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(tuple(ours))
    }
    for i, encoding in enumerate(encodings):
        for side in ("q", "k"):
            for kind in ("weight", "bias"):
                name = f"model.layers.{i}.self_attn.{side}_proj.{kind}"
                if name in state:
                    state[name] = folded(state[name], encoding)
            norm = f"model.layers.{i}.self_attn.{side}_norm.weight"
            if norm in state and encoding.layout == "interleaved":
                state[norm] = convert_layout(state[norm], encoding.shape.head_dim, to="half")
    return state


def folded(weight: Tensor, encoding: Rotary) -> Tensor:
    """A q or k projection (or its bias) that already stands in the encoding's basis, planes half-split."""
    if isinstance(encoding, BasisRotary):
        basis = encoding.basis().detach().double().cpu()  # (Hkv|1, D, D)
        size = encoding.shape.head_dim
        rows = weight.double().cpu().reshape(weight.shape[0] // size, size, -1)
        basis = basis.repeat_interleave(rows.shape[0] // basis.shape[0], 0)
        weight = (basis.transpose(1, 2) @ rows).reshape(weight.shape).to(weight)
    if encoding.layout == "interleaved":
        weight = convert_layout(weight, encoding.shape.head_dim, to="half")
    return weight
