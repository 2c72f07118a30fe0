"""Moving in: give a live pretrained Llama or Qwen model another encoding, its logits unchanged at first.

adapt(model, "rope+grape-ap")         # then train; only the new parameters by default
save_adapter(model, "ap.safetensors")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..extras import require

require("transformers", "hf")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.weak import WeakTensorKeyDictionary  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402
from transformers.cache_utils import Cache  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM  # noqa: E402

from ..cache import Layout, StreamingCache  # noqa: E402
from ..encodings import Encoding, build  # noqa: E402
from ..models.blocks import dense_weights, see  # noqa: E402
from .cache import layer_of  # noqa: E402
from .fade import fade_in  # noqa: E402
from .model import make_layout  # noqa: E402

#: rotations that can start as the model's own RoPE
ROTATIONS = ("rope", "grape-m", "grape-m-basis")
#: kinds of rope_parameters with one fixed spectrum
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
IMPLEMENTATION = "grape"
#: the layout of each call under way, by the cosines that transformers makes for it
LAYOUTS = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Adapter:
    """What `adapt` was told; enough to do it again."""

    encoding: str
    options: Mapping[str, Any]
    shared: bool


class Adapted(nn.Module):
    """What the attention of an adapted model does instead of its own rotation, cache and softmax."""

    adapter: Adapter
    encoding: Encoding | None
    shared: tuple[Encoding, ...]  # in a tuple, so that it is registered once, by the model
    scale: float
    rollback: int = 128

    def used(self) -> Encoding:
        return self.shared[0] if self.encoding is None else self.encoding

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[operator,arg-type]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = None if past_key_values is None else layer_of(past_key_values, self.layer_idx)  # type: ignore[arg-type]
        layout = self._layout(hidden_states, position_embeddings, attention_mask, position_ids, layer)
        x, encoding = layout.pack(hidden_states), self.used()
        cache = None if layer is None else layer.open(StreamingCache, encoding, self.rollback)
        seen = see(*self.project(x), x, layout, encoding, cache)
        y = self.o_proj(seen.attend(scale=self.scale).transpose(1, 2).flatten(2))  # type: ignore[operator]
        wanted = kwargs.get("output_attentions")
        return layout.unpack(y), dense_weights(seen, layout, cache, scale=self.scale) if wanted else None

    def _layout(
        self, x: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor | None, layer: Any
    ) -> Layout:
        """The layout of a call, made by its first layer; all layers get the same rotary embeddings."""
        layout = None if rotary is None else LAYOUTS.get(rotary[0])
        if layout is None:
            if mask is not None and bool((mask == 0).any()):
                positions = None  # counted over the tokens that are there
            else:
                mask = None
            layout = make_layout(x, mask, positions, None if layer is None else [layer])
            if rotary is not None:
                LAYOUTS[rotary[0]] = layout
        return layout


class AdaptedLlamaAttention(Adapted, LlamaAttention):  # type: ignore[misc]
    pass


class AdaptedQwen2Attention(Adapted, Qwen2Attention):
    pass


class AdaptedQwen3Attention(Adapted, Qwen3Attention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


FAMILIES: dict[type[PreTrainedModel], type[Adapted]] = {
    LlamaForCausalLM: AdaptedLlamaAttention,
    Qwen2ForCausalLM: AdaptedQwen2Attention,
    Qwen3ForCausalLM: AdaptedQwen3Attention,
}


def _padding_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The (batch, tokens) mask as it came: an adapted layer makes no T x T mask of it."""
    return attention_mask


def _unreachable(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"attn_implementation={IMPLEMENTATION!r} belongs to models changed by grape_pe.hf.adapt, "
        f"and {type(module).__name__} is not; use sdpa"
    )


AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)
AttentionInterface.register(IMPLEMENTATION, _unreachable)


