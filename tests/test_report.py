"""The report: statistics, reading (also what is missing), the verdict, the table and the page."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grape_pe.commands import report as command
from grape_pe.commands.parsers import Parser
from grape_pe.lab.compare.arms import Arm
from grape_pe.lab.errors import LabError
from grape_pe.lab.report import read_results, report_page, results_json, table, write_report
from grape_pe.lab.report.picture_figures import _word
from grape_pe.lab.report.ranking import compared_tasks, loss_blocks, ranking
from grape_pe.lab.report.results import ArmResults, LanguageRun, Results
from grape_pe.lab.report.statistics import blocks, summarize
from grape_pe.lab.report.stored import Evaluation
from grape_pe.lab.report.style import styles
from grape_pe.lab.report.verdict import verdict
from report_data import ARMS, RECIPE, made_up, write_run, write_synthetic

FEW = ARMS[:3]


# ---- statistics


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.floats(-50, 50))
def test_a_summary_moves_with_its_values(values, shift):
    here, there = summarize(values), summarize([v + shift for v in values])
    assert here.low <= here.mean <= here.high
    assert there.mean == pytest.approx(here.mean + shift, abs=1e-6)
    assert there.spread == pytest.approx(here.spread, abs=1e-6)


def test_three_seeds_by_hand():
    found = summarize([1.0, 2.0, 3.0])
    assert (found.mean, found.spread) == (2.0, 1.0)
    assert found.high - found.mean == pytest.approx(4.30265 / 3**0.5, rel=1e-5)


def test_one_seed_has_no_interval_and_none_no_summary():
    assert summarize([]) is None
    one = summarize([3.0])
    assert (one.mean, one.spread, one.low, one.excludes_zero) == (3.0, None, None, False)


def simulated(dice: random.Random, gaps: dict[str, float], seeds: int = 3) -> Results:
    """Arms with known gaps: a seed moves all of them together by far more than their own noise."""
    shifts = [dice.gauss(0, 0.05) for _ in range(seeds)]
    return results_of(**{
        arm: [3.0 + gap + shift + dice.gauss(0, 0.005) for shift in shifts] for arm, gap in gaps.items()
    })  # fmt: skip


def test_blocks_are_a_two_way_analysis_of_variance():
    """The residual variance by hand, and Tukey's margin from the published table: q(3 arms, 4) = 5.040."""
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 1.5, 1: 2.4, 2: 3.6}, "c": {0: 4.0, 1: 5.2, 2: 5.8}}
    table = [list(each.values()) for each in values.values()]
    columns = [sum(column) / 3 for column in zip(*table, strict=True)]
    middle = sum(columns) / 3
    left = [v - sum(row) / 3 - c + middle for row in table for v, c in zip(row, columns, strict=True)]
    found = blocks(values)
    assert found.residual == pytest.approx((sum(r * r for r in left) / 4) ** 0.5)
    assert found.margin == pytest.approx(5.040 * found.residual / 3**0.5, rel=1e-3)
    assert found.difference("c", "a").mean == pytest.approx(3.0) and found.apart("c", "a")
    moved = {label: {seed: v + 10 * seed for seed, v in each.items()} for label, each in values.items()}
    assert blocks(moved).margin == pytest.approx(found.margin)  # what a seed does to all does not count


def test_only_shared_seeds_are_compared():
    found = blocks({"a": {0: 1.0, 1: 1.1, 7: 9.0}, "b": {0: 1.2, 1: 1.3}})
    assert found.units == (0, 1) and found.means["a"] == pytest.approx(1.05)
    assert blocks({"a": {0: 1.0}, "b": {1: 1.0}}).means == {}
    assert blocks({"a": {0: 1.0}, "b": {0: 2.0}}).margin is None and blocks({}).units == ()


def test_an_arm_that_varies_more_is_named():
    dice = random.Random(0)
    values = {arm: {s: dice.gauss(0, 0.01) for s in range(5)} for arm in "abcde"}
    assert blocks(values).noisy == ()
    values["e"] = {s: dice.gauss(0, 1.0) for s in range(5)}
    found = blocks(values)
    assert found.noisy == ("e",)
    alone = blocks({label: each for label, each in values.items() if label != "e"})
    assert found.residual == pytest.approx(alone.residual)  # the others are not made wider by it
    assert found.difference("e", "a").high - found.difference("e", "a").mean > 50 * found.margin


