"""The page of an adapted model, or of a sweep: before and after, loss by length and position, heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..compare.arms import Arm
from ..config import flat
from ..evaluate.benchmarks import Scores
from ..files import read_json
from ..report.cells import Cell, Table
from ..report.curves import loss_figures
from ..report.figure import Figure, View, axis, heatmap
from ..report.page import Part, legend, page, part, pictures, recipe_html, table_html, write_page
from ..report.picture_figures import RAMP
from ..report.results import ArmResults, LanguageRun, Recipe, Results
from ..report.runs import read_lm_scores
from ..report.stored import Evaluation, checked, curves
from ..report.style import styles
from ..report.tables import tables
from ..train.run_directory import ENVIRONMENT, read_config, read_metrics
from .settings import AdaptConfig
from .trainer import AGAIN, evaluation_file

RESULT, BEFORE = "result.json", "before"


def write_adapt_report(root: Path, runs: Mapping[str, Path]) -> Path:
    """Read the finished runs, by label, and write report.html in `root`."""
    found = adapt_results(runs)
    learned = {label: read_json(place / RESULT, AGAIN) for label, place in runs.items()}
    return write_page(adapt_page(found, learned), root / "report.html")


def adapt_results(runs: Mapping[str, Path]) -> Results:
    """The runs as arms of a comparison, and the model before any training as one more."""
    arms: list[ArmResults] = []
    scores: dict[str, Scores] = {}
    recipes: list[Recipe] = []
    for label, place in runs.items():
        config = read_config(place, AdaptConfig)
        assert isinstance(config, AdaptConfig)
        if not arms:
            arms.append(_arm(BEFORE, place, config, 0))
        arms.append(_arm(label, place, config, config.train.steps))
        scores |= dict(_scores(label, place))
        recipes.append(_recipe(place, config))
    return Results(tuple(arms), (recipes[0],), (), (), scores)


def _arm(label: str, place: Path, config: AdaptConfig, step: int) -> ArmResults:
    path = evaluation_file(place, step)
    said = {"label": label, "seed": config.seed, "train_length": config.adapt.context}
    cost = {} if label == BEFORE else read_json(place / RESULT, AGAIN)
    known = {name: cost[name] for name in ("tokens_per_second",) if name in cost}
    memory = {"peak_memory_bytes": float(cost["peak_memory_bytes"])} if cost else {}
    values = {**read_json(path, AGAIN), **said, **known, **memory}
    evaluation = checked(Evaluation, values, path, AGAIN)
    training, validation = ({}, {}) if label == BEFORE else curves(read_metrics(place))
    picture = None if label == BEFORE else read_json(place / "picture.json", AGAIN)
    run = LanguageRun(config.seed, evaluation, training, validation, picture)
    return ArmResults(label, Arm(label=label, encoding=label), 0, {config.seed: run})


def _scores(label: str, place: Path) -> Iterator[tuple[str, Scores]]:
    for name, each in read_lm_scores(place).items():
        yield f"{label} {name.rpartition('-')[2]}", each


def _recipe(place: Path, config: AdaptConfig) -> Recipe:
    where = read_json(place / ENVIRONMENT, AGAIN)
    return Recipe(
        config.adapt.source, flat(config.model_dump()), (config.seed,), where["machine"], where["versions"],
        where["command"],
    )  # fmt: skip


def adapt_page(results: Results, learned: Mapping[str, Any]) -> str:
    """The whole page."""
    looks = styles(results.arms)
    made = {table.key: table_html(table, looks) for table in tables(results)}
    after = "".join(made.get(key, "") for key in ("lengths", "far"))
    answer = f"<h1>Adapting a pretrained model</h1>{table_html(before_after(results, learned), looks)}"
    figures = [figure for label, each in learned.items() for figure in head_figures(label, each["heads"])]
    parts = [
        Part("answer", "Before and after", answer),
        part("loss", "Loss", loss_figures(results, looks), after=after, lead=LENGTH),
        part("lm", "Language tasks", after=made.get("lm", "")),
        part("heads", "What each head learned", figures),
        pictures(results, looks),
        part(
            "about", "How this was measured", after="".join(map(recipe_html, results.recipes)), link="Method"
        ),
    ]
    return page("Adapting a pretrained model", [p for p in parts if p.body], legend(results.arms, looks))


LENGTH = "The training length of these figures is the context of the pretrained model."


def before_after(results: Results, learned: Mapping[str, Any]) -> Table:
    """Losses at every length, with the change since before; and what was trained."""
    lengths = results.lengths()
    heads = [f"loss at {length:,}" for length in lengths] + ["trained parameters", "logits at step 0"]
    before = results.arms[0].evaluations
    first = next(iter(before.values()))
    rows = []
    for arm in results.arms:
        found = next(iter(arm.evaluations.values()))
        cells = [_loss(found.loss_at(n), first.loss_at(n), arm.label == BEFORE) for n in lengths]
        said = learned.get(arm.label)
        more = ["", ""] if said is None else [f"{said['trained']:,}", f"± {said['changed_at_step_0']:.1g}"]
        rows.append((arm.label, [*cells, *(Cell(text) for text in more)]))
    caption = (
        "Mean loss in nats a token on held-out text, the same text at every length. Logits at step 0: the largest "
        "change that giving the model its encoding made to a logit, before any training."
    )
    return Table("before", "", caption, heads, rows)


def _loss(now: float | None, before: float | None, first: bool) -> Cell:
    if now is None:
        return Cell()
    change = "" if first or before is None else f"{now - before:+.3f}"
    return Cell(f"{now:.3f}", now, change)


def head_figures(label: str, heads: Mapping[str, Any]) -> list[Figure]:
    """The amplitude of each bias, by layer and head."""
    out = []
    for number, rows in enumerate(heads["amplitude"]):
        across = [f"head {i + 1}" for i in range(len(rows[0]))]
        down = [f"layer {i + 1}" for i in range(len(rows))]
        trace = heatmap(rows, across, down, colorscale=RAMP, zmin=0)
        caption = (
            "At 0 the bias adds nothing, as in the pretrained model; at 1 it has the strength it would have in a "
            "model trained with it from the start."
        )
        title = f"{escape(label)}: amplitude of the bias" + (f" {number + 1}" if number else "")
        layout = {"xaxis": axis(""), "yaxis": axis("", autorange="reversed")}
        height = 120 + 18 * len(rows)
        out.append(Figure(f"heads-{label}-{number}", title, caption, [View("", [trace])], layout, height))
    return out
