"""Sequences shared by several ranks (`train.context_parallel`): checks, each rank's tokens, messages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...encodings import Encoded, Encoding
from ...parallel import ContextParallel
from ...parallel.context import check_adds, check_supported
from ...parallel.path import paths_of
from ...testing import sample
from ..config import RunConfig
from ..data import Batch, Batches
from ..errors import LabError

SETTING = "train.context_parallel"
TOKENS = 4


class SharedBatches:
    """Batches of which each rank of a group has a part of every row."""

    def __init__(self, whole: Batches, parallel: ContextParallel) -> None:
        self.whole, self.parallel = whole, parallel
        self.vocab_size, self.validation_rows = whole.vocab_size, whole.validation_rows

    def batch(self, step: int, rows: range) -> Batch:
        return self._ours(self.whole.batch(step, rows))

    def validation(self, rows: range) -> Batch:
        return self._ours(self.whole.validation(rows))

    def _ours(self, batch: Batch) -> Batch:
        return Batch(self.parallel.split(batch.tokens), self.parallel.split(batch.targets))


def check_shareable(config: RunConfig) -> None:
    """Refuse settings that `ContextParallel` would refuse in the first step."""
    ranks, length = config.train.context_parallel, config.data.sequence
    if config.data.source.startswith("task:"):
        raise LabError(f"{SETTING} needs text, got data.source {config.data.source}; leave it at 1")
    if length % (2 * ranks) or length < 4 * ranks:
        raise LabError(
            f"data.sequence must be a multiple of {2 * ranks} and at least {4 * ranks} (two chunks for each of the "
            f"{ranks} ranks of {SETTING}), got {length}"
        )
    model = config.decoder(1)
    windows = [layer.window for layer in model.by_layer if layer.window is not None]
    refused = {"model.window": windows, "data.documents": config.data.documents}
    for name in (name for name, given in refused.items() if given):
        raise LabError(
            f"{SETTING} supports causal attention over whole sequences, without {name}; leave one of them out"
        )
    for layer in {each.encoding: number for number, each in enumerate(model.by_layer)}.values():
        encoded(model.build_encoding(layer))


def encoded(encoding: Encoding) -> Encoded:
    """The encoding of a few tokens; refused if its sequences cannot be shared."""
    data = sample(encoding, batch=1, tokens=TOKENS)
    try:
        code = encoding(data.q, data.k, x=data.x, v=data.v, positions=data.positions)
        check_supported(code.bias, {})
        if code.state is not None:
            check_adds(encoding, code.state)
    except ValueError as problem:
        raise LabError(f"{SETTING}: {problem}") from None
    return code


@dataclass(frozen=True)
class Circulating:
    """Bytes per token in the blocks sent from rank to rank: keys with values, and their float32 gradients."""

    keys: int = 0
    gradients: int = 0

    def __add__(self, other: Circulating) -> Circulating:
        return Circulating(self.keys + other.keys, self.gradients + other.gradients)

    def sent(self, ranks: int, recompute: bool) -> int:
        """Bytes that a rank sends per token: blocks pass all other ranks, and gradients return."""
        passes = 3 if recompute else 2
        return passes * (ranks - 1) * self.keys + ranks * self.gradients

    @property
    def buffered(self) -> int:
        """Bytes in memory: a block, its copy to send, and the received one before and after splitting."""
        return 4 * self.keys + 3 * self.gradients


def circulating(encoding: Encoding, size: int) -> list[Circulating]:
    """Of the attention of one layer, and of the probes sent before it if its bias has paths.

    Keys and values are sent in numbers of `size` bytes, tensors of a bias in their own dtype.
    """
    code, shape = encoded(encoding), encoding.shape
    keys = code.k.shape[1] * code.k.shape[3] + shape.kv_heads * shape.head_dim
    probes = [_of(path.probe_k) for path in paths_of(code.bias)]
    attention = sum(map(_of, code.bias.key_tensors().values()), Circulating(size * keys, 4 * keys))
    return [attention, *([sum(probes, Circulating())] if probes else [])]


def _of(x: Tensor) -> Circulating:
    each = x[:, :, :1].numel() * x.element_size()
    return Circulating(each, each if x.requires_grad else 0)