def test_equal_arms_of_which_one_varies_more_are_rarely_told_apart():
    """With one variance for all of them it is 14%."""
    dice, wrong = random.Random(5), 0
    for _ in range(1000):
        spreads = [0.025, *[0.005] * 5]
        found = blocks({str(n): {i: dice.gauss(0, sd) for i in range(5)} for n, sd in enumerate(spreads)})
        wrong += found.apart(found.order[-1], found.best)
    assert wrong <= 110


def rates(count: int) -> tuple[float, float]:
    """Through the report's verdict: how often a tie is given a winner, and a planted winner is found."""
    dice = random.Random(1)
    false = found = 0
    for _ in range(count):
        tie = verdict(simulated(dice, {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.04, "e": 0.08}))
        false += not {"a", "b", "c"} <= {tie.best, *tie.tied}
        planted = verdict(simulated(dice, {"a": 0.0, "b": 0.03, "c": 0.03, "d": 0.04, "e": 0.08}))
        found += planted.best == "a" and planted.tied == ()
    return false / count, found / count


def test_ties_stay_ties_and_a_planted_difference_is_found():
    false, found = rates(1000)
    assert false <= 0.05 and found >= 0.9


@pytest.mark.parametrize("seeds, draws", [(3, 10_000), (2, 2_000)])
def test_equal_arms_get_a_winner_in_one_of_twenty_within_sampling_error(seeds, draws):
    """Tukey's margin with blocks is exact for normal errors: 5%, here within two standard errors of the count."""
    dice, wins = random.Random(2), 0
    for _ in range(draws):
        shifts = [dice.gauss(0, 0.05) for _ in range(seeds)]
        found = blocks({arm: {i: s + dice.gauss(0, 0.005) for i, s in enumerate(shifts)} for arm in "abcdef"})
        wins += found.apart(found.order[-1], found.best)
    assert abs(wins / draws - 0.05) <= 2 * (0.05 * 0.95 / draws) ** 0.5


def test_the_verdict_gives_a_winner_where_the_margin_does():
    dice = random.Random(2)
    for _ in range(1000):
        results = simulated(dice, dict.fromkeys("abcdef", 0.0))
        found, answer = loss_blocks(results), verdict(results)
        assert answer.best == found.best
        assert set(answer.tied) == {arm for arm in found.order[1:] if not found.apart(arm, found.best)}


# ---- reading


@pytest.fixture
def finished(tmp_path) -> Path:
    return write_synthetic(tmp_path / "synthetic", FEW, pictures=False)


def test_everything_is_read(finished):
    results = read_results([finished])
    arm = results.arms[1]
    assert [a.label for a in results.arms] == ["rope", "alibi", "fox"]
    assert (results.train_length, results.longest, results.times(results.longest)) == (256, 4096, "16×")
    assert sorted(arm.language) == [0, 1, 2]
    run = arm.language[0]
    assert len(run.train_curve) == 60 and len(run.validation_curve) == 6
    found = run.evaluation
    assert len(found.by_position.position) == 37 and len(found.budgets) == 4 and len(found.sweep) == 3
    assert (
        found.loss_at(4096) is not None and found.loss_at(4096, 256) is not None and found.loss_at(77) is None
    )
    assert len(found.at(512).stretches) == 16
    assert {len(arm.scores(task)[0]) for task in results.tasks} == {15, 25}
    assert results.notes == ()


def test_runs_not_done_diverged_or_cut_short_are_told(finished):
    (finished / "runs/fox-s0/evaluation.json").unlink()
    (finished / "runs/fox-s1/evaluation.json").write_text('{"label": "fox", "seed": 1, "val_loss": null}')
    metrics = finished / "runs/fox-s2/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "tra')
    results = read_results([finished])
    row = next(row for row in ranking(results) if row.label == "fox")
    assert row.val_loss.count == 1
    assert row.status == "1 of 3 diverged, 1 of 9 not done"  # nine with the tasks
    assert results.notes == ()  # a kill cuts the last line: no news
    assert "1 of 3 diverged" in table(results) and "1 of 3 diverged" in report_page(results)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_loss_that_is_no_number_is_a_diverged_run(finished, value):
    path = finished / "runs/rope-s0/evaluation.json"
    path.write_text(re.sub(r'"val_loss": [\d.]+', f'"val_loss": {value}', path.read_text()))
    results = read_results([finished])
    assert results.arms[0].language[0].diverged
    report_page(results)


