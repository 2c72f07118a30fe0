"""`Decoder`, a causal language model in plain PyTorch, with any encoding.

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
    """The caches of all layers. Its methods are those of `StreamingCache`.

    Args:
        layers: the cache of each layer.
    """

    def __init__(self, layers: list[StreamingCache]) -> None:
        self.layers = layers

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.layers[0].length

    def _each(self, change: Callable[[StreamingCache], Any]) -> Self:
        for layer in self.layers:
            change(layer)
        return self

    def crop(self, tokens: int | Sequence[int] | Tensor) -> Self:
        """Remove the last `tokens` tokens: one number, or one for each sequence."""
        return self._each(lambda layer: layer.crop(tokens))

    def select(self, index: Tensor) -> Self:
        """Keep the sequences `index` of the batch, in that order."""
        return self._each(lambda layer: layer.select(index))

    def repeat(self, times: int) -> Self:
        """Repeat every sequence `times` times, as `torch.repeat_interleave` does."""
        return self._each(lambda layer: layer.repeat(times))

    def reset(self) -> Self:
        """Remove all tokens and release the storage."""
        return self._each(lambda layer: layer.reset())

    def fork(self) -> DecoderCache:
        """Return an independent copy of the cache."""
        return DecoderCache([layer.fork() for layer in self.layers])


class Trunk(nn.Module):
    """Embedding, blocks and final norm: the decoder without its head."""

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
        """The encoding of each layer."""
        return [self.encoding_of(i) for i in range(len(self.layers))]

    def encoding_of(self, layer: int) -> Encoding:
        """The encoding of a layer, its own or the shared one."""
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
        """Hidden states, (B, T, C); with `wanted`, indices (n,) into the B * T tokens, only theirs, (1, n, C)."""
        x = self.embed_tokens(tokens)
        x = x if self.absolute is None else self.absolute(x, layout)
        for i, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[i]
            rows = wanted if i + 1 == len(self.layers) else None  # later layers need the output of all tokens
            if checkpointing:
                x, _ = checkpoint(block, x, layout, self.encoding, wanted=rows, use_reentrant=False)  # type: ignore[misc]
            else:
                x, _ = block(x, layout, self.encoding, layer_cache, wanted=rows)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model with any encoding.

    Set `gradient_checkpointing` to recompute each block in the backward pass. Under `torch.device("meta")` it is
    built without memory; then call `to_empty` and `reset_parameters`.

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
        """Initialize all parameters."""
        self.model.reset_parameters()
        if self.lm_head is not None:
            nn.init.normal_(self.lm_head.weight, std=0.5 / self.config.width**0.5)

    @property
    def head(self) -> Tensor:
        """The weight of the head, (V, C)."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def parameter_count(self) -> int:
        """Number of parameters, with tied ones counted once."""
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
        """Compute logits or, with `targets`, the mean cross entropy, in chunks that never store all logits.

        Args:
            tokens: integers, (B, T).
            targets: the token that follows each, (B, T); -100 where there is no target.
            count: divisor of the summed loss; the number of targets by default.
            documents: ids of packed documents, (T,) or (B, T); an id cannot be used again later. Tokens attend only to
                their own document. With a cache, the first document continues the cached one if their ids are equal;
                tokens cached without ids have id 0.
            positions: (B|1, T). By default they continue from the last token; where they do not increase, a
                document starts.
            padding: bool (B, T), True where a sequence has no token, in any column.
            cache: a cache from `cache()`. The tokens then continue the cached ones.
            parallel: the ranks that share each sequence. Tokens, targets and loss are then those of this rank
                (`parallel.split`). Pass the `count` of all ranks, and add the losses and gradients of all ranks.

        Returns:
            Logits, (B, T, V), or the loss, a scalar.
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
        """The last hidden states, (B, T, C), the input of the head.

        Arguments are those of `forward`, and `wanted`: indices (n,) into the B * T tokens of a call without padding,
        to compute only the hidden states of these, (1, n, C).
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (batch, tokens), got {tuple(tokens.shape)}")
        if cache is not None and not isinstance(cache, DecoderCache):
            raise TypeError(f"cache must come from model.cache(), got {type(cache).__name__}")
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
        """Create an empty cache for decoding.

        Args:
            capacity: number of tokens to allocate storage for at once; None to grow as needed.
            rollback: number of tokens that `DecoderCache.crop` can remove.
            window: window of all layers that do not have a smaller one.
            sinks: number of initial keys visible outside this window.
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
