"""The budget axis, intervals over text, sweeps, training runs; the report as Markdown and as one file."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest

from grape_pe.lab.compare.archive import write_archive
from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate.benchmarks import Scores, TaskScore
from grape_pe.lab.report import markdown, read_results, report_page, results_json, summary, table
from grape_pe.lab.report.ranking import (
    budget_blocks,
    length_blocks,
    ranking,
    scored_by,
    text_blocks,
    trend_blocks,
)
from grape_pe.lab.report.results import ArmResults, LanguageRun, Results
from grape_pe.lab.report.statistics import blocks
from grape_pe.lab.report.tables import budget_table, sweep_table, tables
from grape_pe.lab.report.verdict import verdict
from report_data import ARMS, made_up, write_synthetic

FEW = ARMS[:3]
BUDGETS = (1_000_000, 2_000_000, 4_000_000, 8_000_000)


@pytest.fixture
def finished(tmp_path) -> Path:
    return write_synthetic(tmp_path / "synthetic", FEW, pictures=False)


def results_of(
    gaps: dict[str, tuple[float, ...]], dice: random.Random, seeds: int = 3, noise: float = 0.005
) -> Results:
    """Arms with known gaps at each budget; a seed moves all of them by far more than their own noise."""
    shifts = [[dice.gauss(0, 0.05) for _ in BUDGETS] for _ in range(seeds)]
    arms: dict[str, list[dict]] = {label: [] for label in gaps}
    for label, each in gaps.items():
        for shift in shifts:
            steps = enumerate(zip(each, shift, strict=True))
            losses = [4 - 0.3 * i + gap + s + dice.gauss(0, noise) for i, (gap, s) in steps]
            budgets = [{"tokens": n, "loss": loss} for n, loss in zip(BUDGETS, losses, strict=True)]
            arms[label].append({"val_loss": losses[-1], "budgets": budgets})
    return made_up(arms)


# ---- budgets


def test_a_lead_that_closes_is_named_with_its_numbers():
    found = results_of({"fox": (0, 0, 0, 0), "rope": (0.52, 0.4, 0.3, 0.21)}, random.Random(0), noise=0.001)
    answer = verdict(found)
    assert "It leads rope by 0.21 at 8M tokens; the lead was 0.52 at 1M and is closing." in answer.headline
    assert "rope comes nearer to fox from 1M to 8M tokens, beyond chance." in answer.details
    change = trend_blocks(found).difference("rope", "fox")
    assert change.mean == pytest.approx(-0.31, abs=0.01) and change.excludes_zero
    text = table(found)
    assert "closing -0.309" in text and "1M" in text and all(len(line) <= 100 for line in text.splitlines())
    assert "budget-gaps" in report_page(found)


def test_a_gap_that_stays_is_no_clear_change_and_one_that_grows_opens():
    gaps = {"fox": (0, 0, 0, 0), "rope": (0.2,) * 4, "alibi": (0.1, 0.2, 0.3, 0.4)}
    found = results_of(gaps, random.Random(1))
    answer = verdict(found)
    assert "the lead was 0.2 at 1M, no clear change." in answer.headline
    assert "alibi falls further behind fox from 1M to 8M tokens, beyond chance." in answer.details
    words = {label: cells[-1].text.rsplit(" ", 1)[0] for label, cells in budget_table(found).rows}
    assert words == {"fox": "", "rope": "no clear change", "alibi": "opening"}


def test_another_leader_at_the_first_budget_is_named():
    found = results_of({"fox": (0.1, 0, 0, 0), "rope": (0, 0.1, 0.1, 0.1)}, random.Random(0))
    answer = verdict(found)
    assert "at 1M it was 0.1 behind, a change beyond chance." in answer.headline
    assert "At 1M tokens rope was lowest: the order depends on the budget." in answer.details


def test_one_seed_says_nothing_about_the_trend():
    found = results_of({"fox": (0, 0, 0, 0), "rope": (0.5, 0.4, 0.3, 0.2)}, random.Random(0), seeds=1)
    assert "one seed does not say" in verdict(found).headline
    assert trend_blocks(found).margin is None and "one seed" in table(found)


def test_the_change_of_a_gap_is_paired_by_seed():
    found = results_of({"a": (0,) * 4, "b": (0.3, 0.2, 0.2, 0.1), "c": (0.4,) * 4}, random.Random(5))
    losses = {
        arm.label: [[b.loss for b in run.budgets] for run in arm.evaluations.values()] for arm in found.arms
    }
    values = {label: {i: each[-1] - each[0] for i, each in enumerate(runs)} for label, runs in losses.items()}
    assert trend_blocks(found) == blocks(values)
    by_hand = [sum((losses["b"][s][k] - losses["a"][s][k]) for s in range(3)) / 3 for k in (0, -1)]
    assert trend_blocks(found).difference("b", "a").mean == pytest.approx(by_hand[1] - by_hand[0])


def test_false_trends_are_rare_and_planted_ones_are_found():
    """Through the verdict, 1,000 times: constant gaps of any size are not said to move; one that closes is."""
    dice = random.Random(3)
    false = found = 0
    for _ in range(1000):
        same = verdict(
            results_of({a: (g,) * 4 for a, g in zip("abcde", (0, 0, 0.02, 0.1, 0.5), strict=True)}, dice)
        )
        moves = (
            "is closing",
            "is opening",
            "a change beyond chance",
            "comes nearer",
            "come nearer",
            "further behind",
        )
        false += any(word in " ".join((same.headline, *same.details)) for word in moves)
        planted = {
            "a": (0,) * 4,
            "b": (0.1, 0.08, 0.06, 0.04),
            "c": (0.2,) * 4,
            "d": (0.3,) * 4,
            "e": (0.5,) * 4,
        }
        found += "is closing" in verdict(results_of(planted, dice)).headline
    assert false <= 0.05 * 1000 and found >= 0.9 * 1000


def test_arms_without_budgets_or_with_other_seeds_are_not_compared_there():
    found = results_of({"a": (0,) * 4, "b": (0.1,) * 4, "c": (0.2,) * 4}, random.Random(0))
    bare = {
        s: LanguageRun(s, run.evaluation.model_copy(update={"budgets": []}))
        for s, run in found.arms[2].language.items()
    }
    lost = {s: LanguageRun(s, run.evaluation if s else None) for s, run in found.arms[1].language.items()}
    arms = (
        found.arms[0],
        ArmResults("b", found.arms[1].arm, 0, lost),
        ArmResults("c", found.arms[2].arm, 0, bare),
    )
    results = Results(arms, found.recipes, (), ())
    each = budget_blocks(results)
    assert all(b.units == (1, 2) and set(b.means) == {"a", "b"} for b in each.values())
    details = verdict(results).details
    assert "c: no loss at 1M tokens in all seeds, so no change." in details
    assert any(text.startswith("8 of 9 runs done; not done: b 1.") for text in details)


def test_an_arm_that_diverged_at_a_budget_is_not_compared_there():
    found = results_of({"a": (0,) * 4, "b": (0.1,) * 4, "c": (0.2,) * 4}, random.Random(0))
    run = found.arms[2].language[0].evaluation
    lost = run.model_copy(
        update={"budgets": [run.budgets[0].model_copy(update={"loss": None}), *run.budgets[1:]]}
    )
    arm = ArmResults("c", found.arms[2].arm, 0, {**found.arms[2].language, 0: LanguageRun(0, lost)})
    results = Results((*found.arms[:2], arm), found.recipes, (), ())
    each = budget_blocks(results)
    assert set(each[BUDGETS[0]].means) == {"a", "b"} and set(each[BUDGETS[1]].means) == {"a", "b", "c"}
    assert all(len(b.units) == 3 for b in each.values()) and "c" not in trend_blocks(results).means
    assert budget_table(results).notes == ["c diverged at 1M tokens and is not compared there"]


# ---- longer texts


def test_intervals_over_text_and_over_seeds_are_their_own(finished):
    results = read_results([finished])
    seeds, text = length_blocks(results, 4096), text_blocks(results, 4096)
    assert len(seeds.units) == 3 and len(text.units) == 16 and seeds.means.keys() == text.means.keys()
    for label in seeds.means:
        assert text.means[label] == pytest.approx(seeds.means[label])
    gap = text.difference("rope", "fox")
    assert gap.high - gap.mean < 0.1  # what a stretch does to all arms (0.3) is taken out
    shown = summary(results)
    assert "over seeds" in shown and "over text" in shown and "seeds and over text" in shown


def test_intervals_over_text_are_simultaneous_for_unequal_variances():
    """At most one tie in twenty is broken, also where one arm varies much more than the others."""
    dice, broken = random.Random(4), 0
    for _ in range(1000):
        shift = [dice.gauss(0, 0.3) for _ in range(16)]
        values = {
            arm: {i: s + dice.gauss(0, noise) for i, s in enumerate(shift)}
            for arm, noise in (("a", 0.02), ("b", 0.02), ("c", 0.02), ("d", 0.2))
        }
        found = blocks(values, pooled=False)
        broken += any(found.apart(label, found.best) for label in values if label != found.best)
    assert broken <= 0.05 * 1000


def test_text_that_differs_is_not_paired(finished):
    path = finished / "runs/rope-s0/evaluation.json"
    said = json.loads(path.read_text())
    for each in said["extrapolation"]:
        each["stretches"] = each["stretches"][:7]
    path.write_text(json.dumps(said))
    results = read_results([finished])
    assert "rope" not in text_blocks(results, 4096).means and len(length_blocks(results, 4096).means) == 3
    for seed in (1, 2):
        (finished / f"runs/rope-s{seed}/evaluation.json").write_text(json.dumps({**said, "seed": seed}))
    assert text_blocks(read_results([finished]), 4096).means == {}


# ---- sweeps and tasks


def test_the_rates_of_a_sweep_and_its_edge_are_shown(finished):
    results = read_results([finished])
    shown = sweep_table(results)
    assert shown.heads == ["0.001", "0.003", "0.01"] and "*" in dict(shown.rows)["fox"][1].text
    assert shown.notes and "for rope:" in shown.notes[0]  # the other two are best in the middle
    assert any("edge of the sweep for rope" in text for text in verdict(results).details)
    assert "table-sweep" in report_page(results)


def test_a_score_that_is_zero_for_all_ranks_nobody(finished):
    for path in finished.glob("tasks/flip-flop/*/evaluation.json"):
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "scores": [{**each, "exact": 0.0} for each in said["scores"]]}))
    results = read_results([finished])
    assert (scored_by(results, "flip-flop"), scored_by(results, "passkey")) == ("token", "exact")
    assert all(row.tasks.mean > 0.5 for row in ranking(results))
    assert "tokens of answers that are right" in summary(results)


# ---- training runs


def write_training(directory: Path, encoding: str, seed: int = 0, steps: int = 40, done: int = 40) -> Path:
    """A run directory as `grape train` leaves it, with made-up numbers."""
    config = load("demo", {"model.encoding": encoding, "seed": seed, "train.steps": steps, "train.warmup": 5})
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(config.to_yaml())
    (directory / "environment.json").write_text(
        json.dumps({"machine": {"cores": 2}, "versions": {}, "command": "grape train"})
    )
    base = 3 + 0.1 * len(encoding) + 0.05 * seed
    lines: list[dict] = [
        {"kind": "train", "step": s, "loss": base + 1 / s, "tokens_per_second": 1000.0, "memory_bytes": 2**28}
        for s in range(10, done + 1, 10)
    ]
    lines += [{"kind": "validation", "step": done, "loss": base}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_a_training_run_has_a_report(tmp_path):
    results = read_results([write_training(tmp_path / "first", "rope")])
    (row,) = ranking(results)
    assert (row.label, row.val_loss.mean, row.speed.mean, row.memory.mean) == ("rope", 3.4, 1000.0, 2**28)
    assert verdict(results).headline == "One encoding: rope, validation loss 3.4000."
    page = report_page(results)
    assert "<title>Training run</title>" in page and "grape train" in page and "train.steps 40" in page


def test_runs_of_one_recipe_are_compared_seed_by_seed_and_others_are_not(tmp_path):
    places = [write_training(tmp_path / f"{e}-{s}", e, s) for e in ("rope", "alibi") for s in (0, 1)]
    places.append(write_training(tmp_path / "longer", "rope", steps=80, done=80))
    places.append(write_training(tmp_path / "stopped", "fox", done=20))
    results = read_results(places)
    assert [arm.label for arm in results.arms] == ["rope", "alibi", "rope (longer)", "fox"]
    assert verdict(results).best == "rope" and ranking(results)[0].val_loss.count == 2
    assert any("not a fair comparison" in note for note in results.notes)
    assert verdict(results).details[0].startswith("5 of 6 runs done; not done: fox 1. Arms are compared")


def test_scores_of_lm_eval_are_a_table(tmp_path):
    run = write_training(tmp_path / "first", "rope")
    score = TaskScore(0.5, 0.55, 0.01, 0.01, 100)
    Scores("runs/first/final", "rope", 0, None, {"arc_easy": score, "sciq": score}).save(run / "lm_eval.json")
    Scores("runs/other/final", "fox", 0, None, {"sciq": TaskScore(0.7, None, 0.02, None, 100)}).save(
        tmp_path / "other.json"
    )
    results = read_results([run, tmp_path / "other.json"])
    assert list(results.lm_scores) == ["first", "other"]
    text = table(results)
    assert (
        "ARC-E" in text
        and "50.00 ± 1.00" in text
        and "other acc" in text
        and "table-lm" in report_page(results)
    )
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(LabError, match=r"other\.json is damaged: no scores of grape eval lm"):
        read_results([run, tmp_path / "other.json"])


# ---- one file, and documents


def test_one_file_holds_what_a_report_needs(finished, tmp_path):
    before = read_results([finished])
    after = read_results([write_archive(finished, tmp_path / "all.jsonl")])
    assert markdown(after) == markdown(before)
    assert [row.label for row in ranking(after)] == [row.label for row in ranking(before)]
    assert after.recipes[0].settings == before.recipes[0].settings
    json.dumps(results_json(after), allow_nan=False)
    with pytest.raises(LabError, match="there is no file"):
        read_results([tmp_path / "none.jsonl"])
    with pytest.raises(LabError, match="--jsonl takes one directory of grape compare"):
        write_archive(tmp_path, tmp_path / "none.jsonl")


def test_a_file_is_read_alone(finished, tmp_path, monkeypatch):
    """Runs of the same names in the working directory are others."""
    archive = write_archive(finished, tmp_path / "all.jsonl")
    monkeypatch.chdir(write_synthetic(tmp_path / "other", FEW, tasks=(), pictures=False))
    for path in Path("runs").glob("*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"val_loss": 1.0}))
    assert markdown(read_results([archive])) == markdown(read_results([finished]))


def test_a_file_of_a_part_says_how_many_runs_are_done(finished, tmp_path):
    for run in ("fox-s1", "fox-s2", "rope-s2"):
        (finished / "runs" / run / "evaluation.json").unlink()
    results = read_results([write_archive(finished, tmp_path / "part.jsonl")])
    done = len(list(finished.glob("*/**/evaluation.json")))
    assert f"{done} of {done + 3} runs done; not done: rope 1, fox 2. Arms are compared" in markdown(results)
    assert verdict(results) == verdict(read_results([finished]))
    assert ranking(results)[0].val_loss.count == 1  # the seed that all have


def test_markdown_has_every_table(finished):
    results = read_results([finished])
    text = markdown(results)
    assert all(f"**{each.title}**" in text for each in tables(results) if each.title)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows) and "| `fox` |" in text


def test_the_numbers_in_the_documents_are_generated():
    """docs/results.md is what tools/results.py writes from the stored results."""
    root = Path(__file__).parents[1]
    generated = runpy.run_path(str(root / "tools/results.py"))["generated"]
    text = (root / "docs/results.md").read_text()
    assert "<!-- generated: " in text and generated(text, root) == text


@pytest.mark.parametrize("speeds, claimed", [((500, 505, 495), True), ((400, 1500, 500), False)])
def test_a_speed_is_claimed_only_beyond_what_runs_differ_by(finished: Path, speeds, claimed: bool):
    """Runs of a comparison share the machine with whatever else it does."""
    for file in sorted((finished / "runs").glob("*/evaluation.json")):
        name, seed = file.parent.name.rsplit("-s", 1)
        speed, loss = (speeds[int(seed)], 1.0) if name == "fox" else (1000 + int(seed), 2.0)
        stored = json.loads(file.read_text()) | {"tokens_per_second": speed, "val_loss": loss}
        file.write_text(json.dumps(stored))
    details = " ".join(verdict(read_results([finished])).details)
    assert ("fox trains 50% slower" in details) is claimed
    assert ("beyond chance; grape bench train" in details) is not claimed
