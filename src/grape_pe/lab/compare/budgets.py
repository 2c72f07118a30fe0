"""Several training budgets from one run at a constant rate, with short decays that branch off it.

A wsd schedule is constant between warm-up and decay, so a shorter run equals the long run up to the start of its own
decay and begins from the long run's checkpoint there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import RunConfig, changed
from ..errors import LabError
from ..train.checkpoint import checkpoint_name
from ..train.optimization import decay_steps

FOLDER = "budgets"


@dataclass(frozen=True)
class Branch:
    """A run of `tokens` in total that begins from step `start` of a longer one."""

    tokens: int
    config: RunConfig
    start: int

    def directory(self, trunk: Path) -> Path:
        return trunk / FOLDER / str(self.tokens)

    def checkpoint(self, trunk: Path) -> Path:
        return trunk / "checkpoints" / checkpoint_name(self.start)


def branches(config: RunConfig, budgets: Sequence[int]) -> Iterator[Branch]:
    """The runs for the budgets (tokens) below that of the run itself."""
    whole = config.tokens_per_step * config.train.steps
    if budgets and config.train.schedule != "wsd":
        raise LabError(
            f"budgets need train.schedule wsd, got {config.train.schedule}; set --train.schedule wsd or --budgets none"
        )
    for tokens in sorted(set(budgets) - {whole}):
        if tokens > whole:
            raise LabError(
                f"budgets must not exceed the {whole:,} tokens of the run, got {tokens:,}; "
                "give smaller --budgets (or none), or more train.steps"
            )
        yield _branch(config, tokens)


def _branch(config: RunConfig, tokens: int) -> Branch:
    steps, rest = divmod(tokens, config.tokens_per_step)
    if rest or not steps:
        near = max(1, round(tokens / config.tokens_per_step)) * config.tokens_per_step
        raise LabError(
            f"a budget must be a multiple of the {config.tokens_per_step} tokens of a step, got {tokens}; "
            f"try {near}"
        )
    shorter = shortened(config, steps)
    start = steps - decay_steps(shorter.train)
    if start < config.train.warmup:
        raise LabError(
            f"a budget of {tokens} tokens begins its decay at step {start}, before train.warmup "
            f"({config.train.warmup}) ends; give a larger budget or a shorter warm-up"
        )
    return Branch(tokens, shorter, start)


def shortened(config: RunConfig, steps: int) -> RunConfig:
    """The same run with fewer steps, keeping its last checkpoint alone."""
    return changed(config, "train", steps=steps, keep=1, checkpoint_at=[])
