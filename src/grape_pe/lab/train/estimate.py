"""What a run will cost, before it runs: parameters, FLOPs, memory, tokens. Estimates say so."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from ...models import Decoder, DecoderConfig
from ..config import RunConfig
from .optimization import learning_rate

#: dense bf16 FLOP/s by the vendor's data sheet, by a word in the device's name
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
GPU_HOUR = 3600.0
#: the share of the peak assumed when hours are estimated
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Estimate:
    """A run in numbers; memory is that of one process."""

    parameters: int
    encoding_parameters: int
    flops_per_token: float
    tokens_per_step: int
    tokens: int
    state_bytes: int
    activation_bytes: int

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens

    def hours(self, device: str) -> float:
        """Hours of one such device at 40 % of its peak."""
        return self.flops / (PEAK_FLOPS[device] * ASSUMED_MFU) / GPU_HOUR


def estimate(config: RunConfig, vocab_size: int, ranks: int = 1) -> Estimate:
    """Count without allocating: the model is built on meta.

    Args:
        config: the recipe.
        vocab_size: tokens of the vocabulary.
        ranks: number of processes.
    """
    sizes = config.decoder(vocab_size)
    with torch.device("meta"):
        model = Decoder(sizes)
    parameters = model.parameter_count()
    shards = (config.train.shard or ranks) if config.train.strategy == "fsdp" else 1
    return Estimate(
        parameters=parameters,
        encoding_parameters=_of_encodings(model),
        flops_per_token=flops_per_token(sizes, config.data.sequence),
        tokens_per_step=config.tokens_per_step,
        tokens=config.tokens_per_step * config.train.steps,
        state_bytes=16 * parameters // shards,  # weights, gradients and two moments, float32
        activation_bytes=_activations(config, sizes, ranks),
    )


def _of_encodings(model: Decoder) -> int:
    trunk = model.model
    layers = {trunk.encoding_of(number) for number in range(len(trunk.layers))}
    return sum(p.numel() for encoding in layers for p in encoding.parameters())


def flops_per_token(config: DecoderConfig, sequence: int) -> float:
    """Of a training step: 6 for each weight that multiplies, and causal attention over half the sequence."""
    heads = config.head_dim * config.heads
    matrices = config.width * (
        (3 if config.output_gate else 2) * heads + 2 * config.kv_heads * config.head_dim + 3 * config.hidden
    )
    weights = config.layers * matrices + config.vocab_size * config.width
    return 6.0 * weights + 6.0 * config.layers * heads * sequence


def _activations(config: RunConfig, sizes: DecoderConfig, ranks: int) -> int:
    """What backward needs of one micro-batch: about 12 widths and 4 hidden widths a token and layer."""
    rows = config.train.micro_batch or config.train.batch // ranks
    tokens, number = rows * config.data.sequence, 2 if config.train.precision == "bf16" else 4
    layer = tokens * (12 * sizes.width + 4 * sizes.hidden) * number
    if config.train.recompute:
        return layer + sizes.layers * tokens * sizes.width * number
    return sizes.layers * layer


def describe(config: RunConfig, vocab_size: int, ranks: int = 1) -> str:
    """What `--dry-run` prints."""
    e, t = estimate(config, vocab_size, ranks), config.train
    rates = ", ".join(f"{learning_rate(s, t):.2g} at {s}" for s in (0, t.warmup, t.steps // 2, t.steps - 1))
    lines = [
        f"model       {(e.parameters - e.encoding_parameters) / 1e6:.1f}M parameters and "
        f"{e.encoding_parameters:,} of {config.model.encoding} ({e.parameters:,} in all)",
        f"batch       {t.batch} x {config.data.sequence} = {e.tokens_per_step:,} tokens a step",
        f"tokens      {e.tokens / 1e9:.3g}B in {t.steps:,} steps ({e.tokens:,})",
        f"compute     {e.flops_per_token:.3g} FLOPs a token, {e.flops:.3g} in all",
        f"memory      {e.state_bytes / 1e9:.2f} GB of state, about {e.activation_bytes / 1e9:.2f} GB of "
        f"activations a process, of {ranks}",
        f"schedule    {t.schedule}: {rates}",
        "estimate    " + ", ".join(f"{e.hours(d):,.0f} {d}-hours" for d in ("A100", "H100"))
        + f" at {ASSUMED_MFU:.0%} of the peak",
    ]  # fmt: skip
    return "\n".join(lines)


def peak_flops(device: torch.device) -> float | None:
    """The data sheet's figure for this device, if it is a known one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