def adapt(
    model: PreTrainedModel,
    encoding: str,
    *,
    shared: bool = False,
    train: Literal["new", "all"] = "new",
    **options: Any,
) -> PreTrainedModel:
    """Replace the encoding of a pretrained model, in place; its logits stay as they were until it is trained.

    A rotation starts at the model's own frequencies; biases start at amplitude 0 (see `Faded`).

    Args:
        model: a Llama, Qwen2 or Qwen3 model for causal language modelling.
        encoding: the new encoding: "grape-m", "rope+fox", "grape-m+grape-ap", …
        shared: one encoding for the whole model instead of one for each layer.
        train: "new" freezes all other parameters, "all" leaves them as they are.
        options: of the encoding, as for `grape.build`.
    """
    family = _family(model)
    if train not in ("new", "all"):
        raise ValueError(f'train must be "new" or "all", got {train!r}')
    info = Adapter(encoding, options, shared)
    built = [_encoding(model, info) for _ in range(1 if shared else model.config.num_hidden_layers)]
    if train == "new":
        model.requires_grad_(False)
    if shared:
        model.model.add_module("grape_encoding", built[0])
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.__class__ = family
        attention.adapter = info
        attention.encoding = None if shared else built[i]
        attention.shared = (built[0],) if shared else ()
        attention.scale = attention.scaling * model.model.rotary_emb.attention_scaling**2
    model.config._attn_implementation = IMPLEMENTATION
    model._supports_attention_backend = False
    return model


def adapter_of(model: PreTrainedModel) -> Adapter:
    """What the model was adapted to; an error if it was not."""
    if type(model) not in FAMILIES or not isinstance(model.model.layers[0].self_attn, Adapted):
        raise ValueError(f"this {type(model).__name__} has not been adapted; call adapt(model, …) first")
    return model.model.layers[0].self_attn.adapter


def new_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters `adapt` added, by name."""
    held = set(new_state(model))
    return {name: p for name, p in model.named_parameters() if name in held}


def new_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Everything `adapt` added: parameters and buffers, by name."""
    if adapter_of(model).shared:
        prefixes = ["model.grape_encoding."]
    else:
        prefixes = [f"model.layers.{i}.self_attn.encoding." for i in range(len(model.model.layers))]
    return {name: t for name, t in model.state_dict().items() if name.startswith(tuple(prefixes))}


def _family(model: PreTrainedModel) -> type[Adapted]:
    if type(model) not in FAMILIES:
        known = ", ".join(cls.__name__ for cls in FAMILIES)
        raise TypeError(f"adapt knows {known}; got {type(model).__name__}. Wrap with PEFT after adapting")
    if isinstance(model.model.layers[0].self_attn, Adapted):
        raise ValueError(f"this model already has {adapter_of(model).encoding!r}; load the original again")
    config = model.config
    kind = config.rope_parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} changes its frequencies as it goes; adapt knows {ROPE_TYPES}")
    planes = model.model.rotary_emb.inv_freq.shape[0]
    if 2 * planes != model.model.layers[0].self_attn.head_dim:
        raise ValueError(f"the model rotates only {2 * planes} features of a head; adapt needs all of them")
    if config.attention_dropout:
        raise ValueError(f"attention_dropout={config.attention_dropout} is not supported; set it to 0.0")
    if "sliding_attention" in config.to_dict().get("layer_types", []):
        raise ValueError("layers with a sliding window cannot be adapted")
    return FAMILIES[type(model)]


def _encoding(model: PreTrainedModel, info: Adapter) -> Encoding:
    """The new encoding, starting as the model's own rotation and nothing else."""
    config, attention = model.config, model.model.layers[0].self_attn
    rotations = [part for part in info.encoding.split("+") if part in ROTATIONS]
    spectrum = {"spectrum": model.model.rotary_emb.inv_freq.tolist()} if rotations else {}
    encoding = build(
        info.encoding,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        width=config.hidden_size,
        **spectrum,
        **info.options,
    )
    if not rotations:
        raise ValueError(
            f"{info.encoding!r} would change the logits: the rotation the model was trained with must stay, "
            f"as one of {', '.join(ROTATIONS)}; for example 'rope+{info.encoding}'"
        )
    weight = attention.q_proj.weight
    with torch.no_grad():
        return fade_in(encoding).to(weight.device, weight.dtype)
