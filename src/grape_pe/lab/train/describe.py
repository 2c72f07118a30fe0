"""The output of `grape train --dry-run` and `grape recipes --rows`."""

from __future__ import annotations

from ..config import RunConfig
from ..paper import rows
from .estimate import Estimate, estimate
from .optimization import learning_rate
from .step_time import GPUS

SHOWN = ("A100", "H100")
PAPER_GPUS = 8  # of one node


def describe(config: RunConfig, vocab_size: int, ranks: int = 1) -> str:
    """Model size, cost and schedule as text."""
    e, t = estimate(config, vocab_size, ranks), config.train
    rates = ", ".join(f"{learning_rate(s, t):.2g} at {s}" for s in (0, t.warmup, t.steps // 2, t.steps - 1))
    m, other = e.memory, "without" if t.recompute else "with"
    lines = [
        f"model       {(e.parameters - e.encoding_parameters) / 1e6:.1f}M parameters and "
        f"{e.encoding_parameters:,} of {config.model.encoding} ({e.parameters:,} in all)",
        f"batch       {t.batch} x {config.data.sequence} = {e.tokens_per_step:,} tokens a step, "
        f"in {e.micro_batches} micro-batches a process, of {ranks}" + _shared(t.context_parallel),
        f"tokens      {e.tokens / 1e9:.3g}B in {t.steps:,} steps ({e.tokens:,})",
        f"compute     {e.flops_per_token:.3g} FLOPs a token, {e.flops:.3g} in all",
        f"schedule    {t.schedule}: {rates}",
        "Estimates for one process:",
        f"memory      {_gb(m.total)}: weights {_gb(m.weights)}, gathered or rounded copies {_gb(m.gathered)}, "
        f"gradients {_gb(m.gradients)}, optimizer {_gb(m.optimizer)},",
        f"            activations {_gb(m.activations)} ({other} recomputation {_gb(e.other_activations)}), "
        f"logits {_gb(m.logits)}" + (f", keys of other ranks {_gb(m.ring)}" if m.ring else ""),
        f"            80 GB can hold a sequence of {e.longest:,} tokens" + _shared(t.context_parallel),
        f"a step      {e.work.flops:.3g} FLOPs, {_gb(e.work.moved)} through its memory",
        f"messages    {_sent(e)}",
        *(_timed(e, gpu) for gpu in SHOWN),
        "            if products reach " + " and ".join(f"{GPUS[g].products:.0%} ({g})" for g in SHOWN)
        + " of the peak and messages hide behind computation;",
        "            kernels of biases and rotations are not counted",
    ]  # fmt: skip
    return "\n".join(lines)


def _shared(ranks: int) -> str:
    return f"; {ranks} share a sequence" if ranks > 1 else ""


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _sent(e: Estimate) -> str:
    m = e.messages
    if not m.collectives:
        return "none"
    kinds = {"all-gather": m.all_gather, "reduce-scatter": m.reduce_scatter, "all-reduce": m.all_reduce}
    sent = ", ".join(f"{name} {_gb(count)}" for name, count in kinds.items() if count)
    lines = [f"{sent} sent in {m.collectives} collectives a step"]
    if m.exchanges:
        lines.append(f"            keys and their gradients {_gb(m.ring)} in {m.exchanges} exchanges a step")
    return "\n".join(lines)


def _timed(e: Estimate, gpu: str) -> str:
    device = GPUS[gpu]
    return (
        f"{gpu:<12}{device.seconds(e.work):.3g} s a step ({device.computing(e.work):.3g} s computing, "
        f"{device.sending(e.work):.3g} s sending), {e.mfu(gpu):.0%} of the peak, {e.hours(gpu):,.0f} GPU-hours in all"
    )


def describe_rows(ranks: int) -> str:
    """The rows of the paper's tables with estimated GPU-hours and the arguments of each."""
    lines, total = (
        [f"{'':<5}{'run':<20}{'A100-hours':>11}{'H100-hours':>11}  arguments of grape train"],
        [0.0, 0.0],
    )
    for number, row in enumerate(rows(), start=1):
        config = row.config()
        hours = [estimate(config, config.model.vocab_size, ranks).hours(gpu) for gpu in SHOWN]
        total = [a + b for a, b in zip(total, hours, strict=True)]
        lines.append(
            f"{number:<5}{row.name:<20}{hours[0]:>11,.0f}{hours[1]:>11,.0f}  {' '.join(row.arguments)}"
        )
    lines.append(
        f"all  {'':<20}{total[0]:>11,.0f}{total[1]:>11,.0f}  estimates on {ranks} GPUs; see --dry-run"
    )
    return "\n".join(lines)
