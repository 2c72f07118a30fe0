"""`DecoderConfig`, the configuration of a decoder in plain PyTorch and in Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..checks import check_integer
from ..encodings import Encoding, build
from ..layers import Attention
from ..layers.arguments import QKNorm, check_qk_norm
from .absolute import KINDS, AbsolutePositions
from .by_layer import LayerSetting, label, layer_settings, options_for

#: field names here and in Hugging Face's configurations, the format of saved models
HF_NAMES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "encoding": "encoding",
    "encoding_options": "encoding_options",
    "window": "window",
    "sinks": "sinks",
    "shared_encoding": "shared_encoding",
    "kv_shift": "kv_shift",
    "qk_norm": "qk_norm",
    "output_norm": "output_norm",
    "output_gate": "output_gate",
    "absolute": "absolute",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
#: fields that configurations saved by earlier versions do not have
LATER = ("output_norm", "output_gate", "absolute", "max_positions")
SIZES = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "max_positions")
#: default number of learned absolute positions
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. The defaults are those of the paper's experiments.

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: features of the residual stream.
        layers: number of blocks.
        heads: number of query heads.
        kv_heads: number of key heads; must divide `heads`, which is the default (0).
        head_dim: features of a head; width / heads by default (0).
        hidden: features inside the SwiGLU; floor(8/3 width) by default (0).
        encoding: a name for `grape.build`, such as "grape-m+grape-ap"; or a list of names, which repeats
            over the layers. "grape-m@w128" also sets the window of its layers.
        encoding_options: options of the encoding. Different encodings each get the options that they have.
        window: a token attends to itself and to the `window` - 1 tokens before it; None for all tokens. A list
            repeats over the layers.
        sinks: number of initial keys visible outside the windows.
        shared_encoding: whether all layers share one encoding and its parameters.
        kv_shift: whether to mix each key and value with those of the token before.
        qk_norm: True normalizes queries and keys before the encoding; "after" normalizes them after the rotation, as
            the authors' RoPE and GRAPE-M models do; False does not normalize them.
        norm_eps: epsilon of the norms.
        tied: whether embedding and head share one matrix.
        output_norm: whether to normalize the attention output of each head.
        output_gate: whether to multiply the attention output by sigmoid(W x).
        absolute: absolute positions to add to the token embeddings, "sinusoidal" or "learned", in addition to the
            encoding; use the encoding "nope" to have only these.
        max_positions: number of learned absolute positions; longer sequences raise an error.
    """

    vocab_size: int = 50304
    width: int = 1024
    layers: int = 24
    heads: int = 8
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    encoding: str | Sequence[str] = "rope"
    encoding_options: Mapping[str, Any] = field(default_factory=dict)
    window: int | Sequence[int | None] | None = None
    sinks: int = 0
    shared_encoding: bool = False
    kv_shift: bool = False
    qk_norm: QKNorm = True
    norm_eps: float = 1e-5
    tied: bool = True
    output_norm: bool = False
    output_gate: bool = False
    absolute: Literal["sinusoidal", "learned"] | None = None
    max_positions: int = MAX_POSITIONS

    def __post_init__(self) -> None:
        self._check("width", "heads")
        self._fill("max_positions", MAX_POSITIONS)
        self._fill("kv_heads", self.heads)
        self._fill("head_dim", self.width // self.heads)
        self._fill("hidden", math.floor(8 * self.width / 3))
        self._check(*SIZES)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if not isinstance(self.encoding_options, Mapping):
            raise TypeError(f"encoding_options must be a mapping, got {self.encoding_options!r}")
        check_qk_norm(self.qk_norm)
        if self.absolute is not None and self.absolute not in KINDS:
            raise ValueError(f"absolute must be {', '.join(map(repr, KINDS))} or None, got {self.absolute!r}")
        self._check_layers()

    def _check_layers(self) -> None:
        self._fill("sinks", 0)
        for name in ("encoding", "window"):
            if isinstance(self.__dict__[name], tuple):  # config.json has lists
                object.__setattr__(self, name, list(self.__dict__[name]))
        names = list(dict.fromkeys(each.encoding for each in self.by_layer))
        if self.shared_encoding and len(names) > 1:
            raise ValueError(
                f"shared_encoding needs one encoding for all layers, got {', '.join(names)}; only windows may differ"
            )

    @property
    def by_layer(self) -> list[LayerSetting]:
        """The encoding and the window of each layer."""
        return layer_settings(self.encoding, self.window, self.sinks, self.layers)

    @property
    def encoding_label(self) -> str:
        """The encodings in one line, for reports."""
        return label(self.encoding)

    def _fill(self, name: str, value: int) -> None:
        if self.__dict__[name] in (0, None):
            object.__setattr__(self, name, value)

    def _check(self, *names: str) -> None:
        for name in names:
            check_integer(name, self.__dict__[name])

    @classmethod
    def medium(cls, **changes: Any) -> DecoderConfig:
        """The paper's medium model: 24 layers, 8 heads of 128, 353M parameters."""
        return cls(**{"width": 1024, "layers": 24, "heads": 8, **changes})

    @classmethod
    def large(cls, **changes: Any) -> DecoderConfig:
        """The paper's large model: 36 layers, 10 heads of 128, 772M parameters."""
        return cls(**{"width": 1280, "layers": 36, "heads": 10, **changes})

    def build_encoding(self, layer: int = 0) -> Encoding:
        """Build the encoding of a layer."""
        name = self.by_layer[layer].encoding
        return build(
            name,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            width=self.width,
            **self.options_of(name),
        )

    def build_absolute(self) -> AbsolutePositions | None:
        """Build the absolute positions, if the model has any."""
        if self.absolute is None:
            return None
        return AbsolutePositions(self.absolute, self.width, self.max_positions)

    def options_of(self, name: str) -> dict[str, Any]:
        """The options of the encoding of this name."""
        return options_for(name, [each.encoding for each in self.by_layer], self.encoding_options)

    def build_attention(self, layer: int) -> Attention:
        """Build the attention of a layer, with encoding=None if the layers share one."""
        own = self.by_layer[layer]
        return Attention(
            self.width,
            self.heads,
            self.kv_heads,
            self.head_dim,
            encoding=None if self.shared_encoding else own.encoding,
            encoding_options=self.options_of(own.encoding),
            window=own.window,
            sinks=0 if own.window is None else self.sinks,
            qk_norm=self.qk_norm,
            kv_shift=self.kv_shift,
            norm_eps=self.norm_eps,
            output_norm=self.output_norm,
            output_gate=self.output_gate,
        )

    def to_hf(self) -> dict[str, Any]:
        """The configuration with Hugging Face's field names."""
        values = {f.name: self.__dict__[f.name] for f in fields(self)}
        return {HF_NAMES[name]: value for name, value in values.items()} | {
            "encoding_options": dict(self.encoding_options)
        }

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Create from a configuration with Hugging Face's field names. Other fields are ignored."""
        missing = [theirs for ours, theirs in HF_NAMES.items() if theirs not in values and ours not in LATER]
        if missing:
            raise ValueError(f"not the configuration of a grape model: it does not have {', '.join(missing)}")
        return cls(**{ours: values[theirs] for ours, theirs in HF_NAMES.items() if theirs in values})
