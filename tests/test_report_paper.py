"""`grape report --paper`: the paper's tables with runs beside them. The runs are made up; nobody trained them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("plotly")

from browser import open_browser, require_browser, set_screen
from grape_pe.cli import main
from grape_pe.lab import paper
from grape_pe.lab.config import load
from grape_pe.lab.data.manifest import Manifest
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate.benchmarks import PAPER_TASKS, Scores, TaskScore
from grape_pe.lab.report.paper import headline, lines, paper_json, paper_markdown, paper_table
from grape_pe.lab.report.repeated import repetitions

GPT2 = {"source": "hf:HuggingFaceFW/fineweb-edu", "config": "sample-100BT"}


def write_text(directory: Path, settings: dict[str, Any] = GPT2, vocabulary: int = 50257) -> Path:
    """A dataset without shards."""
    directory.mkdir()
    Manifest("gpt2", vocabulary, 50256, dict(settings), ()).save(directory)
    return directory


def write_run(place: Path, recipe: str = "paper-medium", done: int | None = None, **changes: Any) -> Path:
    """A run as `grape train` leaves it; names are dotted with __."""
    config = load(recipe, {name.replace("__", "."): value for name, value in changes.items()})
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(config.to_yaml())
    manifest = Path(config.data.source, "manifest.json")
    digest = sha256(manifest.read_bytes()).hexdigest()[:16] if manifest.is_file() else "of nothing"
    (place / "environment.json").write_text(json.dumps({"data": {"manifest": digest}}))
    steps = config.train.steps if done is None else done
    found: list[dict[str, Any]] = [
        {"kind": "train", "step": s, "loss": 3 + 100 / s} for s in range(steps // 4, steps + 1, steps // 4)
    ]
    found += [{"kind": "validation", "step": steps, "loss": 3.25}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return place


def write_scores(place: Path, by: float = 0.0, **changes: Any) -> None:
    """The published scores of medium rope as acc, `by` points higher; acc_norm (not of WinoGrande) 1 above."""
    tasks = {
        task: TaskScore(
            (score + by) / 100, None if task == "winogrande" else (score + by + 1) / 100, 0.01, 0.01,
            paper.published()["questions"][task],
        )
        for task, score in paper.rows()[0].scores.items()
    }  # fmt: skip
    tasks["own"] = TaskScore(0.0, 0.0, 0.01, 0.01, 10)  # no part of the average
    values = {"checkpoint": "x", "encoding": "rope", "shots": 0, "limit": None, "tasks": tasks, **changes}
    Scores(**values).save(place / "lm_eval.json")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


# ---- what is published


def test_published_scores_are_shares_of_whole_questions() -> None:
    """A digit mistyped here would be no k of n; nor would another number of questions fit all 23 rows."""
    questions = paper.published()["questions"]
    assert list(questions) == list(PAPER_TASKS) and len(paper.rows()) == 13 + 10
    for row in paper.rows():
        for task, score in row.scores.items():
            nearest = round(score * questions[task] / 100) / questions[task] * 100
            assert score == pytest.approx(nearest, abs=0.00501), (row.name, task)
        assert row.average == pytest.approx(sum(row.scores.values()) / 7, abs=0.0075), row.name


def test_every_row_is_a_recipe_that_repeats_itself(text: Path, tmp_path: Path) -> None:
    for row in paper.rows():
        words = {"model__encoding": row.encoding, "model__kv_shift": row.kv_shift, "data__source": str(text)}
        run = write_run(tmp_path / "runs" / row.name, f"paper-{row.size}", **words)
        ([found], notes) = repetitions([run])
        assert (found.row, found.reasons, found.unchecked, notes) == (row, (), (), [])


# ---- which row, and whether it may be compared


@pytest.mark.parametrize(
    "changes, row, reasons",
    [
        ({"train__steps": 5000}, "medium-rope", ["train.steps is 5000, not 25000"]),
        ({"model__layers": 36, "model__width": 1280, "model__heads": 10}, "large-rope", []),
        ({"model__layers": 12}, "medium-rope", ["model.layers is 12, not 24"]),
        ({"model__layers": 35, "model__width": 1280, "model__heads": 10}, "large-rope", ["model.layers is 35, not 36"]),
        ({"model__encoding_options": {"base": 500000.0}}, "medium-rope",
         ["model.encoding_options is {'base': 500000.0}, not {}"]),
        ({"model__encoding_options": {"base": 10000.0}}, "medium-rope", []),
        ({"model__encoding": ["rope", "rope"], "model__hidden": 2730, "model__head_dim": 128}, "medium-rope", []),
        ({"seed": 7, "name": "mine", "train__strategy": "ddp", "train__eval_every": 50}, "medium-rope", []),
        ({"data__sequence": 2048}, "medium-rope", ["data.sequence is 2048, not 4096"]),
        ({"data__source": "builtin"}, "medium-rope", ["data.source is builtin, not HuggingFaceFW/fineweb-edu"]),
        ({"done": 20000}, "medium-rope", ["it is not finished: step 20000 of 25000"]),
    ],
)  # fmt: skip
def test_a_run_is_matched_by_its_settings(text, tmp_path, changes, row, reasons) -> None:
    """In a directory with the name of another row."""
    run = write_run(tmp_path / "large-grape-ap-kv", **{"data__source": str(text), **changes})
    ([found], _) = repetitions([run])
    assert (found.row.name, list(found.reasons)) == (row, reasons)


def test_either_source_of_the_paper_counts(text: Path, tmp_path: Path) -> None:
    where = {"data__source": str(text)}
    rate = write_run(tmp_path / "rate", train__lr=2e-3, **where)
    norm = write_run(tmp_path / "norm", model__qk_norm="after", **where)
    large = write_run(tmp_path / "large", "paper-large", train__lr=2e-3, **where)
    probe = {"model__encoding_options": {"normalize_query": True}}
    path = write_run(tmp_path / "path", model__encoding="grape-ap", **probe, **where)
    found, _ = repetitions([rate, norm, large, path])
    assert [run.variant for run in found] == [
        ("train.lr 0.002",), ("model.qk_norm after",), (), ("model.encoding_options {'normalize_query': True}",)
    ]  # fmt: skip
    assert [run.reasons for run in found] == [(), (), ("train.lr is 0.002, not 0.001",), ()]


def test_the_text_is_checked_where_it_can_be(tmp_path: Path) -> None:
    sources = {
        "other": write_text(tmp_path / "other", {"source": "files"}),
        "small": write_text(tmp_path / "small", {**GPT2, "config": "sample-10BT"}),
        "words": write_text(tmp_path / "words", GPT2, 1024),
        "adopted": write_text(tmp_path / "adopted", {"source": "adopted shards"}),
        "gone": tmp_path / "gone",
    }
    places = [write_run(tmp_path / "runs" / k, data__source=str(v)) for k, v in sources.items()]
    (tmp_path / "runs" / "gone" / "environment.json").unlink()
    found, _ = repetitions(places)
    said = {run.name: [*run.reasons, *run.unchecked] for run in found}
    assert "its text is files" in said["other"][0] and "its text is hf:" in said["small"][0]
    assert said["words"] == ["its tokenizer (gpt2) has 1024 tokens, not the 50257 of gpt2"]
    assert "adopted shards" in said["adopted"][0] and "is not here" in said["gone"][0]
    assert [run.name for run in found if run.reasons] == ["other", "small", "words"]


def test_runs_of_no_row_are_named_and_other_directories_refused(text: Path, tmp_path: Path) -> None:
    extra = write_run(
        tmp_path / "extra", model__encoding="grape-a-qk", model__kv_shift=True, data__source=str(text)
    )
    cope = write_run(tmp_path / "mine", model__encoding="cope", data__source=str(text))
    found, notes = repetitions([extra, cope])
    assert (
        found == []
        and "extra (grape-a-qk with KV-shift) repeats no row" in notes[0]
        and "mine (cope)" in notes[1]
    )
    with pytest.raises(LabError, match=r"has no config\.yaml"):
        repetitions([tmp_path])


# ---- the tables


def test_differences_to_the_published_scores(text: Path, tmp_path: Path) -> None:
    write_scores(write_run(tmp_path / "first", data__source=str(text)), by=0.5)
    found, _ = repetitions([tmp_path / "first"])
    acc, norm = lines(found[0])
    assert acc.differences() == pytest.approx(dict.fromkeys(PAPER_TASKS, 0.5) | {"average": 0.5}, abs=0.006)
    assert norm.differences()["sciq"] == pytest.approx(1.5) and "winogrande" not in norm.differences()
    assert norm.differences()["average"] == pytest.approx((6 * 1.5 + 0.5) / 7, abs=0.006)
    assert (
        headline(found)
        == "1 of the paper's 23 rows repeated; 0 with only runs that are not comparable; 22 not run."
    )
    written = paper_table("medium", found).markdown()
    assert "| `rope, first acc` | comparable | 56.86 ± 1.00 (+0.50) |" in written
    assert written.count("not run") == 12 and "| `rope, published` | – | 56.36 | 30.38 |" in written
    assert paper_table("large", found).markdown().count("not run") == 10
    stored = paper_json(found, [])["rows"][0]["runs"][0]["scores"][1]
    assert stored["metric"] == "acc_norm" and stored["accuracy"]["winogrande"] is None
    json.dumps(paper_json(found, []), allow_nan=False)


def test_what_may_not_be_compared_has_a_reason_and_no_difference(text: Path, tmp_path: Path) -> None:
    where = {"data__source": str(text)}
    write_scores(write_run(tmp_path / "short", train__steps=5000, **where))
    write_scores(write_run(tmp_path / "shots", **where), shots=5)
    few = {"arc_easy": TaskScore(0.5, 0.5, 0.1, 0.1, 100), "own": TaskScore(0.25, 0.5, 0.1, 0.1, 100)}
    write_scores(write_run(tmp_path / "few", **where), tasks=few, limit=100)
    write_scores(write_run(tmp_path / "local", **where), tasks={"own": few["own"]})
    write_run(tmp_path / "bare", **where)
    found, notes = repetitions([tmp_path / name for name in ("short", "shots", "few", "local", "bare")])
    assert not any(line.differences() for run in found for line in lines(run))
    said = paper_markdown(found, notes)
    for part in (
        "short: not comparable: train.steps is 5000, not 25000.",
        "shots: not comparable: 5 shots, not 0.",
        "few: not comparable: arc_easy: 100 questions, not 2376; arc_challenge: no questions, not 1172;",
        "bare: not scored; grape eval lm",
        "| `rope, bare` | not scored | – | – | – | – | – | – | – | – | – |",
        "| Avg. | own |",
        "local: not comparable: none of the paper's tasks.",
    ):
        assert part in said, part
    assert "0 of the paper's 23 rows repeated; 1 with only runs that are not comparable; 22 not run." in said


# ---- the command


def test_the_page_has_both_tables_and_the_curves(text: Path, tmp_path: Path, capsys) -> None:
    write_scores(write_run(tmp_path / "one", data__source=str(text)))
    other = write_run(
        tmp_path / "two", "paper-large", model__encoding="fox", model__kv_shift=True, data__source=str(text)
    )
    runs = [str(tmp_path / "one"), str(other)]
    assert main(["report", "--paper", *runs, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for part in (
        "table-paper-medium",
        "table-paper-large",
        "training-medium",
        "validation-large",
        "53.46",
        "+0.00",
    ):
        assert part in page, part
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    curve = figures["training-large"]["views"][0]["data"][0]
    assert curve["name"] == "fox+kv" and len(curve["x"]) == 4 and min(curve["y"]) == pytest.approx(3.004)
    assert main(["report", "--paper", *runs, "--markdown"]) == 0
    assert "| `fox+kv, two` |" in capsys.readouterr().out
    assert main(["report", "--paper", *runs, "--out", str(tmp_path / "page.html"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 23
    assert main(["report", "--paper", *runs, "--jsonl", "x"]) == 2


def test_the_page_is_drawn_and_fits_narrow_and_wide(text: Path, tmp_path: Path) -> None:
    require_browser()
    from selenium.webdriver.support.wait import WebDriverWait

    for size in ("medium", "large"):
        write_scores(write_run(tmp_path / size, f"paper-{size}", data__source=str(text)))
    out = tmp_path / "page.html"
    assert (
        main(["report", "--paper", str(tmp_path / "medium"), str(tmp_path / "large"), "--out", str(out)]) == 0
    )
    drawn = "[...document.querySelectorAll('.plot')].filter((p) => p.querySelector('.scatterlayer .trace'))"
    curves = f"return {drawn}.length"
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    with open_browser(tmp_path / "profile") as window:
        for width, height in ((1280, 4000), (400, 8000)):
            set_screen(window, width, height, "light")
            window.get(out.as_uri())
            WebDriverWait(window, 60).until(lambda window: window.execute_script(curves) == 4)
            assert window.execute_script(overflow) <= 0
        assert [each for each in window.get_log("browser") if each["level"] in ("SEVERE", "WARNING")] == []
