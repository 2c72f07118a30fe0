"""Configurations of adapted models: stock configurations with fields for the encoding.

Each has its own model type, so that other tools raise an error instead of running the model without its encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..encodings.registry import entry
from ..encodings.scaling import read_scaling, spelled_out
from .config import LAYER_TYPE, check_options
from .families import Family

#: attn_implementation of adapted models
IMPLEMENTATION = "grape"
#: rotations that can start equal to the model's RoPE
ROTATIONS = ("rope", "grape-m", "grape-m-basis")
#: types of rope_parameters with fixed frequencies
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: options of encodings that are set by the model's RoPE
FIXED = ("spectrum", "base", "layout", "rotary_dim", "rotary_heads", "coords", "axes", "sections")
#: types of layers that can be adapted
STOCK_LAYERS = ("full_attention", "sliding_attention")
#: fields of a configuration that are not copied
IDENTITY = ("model_type", "architectures", "auto_map", "layer_types", "transformers_version", "_name_or_path")


@dataclass(kw_only=True, repr=False, eq=False)
class AdaptedFields:
    """The fields that `adapt` adds to a configuration.

    Args:
        encoding: name of the encoding.
        encoding_options: options of the encoding.
        shared_encoding: whether all layers share one encoding.
        rollback: number of tokens that caches can remove.
        rotation: strength of the rotation, 1 unless `RotationFade` reduced it.
        stock_layer_types: `layer_types` of the stock configuration; None if it has none.
        layer_types: set by the class.
    """

    family: ClassVar[Family]

    encoding: str = "rope"
    encoding_options: dict[str, Any] | None = None
    shared_encoding: bool = False
    rollback: int = 128
    rotation: float = 1.0
    stock_layer_types: list[str] | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.encoding_options = check_options(self.encoding_options)
        self.layer_types = self.stock_layer_types
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.stock_layer_types = self.layer_types
        self.layer_types = self._own_types()
        self._attn_implementation = IMPLEMENTATION
        self._check_encoding()
        self._check_attention()

    def _own_types(self) -> list[str]:
        return [LAYER_TYPE] * self.num_hidden_layers  # type: ignore[attr-defined,no-any-return]

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """A context in which `layer_types` are those of the stock model, to build it."""
        self.layer_types = self.stock_layer_types
        try:
            yield
        finally:
            self.layer_types = self._own_types()

    def nested_rope_parameter_keys(self, rope_parameters: Mapping[str, Any]) -> list[str]:
        """The types of layers that have their own `rope_parameters`; called by transformers."""
        return [key for key in rope_parameters if key in (self.stock_layer_types or self.layer_types or ())]

    def has(self, name: str) -> bool:
        """Whether the stock configuration has this field."""
        return name in type(self).__dataclass_fields__

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        types = self.stock_layer_types
        slides = types is None or types[layer] == "sliding_attention"
        return self.sliding_window if slides and self.has("sliding_window") else None  # type: ignore

    def rotates(self, layer: int) -> bool:
        """Whether a layer has RoPE; False for some layers of SmolLM3."""
        return not self.has("no_rope_layers") or bool(self.no_rope_layers[layer])  # type: ignore[attr-defined]

    @property
    def _attn_implementation_internal(self) -> str | None:
        """The field of transformers with the name of the attention implementation."""
        return self.__dict__.get("_attn_implementation_internal")

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        """Raise a ValueError for other implementations, which would run without the encoding."""
        if name not in (None, IMPLEMENTATION):
            raise ValueError(
                f"attn_implementation={name!r} would lose the encoding: adapted models use grape_pe.attend; "
                "leave it out (output_attentions=True in a configuration sets it to eager: pass it to the "
                "call instead)"
            )
        self.__dict__["_attn_implementation_internal"] = name

    def validate_layer_type(self) -> None:
        """Require our layer type, with which stock models raise an error for config.json."""
        if self.layer_types != self._own_types():
            raise ValueError(f"layer_types must be {LAYER_TYPE!r} for each layer, got {self.layer_types}")

    @property
    def has_rotation(self) -> bool:
        """Whether the encoding has a rotation."""
        return any(part in ROTATIONS for part in self.encoding.split("+"))

    def _check_encoding(self) -> None:
        """Raise a ValueError if the encoding does not start equal to the RoPE of the model."""
        if not self.has_rotation and self.rotation != 0.0:
            raise ValueError(
                f"{self.encoding!r} would change the logits: the encoding must include the rotation that the model was "
                f"trained with, as one of {', '.join(ROTATIONS)}; {self._advice()}"
            )
        if not 0.0 <= self.rotation <= 1.0:
            raise ValueError(
                f"rotation must be from 0 to 1, got {self.rotation}; it is set by RotationFade, leave it out"
            )
        options = self.encoding_options or {}
        nested = [value for value in options.values() if isinstance(value, Mapping)]
        for name in FIXED:
            if any(name in given for given in [options, *nested]):
                raise ValueError(f"option {name!r} is set by the model's own RoPE; leave it out")
        if any(given.get("basis") == "circulant" for given in [options, *nested]):
            raise ValueError(
                'basis="circulant" would change the logits; use "orthogonal", which starts equal to RoPE'
            )

    def _advice(self) -> str:
        """What to use instead of an encoding without the model's rotation."""
        parts = [part for part in self.encoding.split("+") if part != "nope"]
        for part in parts:
            if entry(part).cls.transforms:
                return (
                    f"{part} is another encoding of q and k, for which a model must be trained from the start"
                )
        kept = "+".join(["rope", *parts])
        return (
            f"for example {kept!r}. To remove the rotation, adapt to {kept!r} and fade the rotation out in training, "
            "with grape_pe.hf.RotationFade"
        )

    def _check_attention(self) -> None:
        """Raise a ValueError unless `grape_pe.attend` can compute the model's attention."""
        config: Any = self
        keys = self.nested_rope_parameter_keys(config.rope_parameters)
        for rope in [config.rope_parameters[key] for key in keys] or [config.rope_parameters]:
            self._check_rope(rope)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout} is not supported; set it to 0.0")
        unknown = set(self.stock_layer_types or ()) - set(STOCK_LAYERS)
        if unknown:
            raise ValueError(
                f"layers of type {', '.join(sorted(unknown))} cannot be adapted; only {', '.join(STOCK_LAYERS)} can"
            )
        if self.has("attn_logit_softcapping") and config.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping={config.attn_logit_softcapping} is not supported by grape_pe.attend; set it "
                "to None, which changes the logits, and fine-tune the model"
            )
        if self.has("use_bidirectional_attention") and config.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention=True is not supported: adapted models are causal; use a causal model"
            )

    def _check_rope(self, rope: Mapping[str, Any]) -> None:
        kind = rope["rope_type"]
        fixed = kind == "longrope" and rope["short_factor"] == rope["long_factor"]  # as `export` writes it
        if kind not in ROPE_TYPES and not fixed:
            raise ValueError(
                f"rope_type {kind!r} is not supported, because its frequencies change with the length; use one of "
                f"{', '.join(ROPE_TYPES)}"
            )
        if kind != "default" and "scaling" in (self.encoding_options or {}):
            raise ValueError(
                f"scaling needs rope_parameters of type 'default', but those of the model have type {kind!r}; leave "
                "scaling out, or set rope_type to 'default' first"
            )

    @classmethod
    def from_stock(
        cls, config: PreTrainedConfig, encoding: str, options: Mapping[str, Any], shared: bool
    ) -> Self:
        """Copy a stock configuration and add an encoding."""
        fields = {name: value for name, value in config.to_dict().items() if name not in IDENTITY}
        if cls.family.config.__dataclass_fields__.keys() & {"layer_types"}:
            fields["stock_layer_types"] = config.layer_types  # type: ignore[attr-defined]
        if options.get("scaling") is not None:
            options, longest = _with_context(options, fields["max_position_embeddings"])
            fields["max_position_embeddings"] = longest
        return cls(**fields, encoding=encoding, encoding_options=dict(options), shared_encoding=shared)

    def to_stock(self) -> PreTrainedConfig:
        """The stock configuration, without the encoding."""
        config: Any = self
        ours = {*IDENTITY, *AdaptedFields.__dataclass_fields__}
        fields = {name: value for name, value in config.to_dict().items() if name not in ours}
        if self.stock_layer_types is not None:
            fields["layer_types"] = self.stock_layer_types
        return self.family.config(**fields)


def _with_context(options: Mapping[str, Any], positions: int) -> tuple[dict[str, Any], int]:
    """Options with `original_context` of the scaling filled in, and the extended context."""
    scaling = spelled_out(options["scaling"])
    if scaling["type"] in ("yarn", "llama3"):
        scaling = {"original_context": positions, **scaling}
    rule = read_scaling(scaling)
    assert rule is not None
    return {**options, "scaling": scaling}, max(positions, int(rule.factor * positions))


def config_class(family: Family) -> type[PreTrainedConfig]:
    """Create the configuration class of a family's adapted models."""
    stock = family.config
    own = {
        "model_type": f"grape_{stock.model_type}",
        "family": family,
        "__module__": f"{__package__}.adapted",
    }
    return strict(type(f"Grape{family.name}Config", (AdaptedFields, stock), own))  # type: ignore[no-any-return,call-overload]
