"""`grape eval lm`: real lm_eval, offline, on local task files and a tiny model."""

import json
import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grape_pe.cli import main
from grape_pe.hf import GrapeConfig, GrapeForCausalLM
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate import benchmarks as lab
from grape_pe.lab.train.distributed import World

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
{more}
"""
NORM = """  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"question": f"{i} and one is", "choices": [f" {i + 1}", " a longer answer"], "answer": 0}
        for i in range(6)
    ]
    data = tmp_path / "test.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, more in (("small_both", NORM), ("small_acc", "")):
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data, more=more))
    return tmp_path


def tokenizer():
    letters = {chr(i): i - 31 for i in range(32, 127)} | {"<pad>": 0}
    letters |= {
        c: len(letters) + i
        for i, c in enumerate(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters)))
    }
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<pad>")


def model(encoding="rope+fox"):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": len(tokenizer()),
    }
    return GrapeForCausalLM(GrapeConfig(**sizes, encoding=encoding, pad_token_id=0, eos_token_id=0)).eval()


def command(checkpoint, *more, **given):
    """`grape eval lm`, and its exit code."""
    words = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return main(["eval", "lm", str(checkpoint), *words, *more])


def test_command_on_local_tasks(offline, capsys):
    model().save_pretrained(offline / "m")
    tokenizer().save_pretrained(offline / "m")
    where = {"include": offline / "tasks", "output": offline / "out.json"}
    assert command(offline / "m", tasks="small_both,small_acc", **where) == 0
    table = capsys.readouterr().out
    assert "small_both" in table and "Avg." in table and "acc_norm" in table
    saved = json.loads((offline / "out.json").read_text())
    assert saved["encoding"] == "rope+fox" and saved["tasks"]["small_both"]["samples"] == 6
    assert saved["tasks"]["small_acc"]["acc_norm"] is None


def test_json_is_what_is_saved(offline, capsys):
    model().save_pretrained(offline / "m")
    tokenizer().save_pretrained(offline / "m")
    where = {"include": offline / "tasks", "output": offline / "out.json"}
    assert command(offline / "m", "--json", tasks="small_acc", limit=2, **where) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == json.loads((offline / "out.json").read_text())
    assert said["tasks"]["small_acc"]["samples"] == 2