@pytest.mark.parametrize(
    "file, text, why",
    [
        ("runs/rope-s0/evaluation.json", "{", "it is not JSON"),
        ("runs/rope-s0/evaluation.json", '{"label": "rope", "seed": 0, "val_loss": "high"}', "val_loss: "),
        ("runs/rope-s1/metrics.jsonl", 'oops\n{"kind": "train", "step": 1, "loss": 2}\n', "it is not JSON"),
        ("runs/rope-s1/metrics.jsonl", '{"kind": "train"}\n', "line 1 has no kind and step"),
        ("runs/rope-s2/picture.json", '{"version": 1}', "cannot be drawn"),
        ("results.jsonl", '{"seed": 0}\n', "it has no label"),
        ("compare.json", '{"arms": [{"label": "rope"}]}', "it has no arms.0.encoding"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_ranked_without_it(finished, file, text, why):
    (finished / file).write_text(text)
    with pytest.raises(LabError) as refused:
        read_results([finished])
    said = str(refused.value)
    assert said.startswith(str(finished / file)) and "is damaged: " in said and why in said and ";" in said


def test_a_picture_of_another_version_is_left_out(finished):
    (finished / "runs/rope-s2/picture.json").write_text('{"version": 0}')
    (note,) = read_results([finished]).notes
    assert "picture.json cannot be shown by this version" in note


def test_arms_with_other_encoding_options_are_not_merged(tmp_path):
    here = write_synthetic(tmp_path / "here", FEW, pictures=False)
    there = write_synthetic(tmp_path / "there", FEW, pictures=False)
    said = json.loads((there / "compare.json").read_text())
    for each in said["arms"]:
        each["options"] = {"period": 64}
    (there / "compare.json").write_text(json.dumps(said))
    found = read_results([here, there])
    labels = [arm.label for arm in found.arms]
    assert "rope [default options]" in labels and "rope [period=64]" in labels and len(labels) == 6
    assert all(len(arm.language) == 3 for arm in found.arms) and not found.notes


NASTY = """<!--<script>"a" & 'b'"""


def test_labels_are_escaped_once(finished):
    arm = read_results([finished]).arms[0]
    results = Results((replace(arm, label=NASTY),), read_results([finished]).recipes, (), ())
    page = report_page(results)
    block = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL).group(1)
    assert "<" not in block  # nothing in it can open a comment or a script
    drawn = json.loads(block)["ranking"]["views"][0]["data"][-1]
    assert drawn["y"] == ["&lt;!--&lt;script&gt;\"a\" &amp; 'b'"]  # what plotly shows as NASTY
    assert drawn["meta"]["arm"] == NASTY  # what the legend's buttons are matched with
    assert escape(NASTY) in page and escape(escape(NASTY)) not in page
    assert [_word(word) for word in ("<!--", '"quoted"')] == ["&lt;!--", '"quoted"']  # tick labels


def test_nothing_done_yet_is_a_report_too(tmp_path):
    write_synthetic(tmp_path, FEW, seeds=(), tasks=(), pictures=False)
    results = read_results([tmp_path])
    assert "no finished run" in verdict(results).headline
    assert "rope" in table(results) and "no finished run" in report_page(results)


def test_the_lines_of_results_stand_in_for_runs(finished):
    lines = []
    for path in finished.glob("runs/*/evaluation.json"):
        lines.append({"kind": "language", **json.loads(path.read_text())})
        path.unlink()
    (finished / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert all(row.val_loss.count == 3 for row in ranking(read_results([finished])))


def test_more_seeds_of_the_same_recipe_are_one_arm(finished, tmp_path):
    more = write_synthetic(tmp_path / "more", FEW, seeds=(2, 3, 4), pictures=False)
    results = read_results([finished, more])
    assert len(results.arms) == 3 and len(results.recipes) == 1
    assert sorted(results.arms[0].language) == [0, 1, 2, 3, 4]
    assert any("seed 2" in note and "several directories" in note for note in results.notes)


def test_another_recipe_is_flagged(finished, tmp_path):
    recipe = {**RECIPE, "name": "other", "train": {**RECIPE["train"], "steps": 1200}}
    other = write_synthetic(tmp_path / "longer", FEW[:1], pictures=False, recipe=recipe)
    results = read_results([finished, other])
    assert [arm.label for arm in results.arms] == ["rope", "alibi", "fox", "rope (longer)"]
    (note,) = results.notes
    assert "train.steps: 600 there, 1200 here" in note and "not a fair comparison" in note
    assert "train.steps: 600" in report_page(results)


def test_what_is_no_comparison_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"no compare\.json"):
        read_results([tmp_path])
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(LabError, match="damaged"):
        read_results([tmp_path])
    with pytest.raises(LabError, match="no results given"):
        read_results([])


# ---- verdict and table


def results_of(**losses: list[float]) -> Results:
    return made_up({label: [{"val_loss": loss} for loss in each] for label, each in losses.items()})


def test_a_clear_winner_is_named():
    said = verdict(results_of(rope=[3.5, 3.6, 3.4], fox=[3.1, 3.2001, 3.0]))
    assert said.best == "fox" and "beyond chance against rope" in said.headline and said.tied == ()


def test_a_lead_within_the_spread_is_called_so():
    said = verdict(results_of(rope=[3.5, 3.6, 3.4], fox=[3.45, 3.65, 3.35]))
    assert "cannot be told apart" in said.headline and said.tied == ("rope",)


def test_what_diverged_or_is_missing_is_said_and_not_dropped():
    results = results_of(rope=[3.5, 3.6, 3.4], fox=[3.1, 3.2001, 3.0], alibi=[3.3, 3.41])
    lost = LanguageRun(2, Evaluation(label="fox", seed=2))
    fox = replace(results.arms[1], language={**results.arms[1].language, 2: lost})
    waiting = replace(results.arms[2], language={**results.arms[2].language, 2: LanguageRun(2)})
    said = verdict(replace(results, arms=(results.arms[0], fox, waiting)))
    assert said.best == "alibi"  # fox is lower where it did not diverge
    assert "fox diverged in 1 of 3 runs, so it is not ranked." in said.details
    assert any(sentence.startswith("8 of 9 runs done; not done: alibi 1.") for sentence in said.details)
    rows = ranking(replace(results, arms=(results.arms[0], fox, waiting)))
    assert [row.label for row in rows] == ["alibi", "rope", "fox"]
    assert rows[1].val_loss.mean == pytest.approx(3.55)  # on the seeds that alibi has too
    assert rows[1].status == "1 of 3 of a seed that others lack" and rows[2].status == "1 of 3 diverged"


def test_other_recipes_and_other_seeds_are_not_judged():
    results = results_of(rope=[3.5, 3.6, 3.4], fox=[3.1, 3.2001, 3.0])
    other = replace(results.arms[1], recipe=1)
    assert verdict(replace(results, arms=(results.arms[0], other))).best == "rope"
    elsewhere = {seed + 9: run for seed, run in results.arms[1].language.items()}
    moved = replace(results.arms[1], language=elsewhere)
    assert "share no seed" in verdict(replace(results, arms=(results.arms[0], moved))).headline


def test_one_seed_decides_nothing():
    said = verdict(results_of(rope=[3.5], fox=[3.4]))
    assert "may be chance" in said.headline and "one seed" in table(results_of(rope=[3.5], fox=[3.4]))


def test_the_table_is_sorted_and_fits(finished):
    text = table(read_results([finished]))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["encoding", "fox", "alibi", "rope"]
    assert all(len(line) <= 100 for line in lines) and "±" in lines[1] and "16×" in lines[0]


def test_long_labels_are_cut_not_wrapped(tmp_path):
    arm = {"label": "grape-m+grape-ap+a-name-that-goes-on-and-on-and-on", "encoding": "x", "kv_shift": False}
    text = table(read_results([write_synthetic(tmp_path, [*FEW, arm], pictures=False)]))
    assert all(len(line) <= 100 for line in text.splitlines()) and "…" in text


def test_json_has_every_number(finished):
    said = json.loads(json.dumps(results_json(read_results([finished])), allow_nan=False))
    best = said["ranking"][0]
    assert best["label"] == "fox" == said["verdict"]["best"]
    assert set(best["val_loss"]) == {"mean", "count", "spread", "low", "high"}
    assert best["losses"].keys() == {"0", "1", "2"}


# ---- page


def test_styles_are_one_for_each_arm_and_variants_share_a_hue():
    looks = styles(read_like(ARMS))
    assert looks["fox"].hue == looks["fox+kv"].hue and looks["fox"].dash != looks["fox+kv"].dash
    many = styles(read_like([{"label": f"e{i}", "encoding": f"e{i}", "kv_shift": False} for i in range(24)]))
    assert len({(look.hue, look.dash) for look in many.values()}) == 24


def read_like(arms):
    return [ArmResults(arm["label"], Arm(**arm), 0, {}) for arm in arms]


def test_the_page_needs_nothing_else(tmp_path):
    path = write_report([write_synthetic(tmp_path, FEW)], tmp_path / "report.html")
    text = path.read_text()
    assert path.stat().st_size < 8e6
    own = text[: text.index("<script>/**")]  # plotly.js itself mentions addresses it does not fetch here
    assert not re.findall(r'(?:src|href)="(?!#|data:)', own) and "@import" not in own and "url(" not in own
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S).group(1))
    drawn = re.findall(r'data-figure="([^"]+)"', text)
    assert sorted(drawn) == sorted(figures) and len(drawn) == len(set(drawn))
    assert all(view["data"] for figure in figures.values() for view in figure["views"])
    assert not list(tmp_path.glob(".*.part"))


