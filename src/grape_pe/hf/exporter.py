"""`export`: write a rotary model as a stock transformers model, which loads without this package.

Learned frequencies become `rope_parameters` of type longrope, whose factors can express any frequencies. A learned
basis is multiplied into the q and k projections. Other models raise an error.
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
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ..encodings import Encoding, convert_layout  # noqa: E402
from ..encodings.base import NoPE  # noqa: E402
from ..encodings.basis import BasisRotary  # noqa: E402
from ..encodings.frequencies import Frequencies, log_uniform  # noqa: E402
from ..encodings.rotary import Rotary  # noqa: E402
from ..groups.rotation import Layout  # noqa: E402
from ..models.config import DecoderConfig  # noqa: E402
from ..models.decoder import Decoder  # noqa: E402
from .adapted import AdaptedForCausalLM, Rope  # noqa: E402
from .model import GrapeForCausalLM  # noqa: E402

Source = Decoder | PreTrainedModel


def export(model: Source, directory: str | os.PathLike[str]) -> Path:
    """Write a stock model with the same logits: Llama, or Qwen3 for a model with QK norm.

    A model changed by `adapt` becomes a model of its own family again.

    Args:
        model: a `Decoder`, a `GrapeForCausalLM` or a model changed by `adapt`.
        directory: where to write.

    Returns:
        The directory.

    Raises:
        ValueError: if no stock model has the same logits. Nothing is written then.
    """
    stock = to_stock(model)
    stock.save_pretrained(directory)
    return Path(directory)


def to_stock(model: Source) -> PreTrainedModel:
    """Convert to a stock model, in memory."""
    encodings, config = check_stock_form(model)
    settings: Any = model.config
    adapted = isinstance(model, AdaptedForCausalLM)
    cls: Any = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM
    cls = settings.family.for_causal_lm if adapted else cls
    stock = cls(config).to(dtype=next(model.parameters()).dtype)
    lost = stock.load_state_dict(_stock_state(model, encodings), strict=False)
    wrong = {*lost.missing_keys, *lost.unexpected_keys} - {"lm_head.weight"}
    assert not wrong, f"names differ from the stock model's: {sorted(wrong)}"
    stock.tie_weights()
    return stock.eval()  # type: ignore[no-any-return]


def check_stock_form(model: Source) -> tuple[list[Rotary | None], Any]:
    """The rotations and the stock configuration of a model, or a ValueError if it has no stock form."""
    adapted = isinstance(model, AdaptedForCausalLM)
    encodings = [_rotary(encoding, adapted) for encoding in _encodings(model)]
    _check_bases(model, encodings)
    settings: Any = model.config
    config: Any = settings.to_stock() if adapted else _stock_config(model)
    config.rope_parameters = _rope_parameters(model, config, encodings)
    return encodings, config


def _check_bases(model: Source, encodings: list[Rotary | None]) -> None:
    if not any(isinstance(encoding, BasisRotary) for encoding in encodings):
        return
    if isinstance(model, AdaptedForCausalLM):
        if model.config.family.folds_bases:
            return
        raise ValueError(
            f"a learned basis cannot be exported to a {model.config.family.name} model, because its projections are "
            "fused or followed by a norm; use grape-m"
        )
    if model.config.qk_norm:
        raise ValueError(
            "a learned basis cannot be exported with a QK norm, which comes between projection and basis and does not "
            "commute with the basis; train grape-m-basis with qk_norm=False"
        )


def _rope_parameters(model: Source, config: Any, encodings: list[Rotary | None]) -> dict[str, Any]:
    """`rope_parameters`: the stock model's if they did not change, those of the encoding's scaling, or longrope."""
    rotating = [encoding for encoding in encodings if encoding is not None]
    own: Any = config.rope_parameters
    if not rotating:
        raise ValueError("no layer of this model has a rotation, so it has no stock form; save it instead")
    if isinstance(model, AdaptedForCausalLM):
        known: Any = model.base_model.ropes
        if all(_is(encoding, rope) for encoding, rope in zip(encodings, known, strict=True)):
            return own  # type: ignore[no-any-return]
    spectrum, first = _one_spectrum(rotating), rotating[0]
    factor = first.query_factor**0.5 * _attention_factor(model)
    kept = {"partial_rotary_factor": own["partial_rotary_factor"]} if "partial_rotary_factor" in own else {}
    rule = first.frequencies.scaling
    named = not isinstance(config, Phi3Config)  # which supports longrope only
    if rule is not None and named and _follows_base(first.frequencies):
        return {**rule.rope_parameters(first.frequencies.base, len(spectrum)), **kept}
    return longrope(spectrum, config.max_position_embeddings, factor) | kept


def _is(encoding: Rotary | None, rope: Rope | None) -> bool:
    """Whether an encoding still rotates like the stock model's layer."""
    if encoding is None or rope is None:
        return encoding is None and rope is None
    theta = encoding.frequencies()[:, 0].detach().float().cpu()
    return encoding.query_factor == rope.query_factor and bool((theta == torch.tensor(rope.spectrum)).all())


def _follows_base(frequencies: Frequencies) -> bool:
    """Whether the frequencies before their scaling are base^(-i/planes), as in transformers."""
    start = log_uniform(frequencies.planes, frequencies.base)
    fixed = frequencies.delta is None and frequencies.strength == 1.0
    return fixed and torch.allclose(frequencies.initial.cpu(), start, rtol=1e-6, atol=0.0)


