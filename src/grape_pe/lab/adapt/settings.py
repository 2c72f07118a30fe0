"""The settings of one adapted run: those of a training run, and where the model comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from ...encodings.registry import ENTRIES
from ..compare.arms import Arm
from ..config import (
    DataSection,
    LogSection,
    ModelSection,
    Natural,
    Positive,
    RunConfig,
    Section,
    TrainSection,
    explained,
    field_names,
)
from ..errors import LabError
from ..evaluate.lengths import FACTORS

Method = Literal["new", "lora", "all"]
#: learning rates by default: of the new parameters, and of LoRA's or the model's own
NEW_RATE = 1e-3
OWN_RATES: dict[Method, float] = {"new": 0.0, "lora": 5e-4, "all": 1e-4}
#: answers of passkey texts before and after, in a run's directory
PASSKEY = "passkey-{}.json"


class AdaptSection(Section):
    """What an adapted run has besides the settings of a training run."""

    source: str = Field(description="the pretrained model: its directory or GGUF file")
    identity: str = Field(description="names and sizes of its files")
    context: Positive = Field(description="tokens the pretrained model was made for")
    method: Method = Field("new", description="what is trained: new parameters, LoRA beside them, or all")
    lora: Natural = Field(0, description="rank of LoRA")
    own_lr: float = Field(0.0, description="learning rate of LoRA's or the model's own parameters")
    factors: list[Positive] = Field(list(FACTORS), description="evaluated lengths, in contexts of the model")
    eval_tokens: Positive = Field(
        1 << 14, description="predictions at each evaluated length, and the longest"
    )
    tasks: list[str] = Field([], description="scored before and after")
    task_data: str = ""
    task_limit: Natural = Field(0, description="questions of each task; 0: all")
    passkey: Natural = Field(0, description="texts for each length and depth in which to find a number")
    export: bool = False
    fade: Natural = Field(0, description="steps in which the rotation is faded out; 0: it stays")

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths in tokens."""
        return [factor * self.context for factor in self.factors]


class AdaptConfig(RunConfig):
    """Everything an adapted run depends on."""

    adapt: AdaptSection


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for, the same for every encoding of a sweep."""

    context: int = 0  #: tokens of a training sequence; 0: those of the model
    steps: int = 500
    batch: int = 4
    micro_batch: int = 1
    lr: float = NEW_RATE
    own_lr: float | None = None
    method: Method = "new"
    lora: int = 0
    shared: bool = False
    seed: int = 0
    bf16: bool = False
    recompute: bool = False
    eval_every: int = 0  #: steps between evaluations; 0: a quarter of the steps
    checkpoint_every: int = 50
    factors: Sequence[int] = FACTORS
    eval_tokens: int = 1 << 14
    tasks: Sequence[str] = ()
    task_data: str = ""
    task_limit: int = 0
    passkey: int = 0  #: texts for each length and depth; 0: none
    export: bool = False

    def config(self, arm: Arm, source: str, identity: str, model: Any) -> AdaptConfig:
        """The settings of a run with the encoding of `arm`; `model` is the pretrained model's configuration."""
        if not isinstance(arm.encoding, str) or arm.kv_shift:
            raise LabError(
                f"grape adapt takes one encoding for all layers, without KV-shift; got {arm.label!r}: "
                "train a model of its own with grape train for these"
            )
        known = [
            f for f in sorted(set(self.factors)) if f * model.max_position_embeddings <= self.eval_tokens
        ]
        if not known:
            raise LabError(
                f"--eval-tokens must be at least the model's context ({model.max_position_embeddings}), got "
                f"{self.eval_tokens}"
            )
        try:
            return AdaptConfig(
                name="adapt",
                seed=self.seed,
                model=_model_section(arm, model, self.shared or self.export),
                data=DataSection(source="files", sequence=self.context or model.max_position_embeddings),
                train=self._train(self.context or model.max_position_embeddings),
                log=LogSection(tensorboard=False),
                adapt=AdaptSection(
                    source=source, identity=identity, context=model.max_position_embeddings,
                    method=self.method, lora=self.lora, own_lr=self._own_rate(), factors=known,
                    eval_tokens=self.eval_tokens, tasks=list(self.tasks), task_data=self.task_data,
                    task_limit=self.task_limit, passkey=self.passkey, export=self.export, fade=self._fade(arm.encoding),
                ),
            )  # fmt: skip
        except ValidationError as problem:
            raise LabError("; ".join(explained(error, field_names()) for error in problem.errors())) from None

    def _fade(self, encoding: str) -> int:
        """Half of the steps for an encoding of biases alone: the model leaves its rotation gradually."""
        parts = [ENTRIES.get(part) for part in encoding.split("+")]
        if any(part is None or part.cls.transforms for part in parts):
            return 0
        if self.export:
            raise LabError(f"--export: stock models rotate, {encoding} does not; leave --export out")
        if self.method == "new":
            raise LabError(
                f"{encoding} has no rotation: the model's own is faded out while it is trained, which all of its "
                "parameters must follow; give --train all or --lora RANK"
            )
        return max(1, self.steps // 2)

    def _own_rate(self) -> float:
        return OWN_RATES[self.method] if self.own_lr is None else self.own_lr

    def _train(self, sequence: int) -> TrainSection:
        quarter = max(1, self.steps // 4)
        return TrainSection(
            steps=self.steps, batch=self.batch, micro_batch=self.micro_batch, lr=self.lr, min_lr=self.lr / 10,
            warmup=min(self.steps // 10, 50), weight_decay=0.0, precision="bf16" if self.bf16 else "fp32",
            recompute=self.recompute, eval_every=self.eval_every or quarter,
            checkpoint_every=self.checkpoint_every, keep=1,
            eval_sequences=max(1, self.eval_tokens // max(1, sequence)),
        )  # fmt: skip


def _model_section(arm: Arm, model: Any, shared: bool) -> ModelSection:
    sizes = model.to_dict()
    heads = sizes["num_attention_heads"]
    return ModelSection(
        encoding=arm.encoding, encoding_options=arm.options, shared_encoding=shared, qk_norm=False,
        width=sizes["hidden_size"], layers=sizes["num_hidden_layers"], heads=heads,
        kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        hidden=sizes["intermediate_size"], vocab_size=sizes["vocab_size"],
        tied=bool(sizes.get("tie_word_embeddings", False)),
    )  # fmt: skip