def test_names_cannot_break_out_of_the_page(tmp_path):
    arm = {"label": "<script><b>&x", "encoding": "rope", "kv_shift": False}
    write_synthetic(tmp_path, [arm], seeds=(), tasks=(), pictures=False)
    (tmp_path / "results.jsonl").write_text(
        json.dumps({"kind": "language", "label": arm["label"], "seed": 0, "val_loss": 3.0}) + "\n"
    )
    text = report_page(read_results([tmp_path]))
    assert "<script><b>" not in text and "&lt;script&gt;" in text


def test_the_command_writes_and_prints(finished, tmp_path, capsys):
    parser = Parser()
    command.add_parsers(parser.add_subparsers())
    options = parser.parse_args(["report", str(finished), "--out", str(tmp_path / "page.html")])
    assert options.run(options) == 0
    out = capsys.readouterr().out
    assert "± " in out and f"Report: {tmp_path / 'page.html'}" in out and (tmp_path / "page.html").is_file()
    options = parser.parse_args(["report", str(finished), "--json"])
    assert options.run(options) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(finished / "report.html")


def test_a_run_with_one_value_missing_keeps_the_others(finished):
    write_run(finished, FEW[0], 0, 0)
    path = finished / "runs/rope-s0/evaluation.json"
    said = json.loads(path.read_text())
    for name in ("extrapolation", "by_position", "tokens_per_second", "peak_memory_bytes"):
        del said[name]
    path.write_text(json.dumps(said))
    row = next(row for row in ranking(read_results([finished])) if row.label == "rope")
    assert row.val_loss.count == 3 and row.long_loss.count == 2 and row.speed.count == 2


