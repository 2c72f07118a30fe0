"""Estimated cost of a run: parameters, FLOPs, memory by part, messages. `step_time` estimates time from them.

The model is built on the meta device; nothing is allocated or measured.
"""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ...models import Decoder
from ...models.loss import CHUNK_SHARE
from ..config import RunConfig
from .sharing import Circulating, circulating
from .step_time import GPUS, Work

#: bytes of GPU memory assumed for chunks of logits and the longest sequence
GPU_MEMORY = 80e9
#: share of it available to a sequence with weights and optimizer
USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    weights: float
    gathered: float  # copies in the dtype of the products
    gradients: float
    optimizer: float
    activations: float
    logits: float
    ring: float = 0.0  # keys, values and their gradients sent between ranks

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Messages:
    """Bytes that one process sends (and receives) in a step, and the number of collectives."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    collectives: int = 0
    ring: float = 0.0  # between ranks that share a sequence
    exchanges: int = 0


@dataclass(frozen=True)
class Estimate:
    """Estimates of a run; memory and messages of one process."""

    ranks: int
    parameters: int
    encoding_parameters: int
    flops_per_token: float
    tokens_per_step: int
    tokens: int
    steps: int
    micro_batches: int
    memory: Memory
    other_activations: float  # with the opposite setting of recomputation
    messages: Messages
    work: Work
    longest: int  # tokens of one sequence that fits GPUs of 80 GB

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens

    def hours(self, gpu: str) -> float:
        """Total GPU hours."""
        return GPUS[gpu].seconds(self.work) * self.steps * self.ranks / 3600

    def mfu(self, gpu: str) -> float:
        """Model FLOPs (without recomputation) as a share of the peak."""
        per_rank = self.flops_per_token * self.tokens_per_step / self.ranks
        return per_rank / (GPUS[gpu].seconds(self.work) * GPUS[gpu].peak)


def estimate(config: RunConfig, vocab_size: int, ranks: int = 1) -> Estimate:
    """Estimate the cost of a run without allocating.

    Args:
        config: the recipe.
        vocab_size: tokens of the vocabulary.
        ranks: number of processes.
    """
    with torch.device("meta"):
        model = Decoder(config.decoder(vocab_size))
    return _Counter(config, model, ranks).estimate()


class _Counter:
    """One configuration on so many ranks."""

    def __init__(self, config: RunConfig, model: Decoder, ranks: int) -> None:
        train, trunk = config.train, model.model
        self.config, self.model, self.ranks = config, model, ranks
        self.fsdp = train.strategy == "fsdp" and ranks > 1
        self.shards = (train.shard or ranks) if self.fsdp else 1
        self.size = 2 if train.precision == "bf16" else 4  # bytes of a number in a product
        self.sharing = train.context_parallel
        share = max(1, train.batch * self.sharing // ranks)
        self.rows = train.micro_batch or share
        self.micro_batches = max(1, share // self.rows)
        self.tokens = self.rows * config.data.sequence // self.sharing  # of a micro-batch, in one process
        self.blocks_sent = self._circulating() if self.sharing > 1 else []
        self.all = model.parameter_count()
        encodings = {trunk.encoding_of(number) for number in range(len(trunk.layers))}
        self.encodings = sum(p.numel() for each in encodings for p in each.parameters())
        inside = 0 if model.config.shared_encoding else self.encodings
        self.blocks = sum(p.numel() for p in trunk.layers.parameters()) - inside
        self.rest = self.all - self.blocks - self.encodings

    def _circulating(self) -> list[list[Circulating]]:
        """Blocks sent between ranks in each layer."""
        sizes = self.model.config
        names = [each.encoding for each in sizes.by_layer]
        of = {name: circulating(sizes.build_encoding(names.index(name)), self.size) for name in names}
        return [of[name] for name in names]

    def estimate(self) -> Estimate:
        config, model = self.config, self.model
        each = flops_per_token(model, config.data.sequence)
        messages = self.messages()
        return Estimate(
            ranks=self.ranks, parameters=self.all, encoding_parameters=self.encodings, flops_per_token=each,
            tokens_per_step=config.tokens_per_step, tokens=config.tokens_per_step * config.train.steps,
            steps=config.train.steps, micro_batches=self.micro_batches, memory=self.memory(),
            other_activations=self.activations(not config.train.recompute), messages=messages,
            work=self.work(each, messages), longest=self.longest(),
        )  # fmt: skip

    def memory(self) -> Memory:
        """Weights, gradients and two moments are float32; FSDP gathers the root and two blocks at a time."""
        whole, block = self.all, self.blocks / self.model.config.layers
        gathered = self.size * (self.rest + 2 * block) + 4 * self.encodings
        if not self.fsdp:
            gathered = 2 * whole if self.size == 2 else 0  # autocast keeps rounded weights in a forward pass
        buckets: float = 4 * whole if self.ranks > 1 else 0  # of ddp
        if self.fsdp:  # gradients of several micro-batches add up before they are exchanged
            buckets = 4 * whole if self.micro_batches > 1 else self.size * 2 * block
        return Memory(
            4 * whole / self.shards, gathered, 4 * whole / self.shards + buckets, 8 * whole / self.shards,
            self.activations(self.config.train.recompute), self.logits(), self.ring(),
        )  # fmt: skip

    def activations(self, recompute: bool) -> float:
        """Saved for backward in one micro-batch: about 12 widths and 4 hidden widths per token and layer.

        In bfloat16 without compilation 16 more, which norms, gates and casts keep in float32.
        """
        sizes, tokens = self.model.config, self.tokens
        widths = 12 if self.config.train.compile or self.size == 4 else 28
        layer = tokens * (widths * sizes.width + 4 * sizes.hidden) * self.size
        return layer + sizes.layers * tokens * sizes.width * self.size if recompute else sizes.layers * layer

    def ring(self) -> float:
        """Blocks of one layer; for a path also float32 sums over each chunk for each row, 16 copies."""
        buffered = [sum(part.buffered for part in layer) for layer in self.blocks_sent]
        paths = any(len(layer) > 1 for layer in self.blocks_sent)
        crossing = 64 * self.model.config.heads * self.sharing if paths else 0
        return self.tokens * (max(buffered, default=0) + crossing)

    def longest(self) -> int:
        """Tokens of one sequence in a micro-batch of its own, rounded down to 1,000."""
        memory, logits = self.memory(), self.logits()
        each = (memory.activations + memory.ring) / self.tokens
        fixed = memory.total - logits - each * self.tokens + self.logits(GPU_MEMORY)
        return max(0, int((GPU_MEMORY * USABLE - fixed) / each * self.sharing) // 1000 * 1000)

    def logits(self, tokens: float = 0) -> float:
        """One chunk in float32 with two copies in the products' dtype, and the head's gradient in float32."""
        sizes = self.model.config
        rows = min(tokens or self.tokens, int(GPU_MEMORY * CHUNK_SHARE) // 4 // sizes.vocab_size)
        return (4 + 2 * self.size) * rows * sizes.vocab_size + 4 * sizes.vocab_size * sizes.width

    def messages(self) -> Messages:
        """A ring sends (n - 1)/n of what it gathers or scatters, and twice that for an all-reduce."""
        if self.ranks == 1:
            return Messages()
        ring = self.exchanges()
        if not self.fsdp:
            return Messages(all_reduce=2 * _ring(self.ranks) * 4 * self.all, collectives=1, **ring)
        groups = self.ranks // self.shards
        units = 1 + (self.encodings > 0)
        gathered = (
            self.size * (2 * self.blocks + self.rest) + 4 * self.encodings
        )  # blocks twice, for backward
        layers = self.model.config.layers
        return Messages(
            _ring(self.shards) * gathered * self.micro_batches,
            _ring(self.shards) * 4 * self.all,
            2 * _ring(groups) * 4 * self.all / self.shards,
            (2 * layers + units) * self.micro_batches + (layers + units) * (1 + (groups > 1)), **ring,
        )  # fmt: skip

    def exchanges(self) -> dict[str, int]:
        """Keys and gradients in the attention of all layers, without running sums and shifted tokens."""
        ranks, again = self.sharing, self.config.train.recompute
        parts = [part for layer in self.blocks_sent for part in layer]
        sent = sum(part.sent(ranks, again) for part in parts) * self.tokens
        each = (3 if again else 2) * (ranks - 1) + ranks
        return {"ring": sent * self.micro_batches, "exchanges": each * len(parts) * self.micro_batches}

    def work(self, flops_per_token: float, messages: Messages) -> Work:
        """Work of one process in a step; recomputation adds a third of the blocks' FLOPs."""
        sizes, train = self.model.config, self.config.train
        tokens = self.config.tokens_per_step / self.ranks
        flops = flops_per_token * tokens
        if train.recompute:
            flops += (flops_per_token - 6 * sizes.vocab_size * sizes.width) * tokens / 3
        if self.sharing > 1:  # backward recomputes the attention of each pair of chunks
            flops += 2 * sizes.layers * sizes.head_dim * sizes.heads * self.config.data.sequence * tokens
        saved = self.activations(False) * self.micro_batches
        moved = (
            (6 if train.recompute else 4) * saved  # written and read, as are their gradients
            + tokens * sizes.vocab_size * (22 + 8 * self.size)  # passes over the logits
            + 3 * self.size * self.all * self.micro_batches  # weights, read by each product
            + 36 * self.all / self.shards  # optimizer and clipping
        )
        near = messages.all_gather + messages.reduce_scatter
        return Work(
            flops, moved, near, messages.all_reduce, self.shards if self.fsdp else self.ranks, self.ranks,
            messages.ring, self.sharing,
        )  # fmt: skip


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def flops_per_token(model: Decoder, sequence: int) -> float:
    """FLOPs per token of a training step: 6 per multiplied weight, and causal attention over half the sequence.

    Biases and rotations are not counted, as their cost depends on the kernel.
    """
    config = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    if config.tied:
        weights += config.vocab_size * config.width
    if model.model.encoding is not None:  # one for all layers, used in each
        own = sum(m.weight.numel() for m in model.model.encoding.modules() if isinstance(m, nn.Linear))
        weights += (config.layers - 1) * own
    return 6.0 * weights + 6.0 * config.layers * config.head_dim * config.heads * sequence


def peak_flops(device: torch.device) -> float | None:
    """The data sheet's figure of a known device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.peak for word, gpu in GPUS.items() if word in name), None)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
