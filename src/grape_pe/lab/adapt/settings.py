"""The settings of an adapted run: those of a training run, and the pretrained model."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ...encodings.registry import ENTRIES
from ..compare.arms import Arm
from ..config import Natural, Positive, RunConfig, Section, checked, field_names
from ..errors import LabError
from ..evaluate.lengths import FACTORS
from .wishes import Method, Wishes

#: default learning rates of LoRA's or the model's own parameters
OWN_RATES: dict[Method, float] = {"new": 0.0, "lora": 5e-4, "all": 1e-4}
#: fields that `AdaptSection` takes from `Wishes` unchanged
SAME = ("lora", "eval_tokens", "task_data", "task_limit", "passkey", "export")
#: passkey scores before and after, in a run's directory
PASSKEY = "passkey-{}.json"


class AdaptSection(Section):
    """Settings of an adapted run beside those of a training run."""

    source: str  #: the pretrained model: its directory or GGUF file
    identity: str  #: names and sizes of its files
    context: Positive  #: context of the pretrained model in tokens
    method: Method = "new"  #: what is trained: new parameters, LoRA as well, or all
    lora: Natural = 0  #: rank of LoRA
    own_lr: float = 0.0  #: learning rate of LoRA's or the model's own parameters
    factors: list[Positive] = Field(list(FACTORS))  #: evaluated lengths, in contexts of the model
    eval_tokens: Positive = 1 << 14  #: predictions at each evaluated length, and the longest
    tasks: list[str] = Field([])  #: language tasks to score before and after
    task_data: str = ""
    task_limit: Natural = 0  #: questions of each task; 0: all
    passkey: Natural = 0  #: passkey texts per length and depth
    export: bool = False
    fade: Natural = 0  #: steps over which the rotation is removed; 0: it stays

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths in tokens."""
        return [factor * self.context for factor in self.factors]


class AdaptConfig(RunConfig):
    """All settings of an adapted run."""

    adapt: AdaptSection


def configured(wishes: Wishes, arm: Arm, source: str, identity: str, model: Any) -> AdaptConfig:
    """The settings of a run with the encoding of `arm`; `model` is the pretrained model's configuration."""
    if not isinstance(arm.encoding, str) or arm.kv_shift:
        raise LabError(
            f"grape adapt takes one encoding for all layers, without KV-shift, got {arm.label!r}; "
            "train a new model with grape train for these"
        )
    context = model.max_position_embeddings
    factors = [f for f in sorted(set(wishes.lengths)) if f * context <= wishes.eval_tokens]
    if not factors:
        raise LabError(
            f"--eval-tokens must be at least the model's context, got {wishes.eval_tokens}; try --eval-tokens {context}"
        )
    own_rate = OWN_RATES[wishes.method] if wishes.own_lr is None else wishes.own_lr
    section = {
        "source": source, "identity": identity, "context": context, "method": wishes.method, "own_lr": own_rate,
        "factors": factors, "tasks": list(wishes.tasks), "fade": _fade_steps(wishes, arm.encoding),
        **{name: getattr(wishes, name) for name in SAME},
    }  # fmt: skip
    sequence = wishes.context or context
    tree = {
        "name": "adapt", "seed": wishes.seed, "model": _model_section(arm, model, wishes.shared or wishes.export),
        "data": {"source": "files", "sequence": sequence}, "train": _train_section(wishes, sequence),
        "log": {"tensorboard": False}, "adapt": section,
    }  # fmt: skip
    return checked(AdaptConfig, tree, field_names())


def _fade_steps(wishes: Wishes, encoding: str) -> int:
    """Half of the steps for an encoding of biases alone: the model's rotation is removed gradually."""
    parts = [ENTRIES.get(part) for part in encoding.split("+")]
    if any(part is None or part.cls.transforms for part in parts):
        return 0
    if wishes.export:
        raise LabError(f"--export: stock models rotate, {encoding} does not; leave --export out")
    if wishes.method == "new":
        raise LabError(
            f"{encoding} has no rotation: the model's own is faded out during training, to which all of its "
            "parameters must adapt; give --train all or --lora RANK"
        )
    return max(1, wishes.steps // 2)


def _train_section(wishes: Wishes, sequence: int) -> dict[str, Any]:
    same = ("steps", "batch", "micro_batch", "lr", "recompute", "checkpoint_every")
    return {name: getattr(wishes, name) for name in same} | {
        "min_lr": wishes.lr / 10, "warmup": min(wishes.steps // 10, 50), "weight_decay": 0.0, "keep": 1,
        "precision": "bf16" if wishes.bf16 else "fp32", "eval_every": wishes.eval_every or max(1, wishes.steps // 4),
        "eval_sequences": max(1, wishes.eval_tokens // max(1, sequence)),
    }  # fmt: skip


def _model_section(arm: Arm, model: Any, shared: bool) -> dict[str, Any]:
    sizes = model.to_dict()
    heads = sizes["num_attention_heads"]
    return {
        "encoding": arm.encoding, "encoding_options": arm.options, "shared_encoding": shared, "qk_norm": False,
        "width": sizes["hidden_size"], "layers": sizes["num_hidden_layers"], "heads": heads,
        "kv_heads": sizes.get("num_key_value_heads") or heads,
        "head_dim": sizes.get("head_dim") or sizes["hidden_size"] // heads,
        "hidden": sizes["intermediate_size"], "vocab_size": sizes["vocab_size"],
        "tied": bool(sizes.get("tie_word_embeddings", False)),
    }  # fmt: skip
