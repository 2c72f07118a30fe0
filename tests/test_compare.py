"""Comparing encodings: what is compared, that it can be interrupted anywhere, that it is fair."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_cases import in_a_child
from grape_pe.cli import main
from grape_pe.lab.compare.arms import Arm
from grape_pe.lab.compare.comparison import jobs, join_directory, load_comparison
from grape_pe.lab.compare.engines import Resources
from grape_pe.lab.compare.job import run_job
from grape_pe.lab.compare.run import compare
from grape_pe.lab.compare.worker import find
from grape_pe.lab.config import flat, load
from grape_pe.lab.errors import LabError
from grape_pe.lab.files import write_json
from grape_pe.lab.report import read_results, table
from grape_pe.lab.train.optimization import initialise
from grape_pe.lab.written import split_names
from grape_pe.models import Decoder

TINY = {
    "model.width": 32, "model.layers": 1, "model.heads": 2, "data.sequence": 32, "train.steps": 6,
    "train.warmup": 1, "train.batch": 2, "train.eval_sequences": 4, "train.eval_every": 3,
    "train.checkpoint_every": 2, "log.tensorboard": False, "data.tokenizer": "bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small prepared dataset."""
    from grape_pe.lab.data import open_source, prepare

    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        words = [f"word{(number * 7 + i * i) % 23}" for i in range(120)]
        (text / f"{number:02d}.txt").write_text(" ".join(words))
    prepare(open_source([str(text)]), folder / "data", tokenizer="bytes", workers=1, validation=0.05)
    return folder / "data"


def tiny(corpus: Path, **more):
    settings = {**TINY, "data.source": str(corpus), **more.pop("settings", {})}
    return load_comparison("demo", overrides=settings, **more).model_copy(update={"evaluation_tokens": 512})


def losses(root: Path) -> list[tuple[str, int, float, object]]:
    """What the final table is made of, without times."""
    found = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    rest = ("extrapolation", "budgets", "lr", "sweep")
    return [(each["label"], each["seed"], each["val_loss"], [each[k] for k in rest]) for each in found]


def test_a_comparison_ends_with_a_table_and_a_report(corpus, tmp_path):
    comparison = tiny(corpus, arms=["rope", "grape-ap+kv"], seeds=2)
    report = compare(comparison, tmp_path / "out", quiet=True)
    assert report.stat().st_size > 100_000
    said = table(read_results([tmp_path / "out"]))
    assert "rope" in said and "grape-ap+kv" in said
    done = losses(tmp_path / "out")
    assert [(label, seed) for label, seed, *_ in done] == [
        ("rope", 0), ("grape-ap+kv", 0), ("rope", 1), ("grape-ap+kv", 1),
    ]  # fmt: skip
    assert all(loss is not None and 1 < loss < 8 for _, _, loss, _ in done)
    again = losses(tmp_path / "out")
    compare(tiny(corpus, arms=["rope", "grape-ap+kv"], seeds=2), tmp_path / "out", quiet=True)
    assert losses(tmp_path / "out") == again


def test_arms_share_everything_but_their_encoding():
    config = load("small")
    ours, theirs = (flat(Arm.parse(label).applied(config, 3)) for label in ("rope", "fox+kv"))
    assert {name for name in ours if ours[name] != theirs[name]} == {"model.encoding", "model.kv_shift"}
    first, second = (
        Decoder(Arm.parse(label).applied(config, 3).model.decoder(64)) for label in ("rope", "grape-ap+kv")
    )
    for model in (first, second):
        initialise(model, 3)
    weights = first.state_dict()
    shared = [name for name, t in second.state_dict().items() if name in weights and "encoding" not in name]
    assert len(shared) > 10
    assert all(torch.equal(weights[name], second.state_dict()[name]) for name in shared)