def longrope(spectrum: Tensor, max_positions: int, attention_factor: float = 1.0) -> dict[str, Any]:
    """`rope_parameters` with the frequencies `spectrum` for every length.

    transformers computes 1 / (factor * base^(2i/d)) in float32. Short and long factors are equal, and so are the
    lengths, so nothing else is scaled.
    """
    base, width = 10_000.0, 2 * len(spectrum)
    power = base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
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
        base: Any = model.base_model
        return [base.encoding_of(i) for i in range(len(base.layers))]
    raise TypeError(
        f"export takes a Decoder, a GrapeForCausalLM or an adapted model, got {type(model).__name__}"
    )


def _check_stock(config: DecoderConfig) -> None:
    if config.qk_norm == "after":
        raise ValueError(
            'qk_norm="after" has no stock form: Qwen3 normalizes before the rotation; train with qk_norm=True to export'
        )
    for name in ("output_norm", "output_gate", "absolute", "kv_shift"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no stock form; train without it to export"
            )
    if any(each.window is not None for each in config.by_layer):
        raise ValueError(
            f"window={config.window} has no stock form: the exported model would attend to all tokens; train without a "
            "window to export"
        )
    if len({each.encoding for each in config.by_layer}) > 1:
        raise ValueError(
            f"the exported model must have one encoding for all layers, got {config.encoding_label}; train with one "
            "encoding to export"
        )


def _rotary(encoding: Encoding, in_family: bool) -> Rotary | None:
    """Return the encoding if stock RoPE can express it, or None for a layer without RoPE of an adapted model."""
    if isinstance(encoding, NoPE) and in_family:
        return None
    if not isinstance(encoding, Rotary) or encoding.coords != 1:
        raise ValueError(
            f"{encoding!r} has no stock form: stock RoPE rotates coordinate planes at fixed frequencies and has no "
            "bias; only rope, grape-m and grape-m-basis can be exported"
        )
    partial = encoding.rotary_dim != encoding.shape.head_dim
    if partial and not in_family:
        raise ValueError(
            f"rotary_dim={encoding.rotary_dim} has no stock form: exported models rotate all "
            f"{encoding.shape.head_dim} features"
        )
    if encoding.rotary_heads != encoding.shape.kv_heads:
        raise ValueError(
            f"rotary_heads={encoding.rotary_heads} has no stock form: exported models rotate all "
            f"{encoding.shape.kv_heads} key heads"
        )
    if encoding.shape.head_dim % 2:
        raise ValueError(f"stock RoPE needs an even head_dim, got {encoding.shape.head_dim}")
    return encoding


def _one_spectrum(encodings: list[Rotary]) -> Tensor:
    """The frequencies of all layers and heads, (D/2,) in float32, or a ValueError if they differ."""
    spectra = torch.cat([encoding.frequencies()[:, 0].detach().float() for encoding in encodings])
    if not torch.equal(spectra, spectra[:1].expand_as(spectra)):
        raise ValueError(
            "stock RoPE has the same frequencies in all layers and heads, and those of this model differ; "
            "train with shared_encoding=True (adapt: shared=True) and without per_head"
        )
    if not bool((spectra > 0).all()):
        raise ValueError(f"longrope needs positive frequencies, got {spectra.min().item():.3g}")
    return spectra[0]


def _attention_factor(model: Source) -> float:
    """YaRN's factor of the stock model's RoPE, which adapted layers have in their scale."""
    if not isinstance(model, AdaptedForCausalLM):
        return 1.0
    base: Any = model.base_model
    return next(rope.scale**0.5 for rope in base.ropes if rope is not None)  # type: ignore[no-any-return]


def _stock_config(model: Any) -> PreTrainedConfig:
    plain: DecoderConfig = model.config if isinstance(model, Decoder) else model.config.to_decoder()
    positions, special = 4096, {}
    if isinstance(model, GrapeForCausalLM):
        positions = model.config.max_position_embeddings
        ids = ("pad_token_id", "bos_token_id", "eos_token_id")
        special = {name: model.config.to_dict()[name] for name in ids}
    else:
        special = {"bos_token_id": None, "eos_token_id": None}
    return (Qwen3Config if plain.qk_norm else LlamaConfig)(
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


def _stock_state(model: Source, encodings: list[Rotary | None]) -> dict[str, Tensor]:
    """The weights without the encodings, with bases multiplied in and in the stock layout. Names are the same."""
    ours = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Encoding))
    state = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(ours)
    }
    adapted = isinstance(model, AdaptedForCausalLM)
    for i, encoding in enumerate(encodings):
        if encoding is None or (adapted and not isinstance(encoding, BasisRotary)):
            continue  # an adapted model already has the layout of its family
        for side in ("q", "k"):
            for kind in ("weight", "bias"):
                name = f"model.layers.{i}.self_attn.{side}_proj.{kind}"
                if name in state:
                    state[name] = folded(state[name], encoding, "half" if not adapted else encoding.layout)
            norm = f"model.layers.{i}.self_attn.{side}_norm.weight"
            if norm in state and encoding.layout == "interleaved":
                state[norm] = convert_layout(state[norm], encoding.shape.head_dim, to="half")
    return state


def folded(weight: Tensor, encoding: Rotary, layout: Layout = "half") -> Tensor:
    """Multiply the encoding's basis into a q or k projection (or its bias), and convert its planes to `layout`."""
    if isinstance(encoding, BasisRotary):
        basis = encoding.basis().detach().double().cpu()  # (Hkv|1, D, D)
        size = encoding.shape.head_dim
        rows = weight.double().cpu().reshape(weight.shape[0] // size, size, -1)
        basis = basis.repeat_interleave(rows.shape[0] // basis.shape[0], 0)
        weight = (basis.transpose(1, 2) @ rows).reshape(weight.shape).to(weight)
    if encoding.layout != layout:
        weight = convert_layout(weight, encoding.shape.head_dim, to="half")
    return weight
