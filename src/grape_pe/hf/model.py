"""`GrapeForCausalLM`: the decoder's blocks as a Hugging Face model.

No `from __future__ import annotations` here: transformers reads the configuration's class from an annotation.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..cache import Layout, arrange
from ..encodings import Encoding
from ..encodings.prepared import Preparation
from ..layers import KVShift, RMSNorm
from ..layers.arguments import check_layers, check_sinks
from ..models.absolute import EMBEDDING_STD, AbsolutePositions
from ..models.blocks import Block
from ..models.loss import cross_entropy
from .cache import GrapeDynamicLayer, GrapeStaticLayer, layers_of, static_layout
from .config import GrapeConfig
from .pretrained import GrapePretrained, full_precision_names, reset_missing


class GrapeDecoderLayer(GradientCheckpointingLayer, Block):
    """The decoder's block, with Hugging Face's gradient checkpointing."""


class GrapePreTrainedModel(GrapePretrained):
    """Base class of `GrapeModel` and `GrapeForCausalLM`."""

    config: GrapeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GrapeDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters that a checkpoint did not fill."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, nn.Linear) and not self.config.tie_word_embeddings:
            init.normal_(module.weight, std=0.5 / self.config.hidden_size**0.5)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, (Block, Encoding, KVShift, AbsolutePositions)):
            reset_missing(module)


class GrapeModel(GrapePreTrainedModel):
    """The decoder without its head: embedding, blocks and final norm.

    Args:
        config: a `GrapeConfig`.
    """

    def __init__(self, config: GrapeConfig) -> None:
        super().__init__(config)
        decoder = config.to_decoder()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.absolute = decoder.build_absolute()
        self.layers = nn.ModuleList(GrapeDecoderLayer(decoder, i) for i in range(decoder.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.encoding = decoder.build_encoding() if decoder.shared_encoding else None
        self.gradient_checkpointing = False
        self.preparation = Preparation([self.encoding_of(i) for i in range(decoder.layers)])
        self._keep_in_fp32_modules_strict = full_precision_names(self)
        self.post_init()

    def encoding_of(self, layer: int) -> Encoding:
        """The encoding of a layer, its own or the shared one."""
        return self.layers[layer].self_attn.encoding if self.encoding is None else self.encoding  # type: ignore

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states. The arguments are those of `GrapeForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = cache_for(self, past_key_values, use_cache)
        layers = None if cache is None else layers_of(cache, len(self.layers), self.encoding_of(0))
        layout = make_layout(x, attention_mask, position_ids, layers)
        check_sinks(self.config.sinks, layout)
        x = x if self.absolute is None else self.absolute(x, layout)
        if layers is not None:
            layout = layout.prepare(self.preparation, x.dtype)
        streams = [each.stream for each in layers or () if each.stream is not None]
        check_layers(self.preparation.encodings, layout, streams)
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        every = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x, states, attentions = self._blocks(x, layout, layers, bool(weights))
        return BaseModelOutputWithPast(
            last_hidden_state=x,  # type: ignore[arg-type]
            past_key_values=cache,
            hidden_states=states if every else None,  # type: ignore[arg-type]
            attentions=attentions if weights else None,  # type: ignore[arg-type]
        )

    def _blocks(
        self,
        x: Tensor,
        layout: Layout,
        layers: list[GrapeDynamicLayer | GrapeStaticLayer] | None,
        weights: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        states: tuple[Tensor, ...] = (x,)
        attentions: list[Any] = []
        for i, block in enumerate(self.layers):
            stream = None
            if layers is not None:
                stream = layers[i].open(block.self_attn.make_cache, self.encoding_of(i), self.config.rollback)  # type: ignore[union-attr,arg-type]
            x, dense = block(x, layout, self.encoding, stream, weights)
            attentions.append(dense)
            states += (x,)
        x = self.norm(x)
        return x, (*states[:-1], x), tuple(attentions)


def cache_for(model: PreTrainedModel, cache: Cache | None, use_cache: bool | None) -> Cache | None:
    """The cache to fill, or None. In training none is created by default, and checkpointing never has one."""
    if model.training and model.gradient_checkpointing and torch.is_grad_enabled():
        if cache is not None and cache.get_seq_length():
            raise ValueError(
                "gradient checkpointing cannot continue past_key_values, because it computes tokens twice; call the "
                "model under torch.no_grad(), or leave past_key_values out"
            )
        return None
    wanted = model.config.use_cache and not model.training if use_cache is None else use_cache
    return DynamicCache(config=model.config) if cache is None and wanted else cache


def make_layout(x: Tensor, mask: Tensor | None, positions: Tensor | None, layers: list[Any] | None) -> Layout:
    """The layout of new tokens, from Hugging Face's arguments and the cache."""
    batch, count = x.shape[:2]
    if mask is not None and (mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < count):
        raise ValueError(
            f"attention_mask must have shape (batch, tokens so far), with 0 at padding, got {tuple(mask.shape)} for "
            f"batch {batch} and {count} new tokens; for packed documents use position_ids"
        )
    if mask is None and positions is None and layers is None:
        return Layout()
    padding = None if mask is None else mask[:, mask.shape[1] - count :] == 0
    if layers and isinstance(layers[0], GrapeStaticLayer):
        return static_layout(layers, x, positions, padding)
    stream = layers[0].stream if layers else None
    return arrange(
        batch,
        count,
        x.device,
        positions=positions,
        padding=padding,
        tail=None if stream is None else stream.tail(),
    )


class GrapeForCausalLM(GrapePreTrainedModel, GenerationMixin):
    """The decoder with a language-modeling head.

    In training with `labels` the loss is computed in chunks of tokens and `logits` is None; pass
    `return_logits=True` to get them as well.

    Args:
        config: a `GrapeConfig`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GrapeConfig) -> None:
        super().__init__(config)
        self.model = GrapeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits and, with `labels`, the loss.

        Args:
            input_ids: tokens, (B, T).
            attention_mask: (B, tokens so far), 0 at padding.
            position_ids: positions, (B, T); where they do not increase, a packed document starts.
            past_key_values: a `DynamicCache` or `StaticCache`, filled in place.
            inputs_embeds: embeddings, (B, T, C), instead of `input_ids`.
            labels: tokens, (B, T), shifted inside; -100 where there is no target.
            use_cache: whether to return a cache; by default only outside training.
            logits_to_keep: number of last tokens to compute logits for, or their indices; 0 for all tokens.
            return_logits: whether to compute logits; by default not in training with `labels`.
            return_dict: whether to return a `CausalLMOutputWithPast` instead of a tuple.
            num_items_in_batch: divisor of the summed loss; the number of targets by default.
            kwargs: `output_attentions` and `output_hidden_states`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].to(hidden.device)
            loss = cross_entropy(hidden, self.lm_head.weight, targets, num_items_in_batch)
        if return_logits or (return_logits is None and not (self.training and labels is not None)):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        result = CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        as_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
        return result.to_tuple() if as_tuple else result
