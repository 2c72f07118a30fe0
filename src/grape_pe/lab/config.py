"""The typed settings of a run: a recipe, then a file, then options of the command line, in rising priority.

config = load("small", {"model.encoding": "grape-ap", "train.steps": 500})
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..models import DecoderConfig
from .errors import LabError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


#: train.rollback_above compares RISE consecutive losses with the median of the USUAL before them
RISE, USUAL = 8, 64


class Section(BaseModel):
    """Checked fields; unknown ones are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Checked = TypeVar("Checked", bound=Section)


class ModelSection(Section):
    """The decoder. 0 stands for a default that depends on other settings."""

    encoding: str | list[str] = "rope"  #: a name, several joined by +, or a list that repeats over the layers
    encoding_options: dict[str, Any] = {}  #: options of the encoding, as YAML: {period: 64}
    window: int | list[int | None] | None = None  #: tokens a token sees; a list repeats over the layers
    sinks: Natural = 0  #: first tokens visible outside the window
    kv_shift: bool = False  #: mix each key and value with the previous one
    width: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Natural = 0  #: 0: as many as heads
    head_dim: Natural = 0  #: 0: width / heads
    hidden: Natural = 0  #: features inside the SwiGLU; 0: floor(8/3 width)
    vocab_size: Natural = 0  #: 0: the tokenizer's, rounded up to a multiple of 64
    shared_encoding: bool = False  #: one encoding for all layers
    #: learned RMSNorm of queries and keys; after: after the rotation, as the authors' code has it
    qk_norm: bool | Literal["after"] = True
    output_norm: bool = False  #: RMSNorm of each head's attention output
    output_gate: bool = False  #: multiply the attention output by sigmoid(W x)
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    tied: bool = True  #: one matrix for embedding and head

    #: absolute positions added to the embeddings; with encoding nope these alone
    absolute: Literal["sinusoidal", "learned"] | None = None
    max_positions: Natural = 0  #: rows of learned positions; 0: data.sequence

    def decoder(self, vocab_size: int = 0, sequence: int = 0) -> DecoderConfig:
        """Configuration of the model; `vocab_size` and `sequence` of the data are the defaults."""
        size = self.vocab_size or -(-vocab_size // 64) * 64
        try:
            config = DecoderConfig(
                **{
                    **self.model_dump(),
                    "vocab_size": size or 64,
                    "max_positions": self.max_positions or sequence,
                }
            )
            first = {each.encoding: i for i, each in reversed(list(enumerate(config.by_layer)))}
            for layer in first.values():
                config.build_encoding(layer)
        except (TypeError, ValueError) as problem:
            raise LabError(f"model: {problem}") from None
        return config


class DataSection(Section):
    """The data."""

    source: str = "builtin"  #: builtin, a directory made by grape data prepare, or task:NAME
    tokenizer: str = "bpe-2048"  #: of the built-in corpus: bytes or bpe-N
    task_options: dict[str, Any] = {}  #: options of the task, as YAML
    sequence: Positive = 256  #: tokens of a training sequence
    documents: bool = False  #: attention stays inside each document


class TrainSection(Section):
    """The optimisation; defaults are the paper's."""

    steps: Positive = 1000
    batch: Positive = 16  #: sequences of an optimizer step, over all ranks
    micro_batch: Natural = 0  #: micro-batch per GPU; 0 means no accumulation
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    min_lr: NonNegative = 3e-5
    warmup: Natural = 100  #: steps of linear warm-up
    schedule: Literal["cosine", "wsd"] = "cosine"  #: wsd: warm-up, stable, decay
    decay: Fraction = 0.2  #: share of the steps in which wsd decays
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    weight_decay: NonNegative = 0.01  #: on everything but norms
    clip: NonNegative = 1.0  #: largest gradient norm; 0: no clipping
    skip_above: NonNegative = 0.0  #: skip steps with a larger gradient norm; 0: none
    #: go back when RISE losses in a row exceed this multiple of the median before; 0: never
    rollback_above: NonNegative = 0.0
    rollbacks: Positive = 3  #: most rollbacks of a run; then it stops
    #: bf16: autocast, or under fsdp bf16 copies of the weights, which stay float32
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False  #: torch.compile, block by block
    recompute: bool = False  #: activation checkpointing: less memory, a third more time
    strategy: Literal["ddp", "fsdp"] = "ddp"  #: how ranks share the model
    shard: Natural = 0  #: ranks a model is sharded over (fsdp); 0: all; fewer: hybrid
    context_parallel: Positive = 1  #: ranks that share each sequence
    eval_every: Natural = 100  #: steps between validations; 0: only at checkpoints
    eval_sequences: Natural = 64  #: sequences of the fixed validation set; 0: all
    checkpoint_every: Natural = 200  #: steps; 0: only at the end
    checkpoint_at: list[Positive] = []  #: steps whose checkpoints are written and kept
    keep: Positive = 2  #: newest checkpoints kept, besides the best

    @model_validator(mode="after")
    def _agree(self) -> TrainSection:
        if self.min_lr > self.lr:
            raise ValueError(
                f"train.min_lr ({self.min_lr:g}) must not exceed train.lr ({self.lr:g}); "
                f"try --train.min_lr {self.lr / 10:g}"
            )
        if self.warmup >= self.steps:
            raise ValueError(
                f"train.warmup ({self.warmup}) must be below train.steps ({self.steps}); "
                f"try --train.warmup {self.steps // 6}"
            )
        if 0 < self.rollback_above <= 1:
            raise ValueError(
                f"train.rollback_above must be above 1, in medians of the loss, got {self.rollback_above:g}; try 1.2"
            )
        return self


class LogSection(Section):
    """Logging."""

    every: Positive = 1  #: steps between lines of metrics.jsonl
    tensorboard: bool = True
    profile: Natural = 0  #: trace three steps from this one on, in RUN/profile; 0: none
    wandb: str = ""  #: a Weights & Biases project; empty: none


class RunConfig(Section):
    """All settings of a run."""

    name: str = "run"
    seed: Natural = 0
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> RunConfig:
        batch, micro = self.train.batch, self.train.micro_batch
        if micro and batch % micro:
            raise ValueError(
                f"train.batch must be a multiple of train.micro_batch, got {batch} and {micro}; "
                f"try --train.micro_batch {math.gcd(batch, micro)}"
            )
        return self

    @model_validator(mode="after")
    def _keeps_checkpoints_from_before_a_rise(self) -> RunConfig:
        """A rise is detected after `RISE` steps, at the next logged one."""
        kept, needed = (self.train.keep - 1) * self.train.checkpoint_every, RISE + self.log.every
        if self.train.rollback_above and kept < needed:
            raise ValueError(
                "train.rollback_above needs a checkpoint from before a rise: (train.keep - 1) x "
                f"train.checkpoint_every must be at least {needed}, got {kept}; raise one of them"
            )
        return self

    def decoder(self, vocab_size: int) -> DecoderConfig:
        """The model's configuration for data of this vocabulary."""
        return self.model.decoder(vocab_size, self.data.sequence)

    def to_yaml(self) -> str:
        text = yaml.safe_dump(self.model_dump(), sort_keys=False, width=100)
        assert isinstance(text, str)
        return text

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch * self.data.sequence


#: settings that may change when a run continues, as they do not change the result
FREE_ON_RESUME = (
    "train.micro_batch", "train.compile", "train.recompute", "train.strategy", "train.shard",
    "train.context_parallel", "train.checkpoint_every", "train.checkpoint_at", "train.keep", "log.every",
    "log.tensorboard", "log.wandb", "log.profile",
)  # fmt: skip


def recipe_names() -> list[str]:
    return shipped_names("recipes")


def load(
    recipe: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """A shipped recipe by name, a YAML file or a mapping (which may name a `base`), with overrides.

    Args:
        recipe: a name, a YAML file or a mapping.
        overrides: dotted names to values, such as {"train.steps": 500}; strings are read as YAML.
    """
    try:
        tree = recipe_tree(recipe if isinstance(recipe, Mapping) else str(recipe))
    except RecursionError:
        raise LabError(f"{recipe}: the recipes named by base form a cycle; remove one base") from None
    for name, value in (overrides or {}).items():
        tree = merged(tree, _nested(name, value))
    return validated(tree)


def recipe_tree(recipe: str | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe, a file or a mapping, over those of its `base`."""
    tree = dict(recipe) if isinstance(recipe, Mapping) else read_shipped(recipe, "recipes", "recipe")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(recipe, Mapping) and base not in recipe_names():
        base = str(Path(recipe).parent / str(base))  # relative to the file that names it
    return merged(recipe_tree(base), tree)


def read_shipped(name: str, folder: str, kind: str) -> dict[str, Any]:
    """A YAML file shipped in a folder of this package, by its name, or any file by its path."""
    shipped = shipped_names(folder)
    if name in shipped:
        return _parse(resources.files("grape_pe.lab").joinpath(folder, f"{name}.yaml").read_text(), name)
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]}? Otherwise " if near else ""
        raise LabError(f"no {kind} or file {name!r}; {hint}choose {', '.join(shipped)}, or a YAML file")
    try:
        return _parse(path.read_text(), name)
    except (OSError, UnicodeDecodeError) as problem:
        raise LabError(f"cannot read {path}: {problem}") from None


def shipped_evidence(name: str) -> Path | None:
    """Results shipped with this package, for `grape report`; None if there are none."""
    if not name:
        return None
    path = Path(str(resources.files("grape_pe.lab").joinpath("evidence", f"{name}.jsonl")))
    return path if path.is_file() else None


def shipped_names(folder: str) -> list[str]:
    found = resources.files("grape_pe.lab").joinpath(folder).iterdir()
    return sorted(item.name.removesuffix(".yaml") for item in found if item.name.endswith(".yaml"))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise LabError(f"{where} is not valid YAML: {' '.join(str(problem).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise LabError(f"{where} must be a mapping of settings, such as seed: 1, got a {type(tree).__name__}")
    return tree


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section; values that are mappings are replaced."""
    out = dict(under)
    for key, value in over.items():
        section = key in RunConfig.model_fields and isinstance(out.get(key), dict)
        out[key] = {**out[key], **value} if section and isinstance(value, dict) else value
    return out


#: settings that may be lists
LISTS = ("model.encoding", "model.window", "train.checkpoint_at")


def _nested(name: str, value: Any) -> dict[str, Any]:
    section, _, field = name.partition(".")
    if isinstance(value, str) and value.strip().startswith("{"):
        value = _parse(value, f"the value of {name}")
    if name in LISTS and isinstance(value, str) and value.strip().startswith("["):
        value = _parse(f"list: {value}", f"the value of {name}")["list"]
    return {section: {field: value}} if field else {section: value}


def validated(tree: Mapping[str, Any]) -> RunConfig:
    return checked(RunConfig, tree, field_names())


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """The configuration with other values in a section."""
    return validated(merged(config.model_dump(), {section: values}))


def checked(kind: type[Checked], tree: Mapping[str, Any], names: list[str]) -> Checked:
    """A section with these values; `names` are its settings, for hints."""
    try:
        return kind.model_validate(tree)
    except ValidationError as problem:
        raise LabError("; ".join(explained(error, names) for error in problem.errors())) from None


#: wording of pydantic's messages
PLAIN = {
    ": Input should be": " must be", "greater than or equal to": "at least", "less than or equal to": "at most",
    "greater than": "above", "less than": "below", "a valid integer": "a whole number", "a valid number": "a number",
    ", unable to parse string as an integer": "", ", unable to parse string as a number": "",
}  # fmt: skip


def explained(error: Any, names: list[str]) -> str:
    """Text of an error of pydantic: the setting, its limit and the value."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        return f"unknown setting {name!r}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "model_type":
        return f"{name} must be a mapping of settings, got {error['input']!r}"
    if error["type"] == "value_error":  # ours: it names the settings itself
        return str(error["msg"]).removeprefix("Value error, ")
    text = f"{name}: {error['msg']}, got {error['input']!r}"
    for theirs, plain in PLAIN.items():
        text = text.replace(theirs, plain, 1)
    return text


def field_names(kind: type[RunConfig] = RunConfig) -> list[str]:
    """Every setting by its dotted name."""
    names: list[str] = []
    for name, field in kind.model_fields.items():
        inside = field.annotation
        if isinstance(inside, type) and issubclass(inside, Section):
            names += [f"{name}.{inner}" for inner in inside.model_fields]
        else:
            names.append(name)
    return names


def flat(settings: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names to values, one level deep; names that are dotted already stay."""
    tree = settings.model_dump() if isinstance(settings, RunConfig) else settings
    out: dict[str, Any] = {}
    for key, value in tree.items():
        inside = isinstance(value, dict) and "." not in key
        out |= {f"{key}.{name}": each for name, each in value.items()} if inside else {key: value}
    return out


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Differences that prevent a run from continuing, as 'name: old -> new'."""
    before, after = flat(old), flat(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in FREE_ON_RESUME
    ]
