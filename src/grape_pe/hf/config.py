"""`GrapeConfig`: the decoder's configuration with Hugging Face's field names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..models.config import HF_NAMES, DecoderConfig

LAYER_TYPE = "grape_attention"
# Stock configurations raise an error for this type, so that no stock model runs without the encoding. Only a plain
# PreTrainedConfig, with which Trainer reads config.json of a checkpoint, accepts it.
_plain: Any = PreTrainedConfig
_plain.__class_validators__ = [f for f in _plain.__class_validators__ if f.__name__ != "validate_layer_type"]


@strict
class GrapeConfig(PreTrainedConfig):
    """The configuration of a `GrapeForCausalLM`.

    Sizes have Hugging Face's names. `encoding`, `encoding_options`, `window`, `sinks`, `shared_encoding`, `kv_shift`,
    `qk_norm`, `output_norm`, `output_gate` and `absolute` are those of `DecoderConfig`. `rollback` is the number of
    tokens that caches can remove.
    """

    model_type = "grape"
    keys_to_ignore_at_inference: ClassVar[Any] = ["past_key_values"]

    vocab_size: int = 50304
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    encoding: str | list[str] = "rope"
    encoding_options: dict[str, Any] | None = None
    window: int | list[int | None] | None = None
    sinks: int = 0
    shared_encoding: bool = False
    kv_shift: bool = False
    qk_norm: bool | Literal["after"] = True
    output_norm: bool = False
    output_gate: bool = False
    absolute: Literal["sinusoidal", "learned"] | None = None
    rollback: int = 128
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.hidden_act != "silu":
            raise ValueError(f'hidden_act must be "silu" (the decoder has SwiGLU), got {self.hidden_act!r}')
        self.encoding_options = check_options(self.encoding_options)
        filled = self.to_decoder()
        self.intermediate_size, self.head_dim = filled.hidden, filled.head_dim
        self.num_key_value_heads = filled.kv_heads
        self.layer_types = [LAYER_TYPE] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def validate_layer_type(self) -> None:
        """Require our layer type, whose cache layers also store bias tensors."""
        if self.layer_types != [LAYER_TYPE] * self.num_hidden_layers:
            raise ValueError(f"layer_types must be {LAYER_TYPE!r} for each layer, got {self.layer_types}")

    def to_decoder(self) -> DecoderConfig:
        """Convert to a `DecoderConfig`, or raise an error if a value is not valid."""
        values = {theirs: self.__dict__[theirs] for theirs in HF_NAMES.values()}
        sizes = ("intermediate_size", "num_key_value_heads", "head_dim")
        return DecoderConfig.from_hf(values | {name: values[name] or 0 for name in sizes})


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options as they are read back from JSON (tuples become lists), or raise a TypeError."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(options or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"encoding_options must have values that JSON supports (numbers, strings, lists, dicts), "
            f"got {options!r} ({error}); pass tensors as lists: t.tolist()"
        ) from error
    return plain