def test_seeds_come_one_after_the_other():
    order = [(job.seed, job.arm.label) for job in jobs(load_comparison("small", arms=["rope", "fox"]))]
    assert order == [(0, "rope"), (0, "fox"), (1, "rope"), (1, "fox"), (2, "rope"), (2, "fox")]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"name": "demmo"}, "did you mean demo"),
        ({"name": "demo", "arms": ["grap-ap"]}, "grape-ap"),
        ({"name": "demo", "tasks": ["flipflop"]}, "flip-flop"),
        ({"name": "demo", "arms": []}, "arms"),
        ({"name": "demo", "overrides": {"train.stepz": 3}}, "train.steps"),
        (
            {"name": "demo", "arms": ["rope", "fox", "rope"]},
            "encodings must differ, got rope twice; name each once",
        ),
        ({"name": "demo", "tasks": ["copy", "copy"]}, "tasks must differ, got copy twice; name each once"),
        ({"name": "demo", "overrides": {"probe.train.steps": 99}}, "no effect without a task"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_said_at_once(arguments, said):
    with pytest.raises(LabError, match=said):
        load_comparison(**arguments)


def test_arms_are_written_with_their_options():
    text = "rope, fox[forget_bias=4]+kv,alibi[slopes=[0.7, 0.7, 0.7, 0.7]],alibi[slopes=0.69]"
    text += ",rope+fox[forget_bias=2]"
    arms = [Arm.parse(each) for each in split_names(text)]
    assert [(arm.encoding, arm.options, arm.kv_shift) for arm in arms] == [
        ("rope", {}, False), ("fox", {"forget_bias": 4}, True), ("alibi", {"slopes": [0.7] * 4}, False),
        ("alibi", {"slopes": 0.69}, False), ("rope+fox", {"forget_bias": 2}, False),
    ]  # fmt: skip
    comparison = load_comparison("demo", arms=split_names(text))
    labels = [job.directory(Path("out")).name for job in jobs(comparison)]
    assert labels[1] == "fox[forget_bias=4]+kv-s0"
    configs = [job.config(comparison).model for job in jobs(comparison)]
    assert configs[1].encoding_options == {"forget_bias": 4} and configs[1].kv_shift
    same = configs[3].decoder(64).build_encoding()
    assert same.slopes.tolist() == pytest.approx([0.69] * 4)  # the same slope in every head


def test_arms_have_encodings_by_layer(corpus, tmp_path):
    arm = Arm.parse("[grape-m@w16,grape-a-qk]+kv")
    assert arm.encoding == ["grape-m@w16", "grape-a-qk"] and arm.kv_shift
    assert arm == Arm(encoding=["grape-m@w16", "grape-a-qk"], kv_shift=True)
    assert split_names("rope,[grape-m@w16,grape-a-qk]") == ["rope", "[grape-m@w16,grape-a-qk]"]
    mixed = {"label": "mixed", "encoding": ["rope", "alibi"], "model": {"window": [8, None]}}
    comparison = tiny(corpus, arms=["[rope@w16,fox]", mixed], settings={"model.layers": 2})
    config = next(iter(jobs(comparison))).config(comparison).model.decoder(64)
    assert [(each.encoding, each.window) for each in config.by_layer] == [("rope", 16), ("fox", None)]
    compare(comparison, tmp_path / "out", quiet=True)
    assert [label for label, *_ in losses(tmp_path / "out")] == ["[rope@w16,fox]", "mixed"]
    assert "[rope@w16,fox]" in table(read_results([tmp_path / "out"]))


def test_a_comparison_prints_its_note_and_shipped_results(corpus, tmp_path, monkeypatch, capsys):
    shipped = Path(__file__).parent.parent / "docs" / "assets" / "results-small.jsonl"
    monkeypatch.setattr(
        "grape_pe.lab.report.reading.shipped_evidence", lambda name: shipped if name else None
    )
    settings = [x for key, value in {**TINY, "data.source": corpus}.items() for x in (f"--{key}", str(value))]
    assert main(["compare", "demo", "--encodings", "rope", "--out", str(tmp_path / "out"), *settings]) == 0
    printed = capsys.readouterr().out
    assert "How little this shows" in printed
    assert "Shipped results of grape compare results-small" in printed and "grape-a-qk" in printed
    page = (tmp_path / "out/report.html").read_text()
    assert "How little this shows" in page and 'id="table-shipped"' in page
    assert main(["report", str(tmp_path / "out")]) == 0 and "Shipped results" in capsys.readouterr().out


def test_arms_in_files_set_more_than_the_encoding(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nrecipe: demo\narms: [rope, {label: slow, encoding: fox, options: {forget_bias: 4}, "
        "train: {lr: 0.001}, model: {qk_norm: false}}]\n"
    )
    comparison = load_comparison(str(tmp_path / "mine.yaml"))
    rope, slow = (flat(job.config(comparison)) for job in jobs(comparison))
    changed = {name for name in rope if rope[name] != slow[name]}
    assert changed == {"model.encoding", "model.encoding_options", "model.qk_norm", "train.lr"}
    assert comparison.arms[1].label == "slow" and slow["train.lr"] == 0.001


@pytest.mark.parametrize(
    "arm, said",
    [
        ("fox[forget_bias=4", "options go in brackets after the whole name"),
        ("fox[forget_bias=4]+rope", "options go in brackets after the whole name"),
        ("fox[forget_bias]", "write name=value"),
        ("fox[forget_bais=4]", "forget_bias"),
        ({"label": "a/b", "encoding": "fox"}, "without / or a leading dot"),
        (
            {"label": "a", "encoding": "fox", "train": {"lrr": 1}},
            "a: unknown setting 'train.lrr'; did you mean train.lr",
        ),
        ({"label": "rope", "encoding": "fox"}, "encodings must differ, got rope twice"),
    ],
    ids=str,
)
def test_arms_that_cannot_be_read_are_refused(arm, said):
    with pytest.raises(LabError) as refused:
        load_comparison("demo", arms=["rope", arm])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_label_stands_for_one_arm(tmp_path):
    slow = Arm(label="mine", encoding="fox", options={"forget_bias": 4})
    join_directory(tmp_path, load_comparison("demo", arms=["rope", slow]), Resources(1, 0))
    again = join_directory(tmp_path, load_comparison("demo", arms=[slow, "alibi"]), Resources(1, 0))
    assert [arm.label for arm in again.arms] == ["rope", "mine", "alibi"]
    with pytest.raises(LabError, match="has another arm 'mine'; choose another label for this one"):
        join_directory(
            tmp_path, load_comparison("demo", arms=[Arm(label="mine", encoding="rope")]), Resources(1, 0)
        )


def test_settings_reach_what_is_trained():
    """Where only probes are trained, settings are theirs; beside text they are named with probe. before."""
    probes = load_comparison("flip-flop", overrides={"train.steps": 10000})
    assert {job.config(probes).train.steps for job in jobs(probes)} == {10000}
    both = {"train.steps": 700, "probe.train.steps": 300}
    mixed = load_comparison("demo", tasks=["copy"], overrides=both)
    assert {job.task: job.config(mixed).train.steps for job in jobs(mixed)} == {None: 700, "copy": 300}


def test_settings_of_probes_on_the_command_line(tmp_path, monkeypatch, capsys):
    told = []

    def caught(comparison, *_args, **_more):
        told.append(comparison)
        raise LabError("enough")

    monkeypatch.setattr("grape_pe.lab.compare.run.compare", caught)
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", "flip-flop", "--train.steps", "10000", *out]) == 2
    assert main(["compare", "demo", "--tasks", "copy", "--probe.train.steps", "300", *out]) == 2
    assert [each.probe.train.steps for each in told] == [10000, 300]
    assert main(["compare", "demo", "--encodings", "rope,rope", *out]) == 2
    assert "encodings must differ, got rope twice" in capsys.readouterr().err and len(told) == 2


def test_a_second_comparison_in_one_directory_waits_its_turn(corpus, tmp_path, capsys):
    with (
        locked_directory(tmp_path / "out"),
        pytest.raises(LabError, match="being written by another process"),
    ):
        compare(tiny(corpus, arms=["rope"]), tmp_path / "out", quiet=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def locked_directory(path: Path):
    from grape_pe.lab.files import locked

    path.mkdir()
    return locked(path)


def test_the_evaluation_runs_where_the_model_trains(monkeypatch, tmp_path):
    """The model goes to the device of the process; here one that computes nothing."""
    model = Decoder(load("demo").model.decoder(64))
    seen = []
    monkeypatch.setattr("grape_pe.lab.compare.job.train", lambda *_args, **_more: SimpleNamespace(signal=0))
    monkeypatch.setattr("grape_pe.lab.compare.job.load_model", lambda _: model)
    monkeypatch.setattr("grape_pe.lab.compare.job.default_device", lambda: torch.device("meta"))
    scored = lambda model, task, **_: seen.append(model.head.device.type) or []  # noqa: E731
    monkeypatch.setattr("grape_pe.lab.compare.job.score", scored)
    comparison = load_comparison("flip-flop")
    assert run_job(next(iter(jobs(comparison))), comparison, tmp_path) == 0
    assert seen == ["meta"]


def test_other_settings_in_one_directory_are_refused(corpus, tmp_path):
    compare(tiny(corpus, arms=["rope"]), tmp_path / "out", quiet=True)
    before = losses(tmp_path / "out")
    with pytest.raises(LabError, match="recipe"):
        compare(tiny(corpus, arms=["rope"], settings={"train.lr": 1e-4}), tmp_path / "out", quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(LabError, match=r"holds thesis\.txt and is not a comparison"):
        compare(tiny(corpus, arms=["rope"]), tmp_path / "mine", quiet=True)
    assert losses(tmp_path / "out") == before
    compare(tiny(corpus, arms=["alibi"]), tmp_path / "out", quiet=True)  # an arm may be added
    assert {label for label, *_ in losses(tmp_path / "out")} == {"rope", "alibi"}


def test_a_run_that_diverges_is_reported_as_such(corpus, tmp_path):
    wild = {"train.lr": 1e18, "train.min_lr": 0.0, "train.clip": 0.0}
    compare(tiny(corpus, arms=["rope"], settings=wild), tmp_path / "out", quiet=True)
    assert losses_or_none(tmp_path / "out") == [None]
    assert (tmp_path / "out" / "report.html").is_file()


def losses_or_none(root: Path) -> list[float | None]:
    return [json.loads(line)["val_loss"] for line in (root / "results.jsonl").read_text().splitlines()]


def test_a_probe_is_trained_and_scored(tmp_path):
    comparison = load_comparison("probes", arms=["alibi"], tasks=["copy"])
    shorter = load({"base": "probe", "train": {"steps": 4, "warmup": 1, "checkpoint_every": 2, "batch": 2}})
    compare(comparison.model_copy(update={"probe": shorter, "task_samples": 2}), tmp_path / "out", quiet=True)
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["task"] == "copy" and len({score["length"] for score in found["scores"]}) == 5


def _measured(works, *_):
    """In the place of the runs: their results alone."""
    for work in works:
        root = Path(work.arguments[2])
        _, job = find(root, work.name)
        place = job.directory(root) / "evaluation.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, {"label": job.arm.label, "seed": job.seed, "val_loss": job.trial or 1.0})


def _compare_and_die(comparison, out: Path, moment: int) -> None:
    """In a child process: SIGKILL at the so-many-th of the calls that touch the disk for good."""
    left = moment

    def deadly(real):
        def call(*arguments, **more):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return call

    for name in ("replace", "fsync"):
        setattr(os, name, deadly(getattr(os, name)))
    compare(comparison, out, quiet=True)
    os._exit(0)


def test_killed_at_each_single_moment_of_its_own_files(corpus, tmp_path, monkeypatch):
    """A file that a kill leaves half written (it was compare.json) keeps nobody from going on."""
    monkeypatch.setattr("grape_pe.lab.compare.run.run_side_by_side", _measured)
    monkeypatch.setattr("grape_pe.lab.compare.run.write_report", lambda _, out: out)
    comparison = tiny(corpus, arms=["rope", "fox"], sweep=[1e-3, 2e-3])
    compare(comparison, tmp_path / "whole", quiet=True)
    whole = (tmp_path / "whole/results.jsonl").read_text()
    for moment in range(1, 99):
        out = tmp_path / f"broken{moment}"
        code = in_a_child(_compare_and_die, comparison, out, moment)
        compare(comparison, out, quiet=True)
        assert (out / "results.jsonl").read_text() == whole
        if code == 0:
            break
    assert moment > 15


def command(corpus: Path, out: Path) -> list[str]:
    settings = {**TINY, "data.source": str(corpus), "train.steps": 20}
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    start = [sys.executable, "-m", "grape_pe.cli", "compare", "demo", "--encodings", "rope,fox"]
    return [*start, "--jobs", "2", "--quiet", "--out", str(out), *options]


SWEPT = ["--sweep", "train.lr=1e-3,1e-2", "--budgets", "640,1280", "--train.schedule", "wsd"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], SWEPT], ids=["plain", "sweep and budgets"])
def test_killed_at_any_moment_it_ends_with_the_same_table(corpus, tmp_path, more):
    subprocess.run(command(corpus, tmp_path / "whole") + more, check=True, capture_output=True)
    dice = random.Random(0)
    for _ in range(8):
        running = subprocess.Popen(
            command(corpus, tmp_path / "killed") + more,
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(dice.uniform(3.0, 14.0))
        os.kill(running.pid, signal.SIGKILL)  # its workers die with it
        running.wait()
        time.sleep(0.5)
    subprocess.run(command(corpus, tmp_path / "killed") + more, check=True, capture_output=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
