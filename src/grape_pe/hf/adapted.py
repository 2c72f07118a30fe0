"""Adapted models: stock models whose attention uses an encoding of this package, with classes for each family.

`save_pretrained`, `from_pretrained`, `Trainer` and PEFT work as for other transformers models and keep the encoding.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..encodings import Encoding, build
from ..encodings.prepared import Preparation
from ..encodings.rotary import Rotary
from .adapted_attention import IMPLEMENTATION, Adapted
from .adapted_config import AdaptedFields, config_class
from .cache import layers_of
from .config import LAYER_TYPE
from .fade import fade_in, without_rotation
from .families import ROWS, Family
from .model import cache_for, make_layout
from .pretrained import GrapePretrained, full_precision_names, reset_missing


class AdaptedModel(GrapePretrained):
    """Base class of adapted models: initialization of parameters, and the attention implementation."""

    config: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Encoding):
            reset_missing(module)
        else:
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        return attn_implementation or IMPLEMENTATION  # the configuration raises an error for other names


class AdaptedBase(AdaptedModel):
    """A stock model without head, whose layers are `Adapted`."""

    attention: ClassVar[type[Adapted]]
    mask: ClassVar[Any]  # passed to the stock model, so that it does not make a T x T mask
    encoding: Encoding | None  # the encoding that all layers share, if they do
    preparation: Preparation
    ropes: list[Any]  # the `Rope` of each layer, or None
    layers: nn.ModuleList

    def __init__(self, config: Any) -> None:
        with config.as_stock():
            super().__init__(config)
        install(self, build_encodings(self, config))
        self.post_init()

    def attention_of(self, layer: int) -> Any:
        """The attention module of a layer."""
        return getattr(self.layers[layer], self.config.family.attention)

    def encoding_of(self, layer: int) -> Encoding:
        """The encoding of a layer, its own or the shared one."""
        return self.attention_of(layer).encoding if self.encoding is None else self.encoding  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The forward of the stock model, whose layers get a layout instead of a mask."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds, got neither")
        cache = cache_for(self, past_key_values, use_cache)
        layers = None if cache is None else layers_of(cache, len(self.layers), self.encoding_of(0))
        layout = make_layout(tokens, attention_mask, position_ids, layers)
        if layers is not None:
            layout = layout.prepare(self.preparation, self.dtype)
        return super().forward(
            input_ids=input_ids,
            attention_mask=self.mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None,
            shared_encoding=self.encoding,
            layout=layout,
            cache_layers=layers,
            **kwargs,
        )


class AdaptedForCausalLM(AdaptedModel):
    """A stock language model whose base model is an `AdaptedBase`."""

    base: ClassVar[type[AdaptedBase]]

    def __init__(self, config: Any) -> None:
        with config.as_stock():
            super().__init__(config)
        model: Any = self.base_model
        encodings = build_encodings(model, config)
        model.__class__ = self.base
        install(model, encodings)
        self.post_init()


class NoRotary(nn.Module):
    """Replaces the stock model's rotary embedding, which adapted layers do not use."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


class Rope(NamedTuple):
    """The RoPE of a stock layer."""

    spectrum: tuple[float, ...]  # exact float32 frequencies
    base: float
    factor: float  # YaRN's factor of rotated queries, and of rotated keys
    whole: bool  # whether all features of a head are rotated

    @property
    def scale(self) -> float:
        """YaRN's factor of the logits, if all features are rotated; else 1."""
        return self.factor**2 if self.whole else 1.0

    @property
    def query_factor(self) -> float:
        """YaRN's factor of the rotated features of queries, if only some features are rotated; else 1."""
        return 1.0 if self.whole else self.factor**2


def ropes(model: Any, config: AdaptedFields) -> list[Rope | None]:
    """The RoPE of each layer, computed from `rope_parameters`; None for a layer without RoPE.

    Not read from the model's rotary embedding, whose buffers may be on the meta device or in bfloat16.
    """
    stock: Any = config.to_stock()
    nested = config.nested_rope_parameter_keys(stock.rope_parameters)
    head_dim = _head_dim(model, config)
    found = {key: _rope(model.rotary_emb, stock, key, head_dim) for key in nested or (None,)}
    types = config.stock_layer_types if nested else None
    layers = range(stock.num_hidden_layers)
    return [found[types[i] if types else None] if config.rotates(i) else None for i in layers]


def _head_dim(model: Any, config: AdaptedFields) -> int:
    return getattr(getattr(model.layers[0], config.family.attention), config.family.head_dim)  # type: ignore[no-any-return]


