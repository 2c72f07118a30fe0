"""The language model: one decoder for every encoding, as plain PyTorch.

model = Decoder(DecoderConfig(width=256, layers=4, heads=4, encoding="grape-ap"))
loss = model(tokens, targets=targets)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.masks import check_window
from ..cache import Layout, StreamingCache
from ..encodings import Encoding
from ..encodings.prepared import Preparation
from ..layers import Attention, RMSNorm
from ..layers.arguments import call_layout, check_layers, check_model_cache, check_sinks
from .absolute import EMBEDDING_STD
from .blocks import Block
from .config import DecoderConfig
from .loss import counted_rows, cross_entropy

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class DecoderCache:
    """What all layers keep of the tokens so far. See `StreamingCache` for what each call does.

    Args:
        layers: one cache for each layer.
    """

    def __init__(self, layers: list[StreamingCache]) -> None:
        self.layers = layers

    @property
    def length(self) -> int:
        return self.layers[0].length

    def _each(self, change: Callable[[StreamingCache], Any]) -> Self:
        for layer in self.layers:
            change(layer)
        return self

    def crop(self, tokens: int | Sequence[int] | Tensor) -> Self:
        return self._each(lambda layer: layer.crop(tokens))

    def select(self, index: Tensor) -> Self:
        return self._each(lambda layer: layer.select(index))

    def repeat(self, times: int) -> Self:
        return self._each(lambda layer: layer.repeat(times))

    def reset(self) -> Self:
        return self._each(lambda layer: layer.reset())

    def fork(self) -> DecoderCache:
        return DecoderCache([layer.fork() for layer in self.layers])


class Trunk(nn.Module):
    """Embedding, blocks and the last norm: tokens to hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.absolute = config.build_absolute()
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.encoding = config.build_encoding() if config.shared_encoding else None
        self.preparation = Preparation(self.encodings())

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)
        nn.init.ones_(self.norm.weight)
        for block in self.layers:
            block.reset_parameters()  # type: ignore[operator]
        for part in (self.absolute, self.encoding):
            if part is not None:
                part.reset_parameters()

    def encodings(self) -> list[Encoding]:
        return [self.encoding_of(i) for i in range(len(self.layers))]

    def encoding_of(self, layer: int) -> Encoding:
        own = self.layers[layer].self_attn.encoding  # type: ignore[union-attr]
        found = own if self.encoding is None else self.encoding
        assert isinstance(found, Encoding)
        return found

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        cache: DecoderCache | None = None,
        checkpointing: bool = False,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, C); with `wanted` (n,), indices into the B * T tokens, those of these, (1, n, C)."""
        x = self.embed_tokens(tokens)
        x = x if self.absolute is None else self.absolute(x, layout)
        for i, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[i]
            rows = wanted if i + 1 == len(self.layers) else None  # what comes after attention is row by row
            if checkpointing:
                x, _ = checkpoint(block, x, layout, self.encoding, wanted=rows, use_reentrant=False)  # type: ignore[misc]
            else:
                x, _ = block(x, layout, self.encoding, layer_cache, wanted=rows)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model with any encoding.

    `gradient_checkpointing` recomputes each block in the backward pass. Built under `torch.device("meta")`
    it takes no memory; `to_empty` and `reset_parameters` then make it real.

    Args:
        config: sizes and options.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.model.reset_parameters()
        if self.lm_head is not None:
            nn.init.normal_(self.lm_head.weight, std=0.5 / self.config.width**0.5)

    @property
    def head(self) -> Tensor:
        """(V, C): what turns hidden states into logits."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        count: Tensor | float | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        cache: DecoderCache | None = None,
        parallel: ContextParallel | None = None,
    ) -> Tensor:
        """Logits (B, T, V); or, with `targets`, their mean cross entropy, computed in chunks.

        Args:
            tokens: (B, T) integer.
            targets: (B, T), the token that follows each; -100 where nothing is to be predicted.
            count: what the sum of losses is divided by, if not the number of targets.
            documents: (T,) or (B, T) ids of packed sequences: each is a sequence of its own, and an id is not
                used twice. With a cache, the first goes on if its id is the last one's (0 at first).
            positions: (B|1, T), if they are not those that follow; where they fall, a document begins.
            padding: (B, T) bool, True where there is no token, anywhere in a sequence.
            cache: from `cache()`; the tokens then continue those before.
            parallel: the ranks that share each sequence. Tokens and targets are those of this rank (`parallel.split`)
                and so is the loss: with `count` for all ranks, losses and gradients of all ranks are to be added.
        """
        given = {"documents": documents, "positions": positions, "padding": padding}
        if targets is None:
            return self.hidden(tokens, **given, cache=cache, parallel=parallel) @ self.head.T
        wanted = None if padding is not None or targets.shape != tokens.shape else counted_rows(targets)
        hidden = self.hidden(tokens, **given, cache=cache, parallel=parallel, wanted=wanted)
        if wanted is not None:
            targets = targets.reshape(-1)[wanted]
        return cross_entropy(hidden, self.head, targets, count)

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        cache: DecoderCache | None = None,
        parallel: ContextParallel | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states (B, T, C), of which the head makes logits; arguments as for `forward`.

        With `wanted` (n,), indices into the B * T tokens of a call without padding, (1, n, C): the last layer then
        computes only what these need.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, tokens), got {tuple(tokens.shape)}")
        encoding, first = self.model.encoding_of(0), None if cache is None else cache.layers[0]
        if first is not None:
            check_model_cache(first, encoding)
        layout = call_layout(tokens, encoding, positions, documents, padding, first, parallel)
        check_sinks(self.config.sinks, layout)
        if cache is not None:
            layout = layout.prepare(self.model.preparation, self.model.embed_tokens.weight.dtype)
        check_layers(self.model.preparation.encodings, layout, [] if cache is None else cache.layers)
        checkpointing = self.gradient_checkpointing and self.training and cache is None
        return self.model(tokens, layout, cache, checkpointing, wanted)  # type: ignore[no-any-return]

    def cache(
        self,
        capacity: int | None = None,
        rollback: int = 128,
        window: int | None = None,
        sinks: int = 0,
    ) -> DecoderCache:
        """An empty cache for decoding; `capacity` preallocates, `rollback` bounds `crop`.

        With a `window`, a token sees fewer than so many tokens back, in every layer that has no smaller window
        of its own, and the `sinks` first.
        """
        check_window(window, sinks)
        layers = []
        for i, block in enumerate(self.model.layers):
            layer: Attention = block.self_attn  # type: ignore[assignment]
            limits = {}
            if window is not None and (layer.window is None or window < layer.window):
                limits = {"window": window, "sinks": sinks}
            encoding = self.model.encoding_of(i)
            layers.append(layer.make_cache(encoding, capacity=capacity, rollback=rollback, **limits))
        return DecoderCache(layers)
