"""Configurations of adapted models: those of the stock families with an encoding added.

Each has a model type of its own, so that tools which do not know it refuse the model instead of running it
without its encoding.
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

#: the name of our attention for transformers
IMPLEMENTATION = "grape"
#: rotations that can start as the model's own RoPE
ROTATIONS = ("rope", "grape-m", "grape-m-basis")
#: kinds of rope_parameters with one fixed spectrum
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: options of encodings that follow from the model's own RoPE
FIXED = ("spectrum", "base", "layout", "rotary_dim", "rotary_heads", "coords", "axes", "sections")
#: types of layers whose attention we have
STOCK_LAYERS = ("full_attention", "sliding_attention")
#: fields that describe the saved model, not the architecture
IDENTITY = ("model_type", "architectures", "auto_map", "layer_types", "transformers_version", "_name_or_path")


@dataclass(kw_only=True, repr=False, eq=False)
class AdaptedFields:
    """The fields that `adapt` adds to a configuration.

    `rollback` is how many tokens caches can remove; `rotation` the strength that `RotationFade` has left of the
    rotation, 1 at first; `stock_layer_types` are the family's own `layer_types`, None if it has none.
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
        """While the stock model is built, which looks at the types of its layers."""
        self.layer_types = self.stock_layer_types
        try:
            yield
        finally:
            self.layer_types = self._own_types()

    def nested_rope_parameter_keys(self, rope_parameters: Mapping[str, Any]) -> list[str]:
        """transformers' test whether each type of layer has `rope_parameters` of its own."""
        return [key for key in rope_parameters if key in (self.stock_layer_types or self.layer_types or ())]

    def has(self, name: str) -> bool:
        """Whether the stock configuration has this field."""
        return name in type(self).__dataclass_fields__

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        types = self.stock_layer_types
        slides = types is None or types[layer] == "sliding_attention"
        return self.sliding_window if slides and self.has("sliding_window") else None  # type: ignore

    def rotates(self, layer: int) -> bool:
        """False in the NoPE layers of SmolLM3."""
        return not self.has("no_rope_layers") or bool(self.no_rope_layers[layer])  # type: ignore[attr-defined]

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
        if self.layer_types != self._own_types():
            raise ValueError(f"layer_types must be {LAYER_TYPE!r} for each layer, got {self.layer_types}")

    @property
    def has_rotation(self) -> bool:
        return any(part in ROTATIONS for part in self.encoding.split("+"))

    def _check_encoding(self) -> None:
        """The rotation the model was trained with stays, at its own frequencies, unless it was faded out."""
        if not self.has_rotation and self.rotation != 0.0:
            raise ValueError(
                f"{self.encoding!r} would change the logits: the rotation the model was trained with must "
                f"stay, as one of {', '.join(ROTATIONS)}; {self._advice()}"
            )
        if not 0.0 <= self.rotation <= 1.0:
            raise ValueError(f"rotation must be from 0 to 1, got {self.rotation}; RotationFade sets it")
        options = self.encoding_options or {}
        nested = [value for value in options.values() if isinstance(value, Mapping)]
        for name in FIXED:
            if any(name in given for given in [options, *nested]):
                raise ValueError(f"option {name!r} is set by the model's own RoPE; leave it out")
        if any(given.get("basis") == "circulant" for given in [options, *nested]):
            raise ValueError(
                'basis="circulant" would change the logits; use "orthogonal", which starts as the RoPE'
            )

    def _advice(self) -> str:
        """What to adapt to instead of an encoding without the model's rotation."""
        parts = [part for part in self.encoding.split("+") if part != "nope"]
        for part in parts:
            if entry(part).cls.transforms:
                return f"{part} is another encoding of q and k, with which a model must be trained from the start"
        kept = "+".join(["rope", *parts])
        return (
            f"for example {kept!r}. To leave the rotation, adapt to {kept!r} and fade it out in training, by "
            "grape_pe.hf.RotationFade"
        )

    def _check_attention(self) -> None:
        """Attention that `grape_pe.attend` computes: one fixed spectrum, no dropout, no soft-capping, causal."""
        config: Any = self
        keys = self.nested_rope_parameter_keys(config.rope_parameters)
        for rope in [config.rope_parameters[key] for key in keys] or [config.rope_parameters]:
            self._check_rope(rope)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout} is not supported; set it to 0.0")
        unknown = set(self.stock_layer_types or ()) - set(STOCK_LAYERS)
        if unknown:
            raise ValueError(
                f"layers of type {', '.join(sorted(unknown))} cannot be adapted, only {STOCK_LAYERS}"
            )
        if self.has("attn_logit_softcapping") and config.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping={config.attn_logit_softcapping}: grape_pe.attend does not cap the logits of "
                "attention. Set it to None if the model may change by that; then fine-tune"
            )
        if self.has("use_bidirectional_attention") and config.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention=True: adapted models are causal; use a causal model"
            )

    def _check_rope(self, rope: Mapping[str, Any]) -> None:
        kind = rope["rope_type"]
        fixed = kind == "longrope" and rope["short_factor"] == rope["long_factor"]  # as `export` writes it
        if kind not in ROPE_TYPES and not fixed:
            raise ValueError(
                f"rope_type {kind!r} changes its frequencies with the length; use one of {ROPE_TYPES}"
            )
        if kind != "default" and "scaling" in (self.encoding_options or {}):
            raise ValueError(
                f"the model's own rope_parameters are of type {kind!r} and are kept; leave scaling out, or set "
                "rope_type to 'default' first"
            )

    @classmethod
    def from_stock(
        cls, config: PreTrainedConfig, encoding: str, options: Mapping[str, Any], shared: bool
    ) -> Self:
        """A copy of a stock configuration with an encoding added; the original is left alone."""
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
    """Options whose scaling knows the context it extends, the model's own unless given; and the longer one."""
    scaling = spelled_out(options["scaling"])
    if scaling["type"] in ("yarn", "llama3"):
        scaling = {"original_context": positions, **scaling}
    rule = read_scaling(scaling)
    assert rule is not None
    return {**options, "scaling": scaling}, max(positions, int(rule.factor * positions))


def config_class(family: Family) -> type[PreTrainedConfig]:
    """The configuration of a family's adapted models."""
    stock = family.config
    own = {
        "model_type": f"grape_{stock.model_type}",
        "family": family,
        "__module__": f"{__package__}.adapted",
    }
    return strict(type(f"Grape{family.name}Config", (AdaptedFields, stock), own))  # type: ignore[no-any-return,call-overload]
