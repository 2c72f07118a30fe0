"""Configurations of adapted models: those of Llama, Qwen2 and Qwen3 with an encoding added.

Each has a model type of its own, so that tools which do not know it refuse the model instead of running it
without its encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from .config import LAYER_TYPE, check_options

#: the name of our attention for transformers
IMPLEMENTATION = "grape"
#: rotations that can start as the model's own RoPE
ROTATIONS = ("rope", "grape-m", "grape-m-basis")
#: kinds of rope_parameters with one fixed spectrum
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: options of encodings that follow from the model's own RoPE
FIXED = ("spectrum", "base", "layout", "coords", "axes")
#: fields that describe the saved model, not the architecture
IDENTITY = ("model_type", "architectures", "auto_map", "layer_types", "transformers_version", "_name_or_path")


@dataclass(kw_only=True, repr=False, eq=False)
class AdaptedFields:
    """The fields that `adapt` adds to a configuration; `rollback` is how many tokens caches can remove."""

    stock: ClassVar[type[PreTrainedConfig]]

    encoding: str = "rope"
    encoding_options: dict[str, Any] | None = None
    shared_encoding: bool = False
    rollback: int = 128
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.encoding_options = check_options(self.encoding_options)
        self.layer_types = [LAYER_TYPE] * self.num_hidden_layers  # type: ignore[attr-defined]
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self._attn_implementation = IMPLEMENTATION
        self._check_encoding()
        self._check_attention()

    @property
    def _attn_implementation_internal(self) -> str | None:
        """transformers' field for the name of the attention function."""
        return self.__dict__.get("_attn_implementation_internal")

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        """Only ours, or none yet: a stock class that gets another name would run without the encoding."""
        if name not in (None, IMPLEMENTATION):
            raise ValueError(
                f"attn_implementation={name!r} would lose the encoding: adapted models use grape_pe.attend; "
                "leave it out. (output_attentions=True in a configuration asks for eager: pass it to the "
                "call instead)"
            )
        self.__dict__["_attn_implementation_internal"] = name

    def validate_layer_type(self) -> None:
        """A type that stock models do not know, so that they refuse config.json."""
        expected = [LAYER_TYPE] * self.num_hidden_layers  # type: ignore[attr-defined]
        if self.layer_types != expected:
            raise ValueError(f"layer_types must be {LAYER_TYPE!r} for each layer, got {self.layer_types}")

    def _check_encoding(self) -> None:
        """The rotation the model was trained with stays, at its own frequencies."""
        if not any(part in ROTATIONS for part in self.encoding.split("+")):
            raise ValueError(
                f"{self.encoding!r} would change the logits: the rotation the model was trained with must "
                f"stay, as one of {', '.join(ROTATIONS)}; for example 'rope+{self.encoding}'"
            )
        options = self.encoding_options or {}
        nested = [value for value in options.values() if isinstance(value, Mapping)]
        for name in FIXED:
            if any(name in given for given in [options, *nested]):
                raise ValueError(f"option {name!r} is set by the model's own RoPE; leave it out")

    def _check_attention(self) -> None:
        """Attention that `grape_pe.attend` computes: one fixed spectrum, no dropout."""
        config: Any = self
        rope = config.rope_parameters
        kind = rope["rope_type"]
        fixed = kind == "longrope" and rope["short_factor"] == rope["long_factor"]  # as `export` writes it
        if kind not in ROPE_TYPES and not fixed:
            raise ValueError(
                f"rope_type {kind!r} changes its frequencies with the length; use one of {ROPE_TYPES}"
            )
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout} is not supported; set it to 0.0")

    @classmethod
    def from_stock(
        cls, config: PreTrainedConfig, encoding: str, options: Mapping[str, Any], shared: bool
    ) -> Self:
        """A copy of a stock configuration with an encoding added; the original is left alone."""
        fields = config.to_dict()
        if "sliding_attention" in fields.get("layer_types", []):
            raise ValueError("layers with a sliding window cannot be adapted")
        fields = {name: value for name, value in fields.items() if name not in IDENTITY}
        return cls(**fields, encoding=encoding, encoding_options=dict(options), shared_encoding=shared)

    def to_stock(self) -> PreTrainedConfig:
        """The stock configuration, without the encoding."""
        config: Any = self
        ours = {*IDENTITY, *AdaptedFields.__dataclass_fields__}
        return self.stock(**{name: value for name, value in config.to_dict().items() if name not in ours})


@strict
class GrapeLlamaConfig(AdaptedFields, LlamaConfig):  # type: ignore[misc]
    model_type = "grape_llama"
    stock = LlamaConfig


@strict
class GrapeQwen2Config(AdaptedFields, Qwen2Config):  # type: ignore[misc]
    model_type = "grape_qwen2"
    stock = Qwen2Config


@strict
class GrapeQwen3Config(AdaptedFields, Qwen3Config):  # type: ignore[misc]
    model_type = "grape_qwen3"
    stock = Qwen3Config