def test_scores_are_the_models(offline):
    """Against log-likelihoods computed here: the shorter answer's, the longer one's, by hand."""
    net, words = model(), tokenizer()
    scores = lab.evaluate(net, words, ["small_both"], include=offline / "tasks")
    right = normed = 0
    for i in range(6):
        likes, sizes = [], []
        for choice in (f" {i + 1}", " a longer answer"):
            prompt, answer = words(f"{i} and one is").input_ids, words(choice).input_ids
            with torch.no_grad():
                logp = net(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            likes.append(sum(logp[len(prompt) - 1 + n, t].item() for n, t in enumerate(answer)))
            sizes.append(len(choice))
        right += likes[0] > likes[1]
        normed += likes[0] / sizes[0] > likes[1] / sizes[1]
    assert scores.tasks["small_both"].acc == pytest.approx(right / 6)
    found = scores.tasks["small_both"]
    assert found.acc_norm == pytest.approx(normed / 6)
    assert found.acc_stderr == pytest.approx((right / 6 * (1 - right / 6) / 5) ** 0.5)
    assert found.acc_norm_stderr == pytest.approx((normed / 6 * (1 - normed / 6) / 5) ** 0.5)


def test_the_model_goes_to_the_gpu(offline, monkeypatch):
    """Here to a device that computes nothing, in its place."""
    model().save_pretrained(offline / "m")
    tokenizer().save_pretrained(offline / "m")
    monkeypatch.setattr(lab, "default_device", lambda: torch.device("meta"))
    assert lab.load_checkpoint(str(offline / "m"))[0].device.type == "meta"


def test_paper_table():
    one = lab.TaskScore(0.5, 0.6, 0.16, None, 10)
    scores = lab.Scores(
        "m",
        "rope",
        0,
        None,
        dict.fromkeys(lab.PAPER_TASKS, one) | {"winogrande": lab.TaskScore(0.4, None, None, None, 9)},
    )
    lines = scores.table().splitlines()
    assert "50.00 ± 16.00" in lines[1]
    assert lines[0].split() == [*lab.PAPER_TASKS.values(), "Avg."]
    assert scores.average("acc") == pytest.approx((6 * 0.5 + 0.4) / 7)
    assert scores.average("acc_norm") == pytest.approx((6 * 0.6 + 0.4) / 7)
    assert "57.14" in lines[2] and "-" in lines[2]


def test_mistakes_are_said_in_one_line(offline, capsys):
    model().save_pretrained(offline / "m")
    tokenizer().save_pretrained(offline / "m")
    for given, says in (
        ({"checkpoint": offline / "none"}, "cannot load"),
        ({"checkpoint": offline / "m", "tasks": ","}, "--tasks must name at least one"),
        ({"checkpoint": offline / "m", "include": offline / "none"}, "must be a directory"),
    ):
        assert command(**given) == 2
        assert says in capsys.readouterr().err


def test_unknown_tasks_name_their_neighbours():
    with pytest.raises(lab.EvaluationError, match="did you mean arc_easy"):
        lab._check_tasks(["arc_esay"], list(lab.PAPER_TASKS))


def test_its_errors_are_the_labs():
    """So that the command line shows them as one line."""
    assert issubclass(lab.EvaluationError, LabError)


def test_missing_lm_eval_gives_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'grape-pe\[eval\]'"):
        lab.evaluate(model(), tokenizer())


QUESTIONS = {
    "arc_easy": {
        "question": "Which is largest?",
        "choices": {"text": ["sun", "ant"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "arc_challenge": {"question": "Which?", "choices": {"text": ["sun", "ant"], "label": ["A", "B"]}, "answerKey": "B"},
    "openbookqa": {"question_stem": "Fog is around", "choices": {"text": ["a marsh", "a desert"], "label": ["A", "B"]},
                   "answerKey": "A"},
    "hellaswag": {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "endings": ["stands.", "sings."],
                  "label": "0"},
    "piqa": {"goal": "Boil water.", "sol1": "heat it", "sol2": "freeze it", "label": 0},
    "winogrande": {"sentence": "Ann saw Bea because _ looked.", "option1": "Ann", "option2": "Bea", "answer": "1"},
    "sciq": {"support": "", "question": "Who?", "distractor1": "a", "distractor2": "b", "distractor3": "c",
             "correct_answer": "d"},
}  # fmt: skip


def test_the_seven_tasks_run_on_local_questions(offline, capsys):
    data = offline / "questions"
    data.mkdir()
    for name, row in QUESTIONS.items():
        (data / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    model().save_pretrained(offline / "model")
    tokenizer().save_pretrained(offline / "model")
    assert main(["eval", "lm", str(offline / "model"), "--data", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["tasks"]) == list(lab.PAPER_TASKS)
    for name, score in found["tasks"].items():
        assert score["samples"] == 3 and score["acc"] in (0.0, 1.0)
        assert (score["acc_norm"] is None) == (name == "winogrande")


@pytest.mark.parametrize("rows, said", [(None, "no questions of piqa"), ({"goal": "x"}, "sol1 is missing")])
def test_questions_that_do_not_fit_are_refused_before_the_model_is_loaded(tmp_path, capsys, rows, said):
    if rows is not None:
        (tmp_path / "piqa.jsonl").write_text(json.dumps(rows) + "\n")
    assert main(["eval", "lm", str(tmp_path / "no-model"), "--data", str(tmp_path), "--tasks", "piqa"]) == 2
    assert said in capsys.readouterr().err


class OneOf(World):
    """A rank whose companions' answers are given."""

    def gathered(self, value):
        return [value, *self.others]


def test_requests_are_shared_by_document_and_come_back_in_order():
    requests = [
        SimpleNamespace(task_name=task, doc_id=doc, text=f"{task} {doc} {choice}")
        for task, doc, choice in product(("one", "two"), range(5), range(3))
    ]
    shares = [lab._own(requests, World(rank, 4)) for rank in range(4)]
    assert sorted(i for share in shares for i in share) == list(range(30))
    assert all(len(share) % 3 == 0 and len(share) >= 6 for share in shares)  # whole documents

    def answer(given, disable_tqdm):
        return [each.text for each in given]

    first = OneOf(0, 4)
    first.others = [[(i, requests[i].text) for i in share] for share in shares[1:]]
    assert lab._shared(answer, first)(requests) == [each.text for each in requests]
    alone = lab._own(requests[:2], World(1, 4))
    assert alone == []  # a rank without requests asks its model nothing


@pytest.mark.slow
def test_two_ranks_under_torchrun_give_the_scores_of_one(offline, capsys):
    """Seven questions whose right answers differ; with one question, the second rank has none."""
    rows = [
        {"question": f"{i} and {i} is", "choices": [f" {i}", f" {2 * i} or so", " 7"], "answer": i % 3}
        for i in range(7)
    ]
    (offline / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    model().save_pretrained(offline / "m")
    tokenizer().save_pretrained(offline / "m")
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "grape_pe.cli"]
    where = ["--include", str(offline / "tasks"), "--batch-size", "2"]
    for tasks, more in (("small_both,small_acc", []), ("small_both", ["--limit", "1"])):
        words = ["eval", "lm", str(offline / "m"), *where, "--tasks", tasks, *more]
        assert main([*words, "--output", str(offline / "one.json"), "--json"]) == 0
        said = capsys.readouterr().out.splitlines()[-1]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *words, "--output", str(offline / "two.json"), "--json"],
            capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stdout.splitlines() if line.startswith("{")] == [said]
        assert (offline / "two.json").read_text() == (offline / "one.json").read_text()