def test_tasks_alone_are_ranked_by_what_is_solved(tmp_path):
    """A comparison may train on the tasks only: then no run on text is missing."""
    write_synthetic(tmp_path, FEW, pictures=False)
    said = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps({**said, "comparison": {"language": False}}))
    results = read_results([tmp_path])
    assert [row.label for row in ranking(results)] == ["fox", "alibi", "rope"]
    assert all(row.status == "" and row.val_loss is None for row in ranking(results))
    assert verdict(results).headline.startswith("fox scores highest on the tasks")
    assert "val loss" not in table(results) and "task-passkey" in report_page(results)


def test_only_tasks_that_all_have_are_averaged(tmp_path):
    """While tasks are under way, a mean over easy tasks is not compared with one over all of them."""
    write_synthetic(tmp_path, FEW, pictures=False)
    said = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps({**said, "comparison": {"language": False}}))
    before = ranking(read_results([tmp_path]))
    for seed in range(3):
        (tmp_path / f"tasks/passkey/rope-s{seed}/evaluation.json").unlink()
    results = read_results([tmp_path])
    assert compared_tasks(results) == ["flip-flop"] and "of flip-flop only" in verdict(results).headline
    assert [row.tasks.count for row in ranking(results)] == [3, 3, 3]
    assert {row.label: row.tasks.mean for row in ranking(results)} != {r.label: r.tasks.mean for r in before}
    (tmp_path / "tasks/flip-flop/rope-s1/evaluation.json").unlink()
    assert [row.tasks.count for row in ranking(read_results([tmp_path]))] == [2, 2, 2]


def test_a_task_that_diverged_is_named_and_its_encoding_not_ranked(tmp_path):
    write_synthetic(tmp_path, FEW, pictures=False)
    said = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps({**said, "comparison": {"language": False}}))
    lost = {"label": "fox", "seed": 1, "task": "passkey", "val_loss": None, "scores": []}
    (tmp_path / "tasks/passkey/fox-s1/evaluation.json").write_text(json.dumps(lost))
    results = read_results([tmp_path])
    answer, rows = verdict(results), ranking(results)
    assert answer.headline.startswith("alibi scores highest") and answer.tied == ()
    assert "fox diverged in 1 of 6 runs on tasks, so it is not ranked there." in answer.details
    assert rows[-1].label == "fox" and rows[-1].status == "1 of 6 on tasks diverged"
    assert "1 of 6 on tasks diverged" in report_page(results)
