"""Adapted models: Llama, Qwen2 and Qwen3 whose attention uses an encoding of this package.

They are transformers models like any other: `save_pretrained`, `from_pretrained`, `Trainer` and PEFT keep the
encoding. Annotations are evaluated here: transformers reads the configuration's class from one of them.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..encodings import Encoding, build
from ..encodings.prepared import Preparation
from .adapted_attention import (
    IMPLEMENTATION,
    Adapted,
    GrapeLlamaAttention,
    GrapeQwen2Attention,
    GrapeQwen3Attention,
)
from .adapted_config import GrapeLlamaConfig, GrapeQwen2Config, GrapeQwen3Config
from .cache import layers_of
from .config import LAYER_TYPE
from .fade import fade_in
from .model import cache_for, make_layout
from .pretrained import GrapePretrained, full_precision_names, reset_missing

AdaptedConfig = GrapeLlamaConfig | GrapeQwen2Config | GrapeQwen3Config


class AdaptedModel(GrapePretrained):
    """What all adapted models share: how parameters start, and which attention runs."""

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
        return attn_implementation or IMPLEMENTATION  # another name is refused by the configuration


class AdaptedBase(AdaptedModel):
    """A stock model without head whose layers have our attention."""

    attention: ClassVar[type[Adapted]]
    mask: ClassVar[Any] = None  # for the stock model, which would make one of T x T
    encoding: Encoding | None  # one for all layers
    preparation: Preparation
    embed_tokens: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        install(self, build_encodings(self, config))
        self.post_init()

    def encoding_of(self, layer: int) -> Encoding:
        return self.layers[layer].self_attn.encoding if self.encoding is None else self.encoding  # type: ignore

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
        """The stock model; its layers get a layout, made once, in the place of a mask."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
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
    """A stock language model on an adapted base."""

    base: ClassVar[type[AdaptedBase]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        encodings = build_encodings(self.model, config)
        self.model.__class__ = self.base
        install(self.model, encodings)
        self.post_init()


class GrapeLlamaModel(AdaptedBase, LlamaModel):  # type: ignore[misc]
    config: GrapeLlamaConfig
    attention = GrapeLlamaAttention


class GrapeQwen2Model(AdaptedBase, Qwen2Model):  # type: ignore[misc]
    config: GrapeQwen2Config
    attention = GrapeQwen2Attention
    mask: ClassVar[Any] = {LAYER_TYPE: None}  # one for each type of layer


class GrapeQwen3Model(AdaptedBase, Qwen3Model):  # type: ignore[misc]
    config: GrapeQwen3Config
    attention = GrapeQwen3Attention
    mask: ClassVar[Any] = {LAYER_TYPE: None}  # one for each type of layer


class GrapeLlamaForCausalLM(AdaptedForCausalLM, LlamaForCausalLM):  # type: ignore[misc]
    config: GrapeLlamaConfig
    base = GrapeLlamaModel


class GrapeQwen2ForCausalLM(AdaptedForCausalLM, Qwen2ForCausalLM):  # type: ignore[misc]
    config: GrapeQwen2Config
    base = GrapeQwen2Model


class GrapeQwen3ForCausalLM(AdaptedForCausalLM, Qwen3ForCausalLM):  # type: ignore[misc]
    config: GrapeQwen3Config
    base = GrapeQwen3Model


def build_encodings(model: Any, config: AdaptedConfig) -> list[Encoding]:
    """One encoding for each layer, or one for all, starting as the model's own RoPE."""
    head_dim = model.layers[0].self_attn.head_dim
    spectrum = rope_frequencies(model.rotary_emb, config)
    if 2 * len(spectrum) != head_dim:
        raise ValueError(
            f"the model rotates only {2 * len(spectrum)} of {head_dim} features of a head; adapt needs all"
        )
    sizes = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "width": config.hidden_size,
    }
    count = 1 if config.shared_encoding else config.num_hidden_layers
    options = {"spectrum": spectrum, **(config.encoding_options or {})}
    return [fade_in(build(config.encoding, **sizes, **options)) for _ in range(count)]


def rope_frequencies(rotary: Any, config: AdaptedConfig) -> list[float]:
    """The exact float32 frequencies of `rope_parameters`; the buffer may be on meta, or cast to bfloat16."""
    kind: Any = config.rope_parameters["rope_type"]  # type: ignore[index]
    start = rotary.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    with torch.device("cpu"):
        frequencies, _ = start(config)
    return frequencies.tolist()  # type: ignore[no-any-return]


def install(model: Any, encodings: list[Encoding]) -> None:
    """Give the layers of `model`, already of its adapted class, our attention and the encodings."""
    shared = model.config.shared_encoding
    model.preparation = Preparation(encodings)
    model.encoding = encodings[0] if shared else None
    for i, layer in enumerate(model.layers):
        attention = layer.self_attn
        change_class(attention, model.attention)
        attention.encoding = None if shared else encodings[i]
        attention.scale = attention.scaling * model.rotary_emb.attention_scaling**2
    model._keep_in_fp32_modules_strict = full_precision_names(model)
    # transformers finds in it what output_hidden_states and output_attentions record
    _CAN_RECORD_REGISTRY[str(type(model))] = model._can_record_outputs


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Set the class of a live module; hooks of accelerate, which keep the old `forward`, are put on again."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        module.__class__ = cls
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    module.__dict__.pop("forward")  # that of the old class, which accelerate leaves
    module.__class__ = cls
    add_hook_to_module(module, hook)


FAMILIES: dict[type[PreTrainedModel], type[AdaptedForCausalLM]] = {
    LlamaForCausalLM: GrapeLlamaForCausalLM,
    Qwen2ForCausalLM: GrapeQwen2ForCausalLM,
    Qwen3ForCausalLM: GrapeQwen3ForCausalLM,
}