def _rope(rotary: Any, stock: Any, layer_type: str | None, head_dim: int) -> Rope:
    parameters = stock.rope_parameters if layer_type is None else stock.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    start = rotary.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    with torch.device("cpu"):
        spectrum, factor = start(stock, **({} if layer_type is None else {"layer_type": layer_type}))
    whole = 2 * len(spectrum) == head_dim
    return Rope(tuple(spectrum.tolist()), float(parameters["rope_theta"]), float(factor), whole)


def build_encodings(model: Any, config: Any) -> list[Encoding]:
    """Build the encoding of each layer, or the shared one, equal to the RoPE of the stock `model` at first."""
    every = ropes(model, config)
    found = every
    if config.shared_encoding:
        if len(set(found)) > 1:
            raise ValueError(
                f"shared=True needs layers with equal RoPE, but those of this {config.family.name} model differ; "
                "leave shared out"
            )
        found = found[:1]
    heads = config.num_attention_heads
    sizes = {
        "heads": heads,
        "kv_heads": config.num_key_value_heads if config.has("num_key_value_heads") else heads,
        "head_dim": _head_dim(model, config),
        "width": config.hidden_size,
    }
    rotating = next(rope for rope in every if rope is not None)
    return [_encoding(config, sizes, rope, rotating) for rope in found]


def _encoding(config: Any, sizes: dict[str, int], rope: Rope | None, rotating: Rope) -> Encoding:
    options = dict(config.encoding_options or {})
    if config.has_rotation:
        own = rope or rotating
        options = {"spectrum": own.spectrum, "base": own.base, "layout": config.family.layout, **options}
        if not own.whole:
            options["rotary_dim"] = 2 * len(own.spectrum)
    encoding = fade_in(build(config.encoding, **sizes, **options), config.rotation)
    if rope is not None and rope.query_factor != 1.0:
        for part in encoding.modules():
            if isinstance(part, Rotary):
                part.query_factor = rope.query_factor
    return encoding if rope is not None else without_rotation(encoding)


def install(model: Any, encodings: list[Encoding]) -> None:
    """Give the layers of `model`, which has its adapted class, the class `Adapted` and the encodings."""
    config = model.config
    model.ropes = ropes(model, config)
    set_encodings(model, encodings)
    for i, rope in enumerate(model.ropes):
        attention = model.attention_of(i)
        change_class(attention, model.attention)
        attention.scale = attention.scaling * (1.0 if rope is None else rope.scale)
        attention.window = config.window_of(i)
    model.rotary_emb = NoRotary()
    # transformers looks up here what output_hidden_states and output_attentions record
    _CAN_RECORD_REGISTRY[str(type(model))] = model._can_record_outputs


def set_encodings(model: Any, encodings: list[Encoding]) -> None:
    """Set the encoding of each layer, or the shared one."""
    shared = model.config.shared_encoding
    model.preparation = Preparation(encodings)
    model.encoding = encodings[0] if shared else None
    for i in range(len(model.layers)):
        model.attention_of(i).encoding = None if shared else encodings[i]
    model._keep_in_fp32_modules_strict = full_precision_names(model)


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Set the class of a module. Hooks of accelerate, which hold the old `forward`, are removed and added again."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        module.__class__ = cls
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    module.__dict__.pop("forward")  # of the old class; accelerate does not remove it
    module.__class__ = cls
    add_hook_to_module(module, hook)


def _classes(family: Family) -> tuple[type[PreTrainedConfig], type[AdaptedBase], type[AdaptedForCausalLM]]:
    """Create configuration, model and language model of a family: Grape…Config, Grape…Model, Grape…ForCausalLM."""
    config: Any = config_class(family)
    common = {"config_class": config, "__module__": __name__}

    def derive(suffix: str, *bases: type, **own: Any) -> Any:
        return type(f"Grape{family.name}{suffix}", bases, {**common, **own})

    by_type = "layer_types" in family.config.__dataclass_fields__
    stock: Any = family.base._can_record_outputs["attentions"]  # type: ignore[index]  # its attention class
    attention = type(f"Grape{family.name}Attention", (Adapted, stock), {"__module__": __name__})
    mask = {LAYER_TYPE: None} if by_type else None
    base = derive("Model", AdaptedBase, family.base, attention=attention, mask=mask)
    model = derive("ForCausalLM", AdaptedForCausalLM, family.for_causal_lm, base=base)
    for cls in (config, attention, base, model):
        globals()[cls.__name__] = cls  # where pickle looks for it
    return config, base, model


#: configuration, model and language model of each family
CLASSES = [_classes(family) for family in ROWS]
FAMILIES: dict[type[PreTrainedModel], type[AdaptedForCausalLM]] = {
    family.for_causal_lm: classes[2] for family, classes in zip(ROWS, CLASSES, strict=True)
}
