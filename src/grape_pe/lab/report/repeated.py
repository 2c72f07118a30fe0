"""Which row of the paper's tables a run repeats, by its settings, and whether the two may be compared.

Names of directories and recipes play no part. A run belongs to the row of its encoding and KV-shift from which its
settings differ least; each difference that changes what is learned is a reason not to compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...encodings.registry import entry
from ...encodings.registry import names as known_names
from ..config import FREE_ON_RESUME, RunConfig, flat
from ..data.adopt import ADOPTED
from ..data.manifest import MANIFEST, load_manifest
from ..data.sources import NAMED
from ..errors import LabError
from ..evaluate.benchmarks import Scores
from ..files import read_json
from ..paper import Row, published, rows
from ..train.feed import TASK
from ..train.run_directory import CONFIG, ENVIRONMENT, read_config
from .runs import RESTORE, read_lm_scores, read_run

#: besides those that may change in a run under way: they do not change what is learned
NOT_LEARNED = (*FREE_ON_RESUME, "train.eval_every", "train.eval_sequences", "train.decay")
#: the paper's text: name and sample of the dataset, and the size of GPT-2's vocabulary
TEXT, VOCABULARY = NAMED["fineweb-edu-100B"], 50257


@dataclass(frozen=True)
class Repetition:
    """A run of `grape train` and the row it repeats.

    `reasons` not to compare them; `variant`: the paper's other values that it was trained with; `unchecked`: what
    could not be found out; `scores` of `grape eval lm` by the name of their file.
    """

    directory: Path
    row: Row
    reasons: tuple[str, ...]
    variant: tuple[str, ...]
    unchecked: tuple[str, ...]
    scores: Mapping[str, Scores]

    @property
    def name(self) -> str:
        return self.directory.resolve().name


def repetitions(places: Sequence[Path]) -> tuple[list[Repetition], list[str]]:
    """The runs that repeat a row; and a note for each that repeats none."""
    found, notes = [], []
    for place in map(Path, places):
        if not (place / CONFIG).exists():
            raise LabError(f"--paper takes directories of grape train, but {place} has no {CONFIG}")
        config = read_config(place)
        row = nearest(config)
        if row is None:
            label = f"{_encoding(config)}{' with KV-shift' * config.model.kv_shift}"
            notes.append(f"{place.resolve().name} ({label}) repeats no row of the paper and is left out")
        else:
            found.append(_repetition(place, config, row))
    return found, notes


def nearest(config: RunConfig) -> Row | None:
    """The row of this encoding, with or without KV-shift, whose settings differ least."""
    own = (_encoding(config), config.model.kv_shift)
    candidates = [row for row in rows() if (row.encoding, row.kv_shift) == own]
    return min(candidates, key=lambda row: len(list(differences(config, row))), default=None)


def _repetition(place: Path, config: RunConfig, row: Row) -> Repetition:
    wrong, unchecked = _text(place, config.data.source)
    reasons = [*_unfinished(place, config), *differences(config, row), *wrong]
    return Repetition(
        place, row, tuple(reasons), tuple(_variant(config, row)), tuple(unchecked), read_lm_scores(place)
    )


def differences(config: RunConfig, row: Row) -> Iterator[str]:
    """Each setting that keeps a run from repeating a row."""
    for name, ours, theirs in _changed(config, row):
        if ours not in row.alternatives(name):
            yield f"{name} is {_shown(ours)}, not {_shown(theirs)}"


def _variant(config: RunConfig, row: Row) -> Iterator[str]:
    for name, ours, _ in _changed(config, row):
        if ours in row.alternatives(name):
            yield f"{name} {_shown(ours)}"


def _changed(config: RunConfig, row: Row) -> Iterator[tuple[str, Any, Any]]:
    ours, theirs = learned(config), learned(row.config())
    return ((name, ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def learned(config: RunConfig) -> dict[str, Any]:
    """The settings that change what is learned; of the model what they lead to, defaults filled in."""
    decoder = config.decoder(VOCABULARY)
    model = {f"model.{each.name}": getattr(decoder, each.name) for each in fields(decoder)}
    if not any(each.window for each in decoder.by_layer):
        model["model.sinks"] = 0
    if decoder.absolute is None:
        del model["model.max_positions"]
    model |= {"model.encoding": _encoding(config), "model.encoding_options": _options(config)}
    kept = ("data.sequence", "data.documents")
    rest = {k: v for k, v in flat(config).items() if k.startswith("train.") or k in kept}
    return {**model, **{name: value for name, value in rest.items() if name not in NOT_LEARNED}}


def _encoding(config: RunConfig) -> str:
    """One name if all layers have the same."""
    written = config.model.encoding
    names = [written] if isinstance(written, str) else list(dict.fromkeys(written))
    return ", ".join(names)


def _options(config: RunConfig) -> dict[str, Any]:
    """Options of the encoding that are not at their defaults."""
    name, given = _encoding(config), config.model.encoding_options
    defaults = entry(name).options() if name in known_names() else {}
    return {key: value for key, value in given.items() if key not in defaults or defaults[key] != value}


def _unfinished(place: Path, config: RunConfig) -> Iterator[str]:
    run = read_run(place, [])[1].language[config.seed]
    if run.diverged:
        yield "it diverged"
    elif run.evaluation is None:
        yield f"it is not finished: step {max(run.train_curve, default=0):.0f} of {config.train.steps}"


def _text(place: Path, source: str) -> tuple[list[str], list[str]]:
    """What is wrong with the text of a run, and what could not be checked."""
    if source == "builtin" or source.startswith(TASK):
        return [f"data.source is {source}, not {TEXT[0]}"], []
    path = Path(source, MANIFEST)
    begun = read_json(place / ENVIRONMENT, RESTORE) if (place / ENVIRONMENT).exists() else {}
    trained = begun.get("data", {}).get("manifest")
    if not path.is_file() or sha256(path.read_bytes()).hexdigest()[:16] != trained:
        return [], [f"text not checked: {path} is not here, or not the one it was trained on"]
    manifest = load_manifest(path.parent)
    wrong, made = [], manifest.settings
    if manifest.vocab_size != VOCABULARY:
        wrong.append(
            f"its tokenizer ({manifest.tokenizer}) has {manifest.vocab_size} tokens, not the {VOCABULARY} of gpt2"
        )
    if made.get("source") == ADOPTED:
        return wrong, [f"text not checked: {source} holds {ADOPTED}, which do not say where they come from"]
    if (made.get("source"), made.get("config")) != (f"hf:{TEXT[0]}", TEXT[1]):
        wrong.append(f"its text is {made.get('source')}, not {' '.join(map(str, TEXT))}")
    return wrong, []


def score_reasons(scores: Scores) -> Iterator[str]:
    """Why accuracies cannot be compared with the published ones, whatever the run."""
    if scores.shots:
        yield f"{scores.shots} shots, not 0"
    questions = published()["questions"]
    if not questions.keys() & scores.tasks.keys():
        yield "none of the paper's tasks"
        return
    for task, count in questions.items():
        asked = scores.tasks[task].samples if task in scores.tasks else 0
        if asked != count:
            yield f"{task}: {asked or 'no'} questions, not {count}"
