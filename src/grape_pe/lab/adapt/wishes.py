"""The options of `grape adapt`, with their defaults and help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import LabError

Method = Literal["new", "lora", "all"]


def _option(default: Any, help: str, metavar: str = "N") -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class Wishes:
    """How a model is adapted, the same for every encoding of a sweep. Each field is an option of the command."""

    train: Literal["new", "all"] = _option("new", "train the new parameters (default) or all")
    lora: int = _option(0, "also train LoRA of this rank (default: none)", "RANK")
    context: int = _option(0, "tokens per sequence (default: the model's)")
    steps: int = _option(500, "training steps")
    batch: int = _option(4, "sequences per step")
    micro_batch: int = _option(1, "sequences per forward pass")
    lr: float = _option(1e-3, "learning rate of new parameters", "RATE")
    own_lr: float | None = _option(None, "that of LoRA (default: 5e-4) or the model (1e-4)", "RATE")
    shared: bool = _option(False, "one encoding for all layers")
    seed: int = _option(0, "random seed")
    bf16: bool = _option(False, "autocast to bfloat16; weights stay float32")
    recompute: bool = _option(False, "checkpoint activations: less memory, more time")
    checkpoint_every: int = _option(50, "steps between checkpoints")
    lengths: Sequence[int] = _option((1, 2, 4, 8, 16), "lengths in contexts", "N,N")
    eval_tokens: int = _option(1 << 14, "tokens evaluated per length")
    eval_every: int = _option(0, "steps between evaluations (default: steps / 4)")
    tasks: Sequence[str] = _option((), "language tasks to score, separated by commas", "NAMES")
    task_data: str = _option("", "questions of --tasks, as for grape eval lm --data", "DIR")
    task_limit: int = _option(0, "questions per task (default: all)")
    passkey: int = _option(0, "passkey texts per length and depth (default: none)")
    export: bool = _option(False, "also write DIR/stock, which loads without grape_pe")

    def __post_init__(self) -> None:
        if self.lora and self.train == "all":
            raise LabError(
                "--lora and --train all exclude each other (LoRA leaves the model's weights fixed); leave one out"
            )

    @property
    def method(self) -> Method:
        return "lora" if self.lora else self.train
