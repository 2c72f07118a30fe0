"""The report of an adapted model or a sweep: before and after, loss by length and position, heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..compare.arms import Arm
from ..config import flat
from ..evaluate.benchmarks import Scores
from ..files import read_json, typed, write_text
from ..report.cells import Cell, Table
from ..report.curves import loss_figures
from ..report.figure import Figure, View, axis, heatmap
from ..report.page import Part, legend, marked, method, page, part, pictures, tables_html, write_page
from ..report.picture_figures import RAMP
from ..report.results import ArmResults, LanguageRun, Recipe, Results
from ..report.runs import read_lm_scores
from ..report.stored import Evaluation, curves
from ..report.style import styles
from ..report.tables import BEFORE
from ..train.run_directory import ENVIRONMENT, read_config, read_metrics
from .settings import PASSKEY, AdaptConfig
from .trained import scaled
from .trainer import AGAIN, evaluation_file

RESULT, LINES = "result.json", "results.jsonl"


def write_adapt_report(root: Path, runs: Mapping[str, Path]) -> Path:
    """Write report.html and results.jsonl (for grape report) in `root` from finished runs by label."""
    found = adapt_results(runs)
    learned = {label: read_json(place / RESULT, AGAIN) for label, place in runs.items()}
    write_text(root / LINES, "".join(json.dumps(line) + "\n" for line in _lines(found)))
    return write_page(adapt_page(found, learned), root / "report.html")


def adapt_results(runs: Mapping[str, Path]) -> Results:
    """The runs as arms of a comparison, and the model before training as another arm."""
    arms: list[ArmResults] = []
    scores: dict[str, Scores] = {}
    for label, place in runs.items():
        config = config_of(place)
        if not arms:  # the model before training: of a run that began with its logits, if there is one
            same = (path for path in runs.values() if not scaled(config_of(path)))
            arms.append(_arm(BEFORE, next(same, place), config, 0))
        arms.append(_arm(label, place, config, config.train.steps))
        scores |= {f"{label} {name.rpartition('-')[2]}": each for name, each in read_lm_scores(place).items()}
    place = next(iter(runs.values()))
    first = config_of(place)
    where = read_json(place / ENVIRONMENT, AGAIN)
    recipe = Recipe(
        first.adapt.source, flat(first), (first.seed,), where["machine"], where["versions"], where["command"]
    )
    return Results(tuple(arms), (recipe,), (), (), scores)


def config_of(place: Path) -> AdaptConfig:
    config = read_config(place, AdaptConfig)
    assert isinstance(config, AdaptConfig)
    return config


def _arm(label: str, place: Path, config: AdaptConfig, step: int) -> ArmResults:
    path = evaluation_file(place, step)
    fields: dict[str, Any] = {"label": label, "seed": config.seed, "train_length": config.adapt.context}
    if label != BEFORE:
        cost = read_json(place / RESULT, AGAIN)
        fields |= {name: float(cost[name]) for name in ("tokens_per_second", "peak_memory_bytes")}
    found = place / PASSKEY.format("before" if label == BEFORE else "after")
    if found.is_file():
        fields["passkey"] = read_json(found, AGAIN)["scores"]
    evaluation = typed(Evaluation, {**read_json(path, AGAIN), **fields}, path, AGAIN)
    training, validation = ({}, {}) if label == BEFORE else curves(read_metrics(place))
    picture = None if label == BEFORE else read_json(place / "picture.json", AGAIN)
    run = LanguageRun(config.seed, evaluation, training, validation, picture)
    return ArmResults(label, Arm(label=label, encoding=label), 0, {config.seed: run})


def _lines(results: Results) -> Iterator[dict[str, Any]]:
    """Lines as of `grape report --jsonl`."""
    recipe, arms = results.recipes[0], [{"label": arm.label, "encoding": arm.label} for arm in results.arms]
    yield {
        "kind": "comparison", "arms": arms, "seeds": list(recipe.seeds), "recipe": dict(recipe.settings),
        "machine": dict(recipe.machine), "versions": dict(recipe.versions), "command": recipe.command,
    }  # fmt: skip
    for evaluation in results.evaluations:
        yield evaluation.model_dump(mode="json", exclude_defaults=True)


def adapt_page(results: Results, learned: Mapping[str, Any]) -> str:
    """The page as HTML."""
    looks = styles(results.arms)
    made = tables_html(results, looks)
    answer = (
        f"<h1>Adapting a pretrained model</h1>{made['before']}{trained_table(learned).html(marked(looks))}"
    )
    figures = [figure for label, each in learned.items() for figure in head_figures(label, each["heads"])]
    parts = [
        Part("answer", "Before and after", answer),
        part("loss", "Loss", loss_figures(results, looks), after=made.get("far", ""), lead=LENGTH),
        part("passkey", "Numbers found", after=made.get("passkey", "")),
        part("lm", "Language tasks", after=made.get("lm", "")),
        part("heads", "What each head learned", figures),
        pictures(results, looks),
        method(results.recipes),
    ]
    return page("Adapting a pretrained model", parts, legend(results.arms, looks))


LENGTH = "The training length of these figures is the context of the pretrained model."


def trained_table(learned: Mapping[str, Any]) -> Table:
    """Trained parameters and their cost."""
    heads = ["trained parameters", "logits at step 0", "tokens", "tok/s", "memory"]
    rows = [
        (label, [
            Cell(f"{result['trained']:,}"), Cell(f"± {result['changed_at_step_0']:.1g}"), Cell(f"{result['tokens']:,}"),
            Cell(f"{result['tokens_per_second']:,.0f}"), Cell(f"{result['peak_memory_bytes'] / 2**20:,.0f} MB"),
        ])
        for label, result in learned.items()
    ]  # fmt: skip
    caption = (
        "Logits at step 0: the largest change of a logit by the new encoding, before training. Speeds include "
        "whatever else the machine did."
    )
    return Table("trained", "", caption, heads, rows)


def head_figures(label: str, heads: Mapping[str, Any]) -> list[Figure]:
    """The amplitude of each bias, by layer and head."""
    out = []
    for number, rows in enumerate(heads["amplitude"]):
        across = [f"head {i + 1}" for i in range(len(rows[0]))]
        down = [f"layer {i + 1}" for i in range(len(rows))]
        trace = heatmap(rows, across, down, colorscale=RAMP, zmin=0)
        caption = (
            "At 0 the bias adds nothing, as in the pretrained model; at 1 it has the strength of a model trained with "
            "it from the start."
        )
        title = f"{escape(label)}: amplitude of the bias" + (f" {number + 1}" if number else "")
        layout = {"xaxis": axis(""), "yaxis": axis("", autorange="reversed")}
        height = 120 + 18 * len(rows)
        out.append(Figure(f"heads-{label}-{number}", title, caption, [View("", [trace])], layout, height))
    return out
