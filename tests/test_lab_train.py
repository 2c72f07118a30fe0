"""The trainer's options: each does what it says, and those for speed or memory change no result."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("pydantic")

from grape_pe.lab.config import load
from grape_pe.lab.errors import Diverged
from grape_pe.lab.progress import ProgressLine
from grape_pe.lab.train.distributed import World
from grape_pe.lab.train.encoding_metrics import encoding_summary
from grape_pe.lab.train.feed import open_feed, vocabulary
from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.optimization import initialise, learning_rate
from grape_pe.lab.train.run_directory import latest_metrics
from grape_pe.lab.train.signals import StopSignals
from grape_pe.lab.train.trainer import Trainer, train
from grape_pe.models import Decoder, load_decoder
from lab_runs import tiny_config, tiny_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def usual(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return curve(data, tmp_path_factory.mktemp("usual"))


def curve(data: Path | str, out: Path, **changes: Any) -> list[float]:
    """Training losses, then validation losses, of six steps."""
    sizes = {"train__steps": 6, "train__checkpoint_every": 0, "train__eval_every": 3, **changes}
    config = tiny_config(data, model__encoding="grape-ap", **sizes)
    train(config, out / "run", quiet=True)
    lines = read_metrics(out / "run")
    return [line["loss"] for kind in ("train", "validation") for line in lines if line["kind"] == kind]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep memory")
def test_freed_memory_is_given_back_after_a_run():
    """Megabytes beyond the start: within the run, after it, and after the same work again."""
    code = """
import os, torch
from grape_pe.lab.train.memory import freed_memory_kept
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
def work():
    parts = [torch.ones(25 << 20) for _ in range(3)]
work()
start = resident()
with freed_memory_kept():
    work()
    found = [resident() - start]
found.append(resident() - start)
work()
print(*found, resident() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, after, again = map(int, done.stdout.split())
    assert kept > 200 and after < 30 and again < 30


def test_losses_are_those_of_a_plain_loop(data: Path, usual: list[float]) -> None:
    """Everything by hand: AdamW, clipping, the rate of each step, the mean over predicted tokens."""
    config = tiny_config(data, model__encoding="grape-ap", train__steps=6)
    batches = open_feed(config, World()).batches
    model = Decoder(config.model.decoder(batches.vocab_size))
    initialise(model, config.seed)
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found = []
    for step in range(6):
        part = batches.batch(step, range(4))
        logits = model(part.tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert usual[:6] == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("micro", [1, 2])
def test_accumulation_is_the_whole_batch(micro: int, data: Path, usual: list[float], tmp_path: Path) -> None:
    assert curve(data, tmp_path, train__micro_batch=micro) == pytest.approx(usual, abs=1e-5)


def test_recomputing_activations_changes_nothing(data: Path, usual: list[float], tmp_path: Path) -> None:
    assert curve(data, tmp_path, train__recompute=True) == pytest.approx(usual, abs=1e-6)


def test_bf16_learns_about_the_same(data: Path, usual: list[float], tmp_path: Path) -> None:
    found = curve(data, tmp_path, train__precision="bf16")
    assert found != usual and found == pytest.approx(usual, abs=0.05)
    weights = load_decoder(tmp_path / "run/final").state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_wsd_trains_by_its_schedule(data: Path, tmp_path: Path) -> None:
    curve(data, tmp_path, train__schedule="wsd", train__decay=0.5)
    rates = [line["lr"] for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 7e-4, 4e-4])


def test_documents_do_not_see_each_other(data: Path, usual: list[float], tmp_path: Path) -> None:
    """With short documents the first loss is the mean over pieces, each attended by itself."""
    assert curve(data, tmp_path, data__documents=True, data__sequence=128) != usual
    config = tiny_config(data, data__documents=True, data__sequence=128, model__encoding="grape-ap")
    batches = open_feed(config, World()).batches
    model = Decoder(config.model.decoder(batches.vocab_size))
    initialise(model, 0)
    part = next(p for p in (batches.batch(s, range(1)) for s in range(50)) if p.documents.max() > 0)
    whole = model(part.tokens, targets=part.targets, documents=part.documents)
    summed, count = 0.0, 0
    for number in range(int(part.documents.max()) + 1):
        inside = part.documents[0] == number
        predicted = int((part.targets[:, inside] >= 0).sum())
        if predicted:
            summed += model(part.tokens[:, inside], targets=part.targets[:, inside]).item() * predicted
            count += predicted
    assert whole.item() == pytest.approx(summed / count, abs=1e-5)


def test_a_task_is_a_source(tmp_path: Path) -> None:
    found = curve("task:flip-flop", tmp_path, data__task_options={"length": 16})
    assert len(found) == 8 and all(loss > 0 for loss in found)
    assert not (tmp_path / "run/final/tokenizer.json").exists()
    assert load_decoder(tmp_path / "run/final").config.vocab_size % 64 == 0


def test_an_outcome_says_how_it_went(data: Path, tmp_path: Path) -> None:
    outcome = train(tiny_config(data, train__steps=4), tmp_path / "run", quiet=True)
    lines = read_metrics(tmp_path / "run")
    validation = [line["loss"] for line in lines if line["kind"] == "validation"]
    assert (outcome.step, outcome.signal) == (4, 0)
    assert outcome.validation_loss == validation[-1] and outcome.best_loss == min(validation)
    assert outcome.tokens_per_second > 0 and outcome.peak_memory_bytes > 1e6
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["tokens"] == 4 * 4 * 32 and last["mfu"] is None


def test_what_a_run_leaves_behind(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, train__steps=4, seed=5, log__tensorboard=True)
    train(config, tmp_path / "run", quiet=True)
    assert load(tmp_path / "run/config.yaml") == config
    said = json.loads((tmp_path / "run/environment.json").read_text())
    assert said["seed"] == 5 and said["versions"]["torch"] == torch.__version__
    assert {"command", "started", "machine", "data"} <= said.keys()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "config.yaml", "environment.json", "metrics.jsonl", "checkpoints",
                     "tensorboard", "final"}  # fmt: skip


def test_tensorboard_has_the_numbers_of_the_file(data: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny_config(data, train__steps=4, model__encoding="rope+fox", log__tensorboard=True)
    train(config, tmp_path / "run", quiet=True)
    board = events.EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "validation/loss",
            "encoding/bias/at_1"} <= tags  # fmt: skip
    for kind in ("train", "validation"):
        filed = [(x["step"], x["loss"]) for x in read_metrics(tmp_path / "run") if x["kind"] == kind]
        shown = [(event.step, event.value) for event in board.Scalars(f"{kind}/loss")]
        assert [step for step, _ in shown] == [step for step, _ in filed]
        assert [loss for _, loss in shown] == pytest.approx([loss for _, loss in filed])


def test_metrics_every_few_steps(data: Path, tmp_path: Path) -> None:
    curve(data, tmp_path, log__every=4)
    assert [x["step"] for x in read_metrics(tmp_path / "run") if x["kind"] == "train"] == [4, 6]


def test_the_newest_line_is_found_from_the_end_of_the_file(data: Path, tmp_path: Path) -> None:
    """Also where the end that is read begins inside a line, and the last line is half written."""
    curve(data, tmp_path)
    run = tmp_path / "run"
    lines = read_metrics(run)
    for kind in ("train", "encoding"):
        assert latest_metrics(run, kind) == [line for line in lines if line["kind"] == kind][-1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 7, "lo')
    last = json.dumps(lines[-1])
    assert latest_metrics(run, lines[-1]["kind"], tail=len(last) + 60) == lines[-1]
    assert latest_metrics(run, "train", tail=40) == {} == latest_metrics(tmp_path, "train")


def test_summaries_tell_what_an_encoding_has_learned() -> None:
    """Against values set by hand: slopes, frequencies, the bias at a distance."""
    ids = torch.zeros(1, 20, dtype=torch.long)
    alibi = Decoder(load("demo", {"model.encoding": "alibi", "model.layers": 1}).model.decoder(64))
    found = encoding_summary(alibi, ids)
    slopes = [2**-2, 2**-4, 2**-6, 2**-8]
    assert found["bias/at_1"] == pytest.approx(-sum(slopes) / 4)
    assert found["bias/at_16"] == pytest.approx(-16 * sum(slopes) / 4)
    turning = Decoder(load("demo", {"model.encoding": "grape-m", "model.layers": 1}).model.decoder(64))
    before = encoding_summary(turning, ids)
    assert before["frequency/moved"] == 0
    with torch.no_grad():
        [delta] = [p for n, p in turning.named_parameters() if n.endswith("delta")]
        delta += 16 * torch.log(torch.tensor(2.0))
    after = encoding_summary(turning, ids)
    assert after["frequency/largest"] == pytest.approx(2 * before["frequency/largest"], rel=1e-6)


def test_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("demo rope", 0, 10, quiet=False)
    line.show(5, "loss 2")
    assert capsys.readouterr().err == ""  # too early for a line
    line.show(10, "loss 1", last=True)
    assert "demo rope 10/10  loss 1  0 s left" in capsys.readouterr().err


def test_the_progress_line_has_loss_validation_and_speed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(data, train__steps=4, train__eval_every=2), tmp_path / "run")
    line = capsys.readouterr().err
    assert re.search(r" 4/4  loss \d\.\d{4}  validation \d\.\d{4}  [\d,]+ tokens/s  0 s left", line), line


def test_the_time_left_after_a_resume_that_went_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs may be ahead of the checkpoint that a killed run goes on from."""
    now = [0.0]
    monkeypatch.setattr("grape_pe.lab.progress.time.monotonic", lambda: now[0])
    line = ProgressLine("4 runs", 100, 200, quiet=False)
    now[0] = 10.0
    line.show(50, "")
    now[0] = 20.0
    line.show(100, "", last=True)  # 50 steps in 10 s, 100 to go
    assert "100/200    20 s left" in capsys.readouterr().err


def test_the_vocabulary_is_known_without_preparing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grape_pe.lab.train.feed.builtin", lambda **_: pytest.fail("prepared the corpus"))
    assert vocabulary(load("small", {"data.tokenizer": "bpe-2048"})) == 2048
    assert vocabulary(load("paper-medium")) == 50304
    assert vocabulary(tiny_config(data)) == 257
    assert vocabulary(load("flip-flop")) > 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_validation_row_counts_once(ranks: int, data: Path, tmp_path: Path) -> None:
    """On any number of ranks, also more of them than rows: their parts sum up to the mean over all rows."""
    config = tiny_config(data, train__eval_sequences=3, train__batch=4)
    feed = open_feed(config, World())
    parts = [_part_of_validation(config, feed, Alone(rank, ranks), tmp_path) for rank in range(ranks)]
    rows = feed.batches.validation(range(3))
    model = Decoder(config.model.decoder(feed.batches.vocab_size))
    initialise(model, config.seed)
    with torch.no_grad():
        want = float(model(rows.tokens, targets=rows.targets))
    assert sum(count for _, count in parts) == rows.targets.numel()
    assert sum(loss for loss, _ in parts) / rows.targets.numel() == pytest.approx(want, abs=1e-5)


class Alone(World):
    """A rank that remembers what it would have added to the others' numbers."""

    def total(self, *values: float | torch.Tensor) -> list[float]:
        self.added = [float(value) for value in values]
        return self.added


def _part_of_validation(config: Any, feed: Any, rank: Alone, directory: Path) -> list[float]:
    one = Trainer(config, directory, feed, World(), quiet=True)
    one.world = rank
    one._validation_loss()
    return rank.added


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["rope", "grape-ap"])
def test_compiled_it_learns_the_same(encoding: str, data: Path, tmp_path: Path) -> None:
    sizes = {"train__steps": 4, "model__encoding": encoding}
    for name, compiled in (("plain", False), ("compiled", True)):
        train(tiny_config(data, **sizes, train__compile=compiled), tmp_path / name, quiet=True)
    plain, quick = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "compiled")
    assert [line["kind"] for line in plain] == [line["kind"] for line in quick]
    for one, other in zip(plain, quick, strict=True):
        assert other.get("loss") == pytest.approx(one.get("loss"), abs=1e-4)
        assert other.get("values") == pytest.approx(one.get("values"), abs=1e-4)


@pytest.mark.slow
def test_the_papers_medium_model_takes_a_step(tmp_path: Path) -> None:
    """353M parameters, 4,096 tokens, forward, backward and optimizer, on this processor."""
    changes = {
        "model.encoding": "grape-ap", "data.source": str(_long_data(tmp_path)), "train.batch": 1,
        "train.micro_batch": 0, "train.steps": 1, "train.warmup": 0, "train.eval_sequences": 1,
        "train.compile": False, "train.strategy": "ddp", "train.precision": "fp32", "log.tensorboard": False,
    }  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        outcome = train(load("paper-medium", changes), tmp_path / "run", quiet=True)
    finally:
        torch.set_num_threads(threads)
    [line] = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert outcome.step == 1 and 10 < line["loss"] < 12 and line["grad_norm"] > 0
    print(f"{outcome.seconds:.0f} s, {outcome.peak_memory_bytes / 1e9:.1f} GB")


def _long_data(directory: Path) -> Path:
    (directory / "long").mkdir()
    return tiny_data(directory / "long", documents=400)


def test_two_runs_of_one_name_are_two_runs_on_wandb(data: Path, tmp_path: Path, monkeypatch) -> None:
    """Directories of two comparisons end alike; a continued run keeps its id."""
    told: list[str] = []

    def init(*, id: str, **_: object) -> SimpleNamespace:
        told.append(id)
        return SimpleNamespace(log=lambda *_args, **_more: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for where, steps in (("first", 1), ("second", 1), ("first", 1)):
        config = tiny_config(data, train__steps=steps, train__warmup=0, log__wandb="x")
        train(config, tmp_path / where / "rope-s0", resume=True, quiet=True)
    assert told[0] != told[1] and told[0] == told[2]


class Reads(TorchDispatchMode):
    """Counts the numbers that Python takes from tensors: on a GPU, each would wait for the device."""

    seen = 0

    def __torch_dispatch__(self, op: Any, _types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(data: Path, tmp_path: Path) -> None:
    """But the number of targets, which the host has; the losses are read at steps that log them."""
    config = tiny_config(data, train__micro_batch=2, log__every=100)
    feed = open_feed(config, World())
    trainer = Trainer(config, tmp_path, feed, World(), quiet=True)
    for step in range(3):
        parts = [feed.batches.batch(step, rows) for rows in trainer._rows(step)]
        with Reads() as reads:
            trainer._update(step, parts, 1e-3, StopSignals())
        assert reads.seen == len(parts) == 2
    trainer._read()
    assert trainer.last.step == 2 and 0 < trainer.last.loss < 10


def test_not_a_number_stops_before_its_step_also_if_it_is_seen_later(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three more steps were queued: the weights and moments are still those before the bad one."""
    config = tiny_config(data)
    feed = open_feed(config, World())
    loss_of = Trainer._loss
    monkeypatch.setattr(
        Trainer, "_loss", lambda self, part, count: loss_of(self, part, count) * self.factor[self.at]
    )
    good, bad = (Trainer(config, tmp_path, feed, World(), quiet=True) for _ in range(2))
    for trainer, last in ((good, 4), (bad, 7)):
        trainer.factor = [1.0] * 4 + [math.nan] + [1.0] * 3
        for trainer.at in range(last):
            parts = [feed.batches.batch(trainer.at, range(4))]
            trainer._update(trainer.at, parts, 1e-3, StopSignals())
    with pytest.raises(Diverged, match="stopped at step 4: the loss is nan"):
        bad._read()
    for ours, theirs in zip(bad.decoder.parameters(), good.decoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    moments = [[s for p in t.optimizer.state.values() for s in p.values()] for t in (bad, good)]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_steps_with_a_large_gradient_are_skipped_and_recorded(data: Path, tmp_path: Path) -> None:
    """The first step changes nothing at all if its gradient is too large; ordinary steps are not touched."""
    train(tiny_config(data, train__steps=3), tmp_path / "usual", quiet=True)
    usual = [line for line in read_metrics(tmp_path / "usual") if line["kind"] == "train"]
    for name, limit, skipped in (("high", 1e3, []), ("low", 1e-9, [1, 2, 3])):
        config = tiny_config(data, train__steps=3, train__skip_above=limit, log__every=3)
        train(config, tmp_path / name, quiet=True)
        lines = read_metrics(tmp_path / name)
        records = [line for line in lines if line["kind"] == "skipped"]
        assert [line["step"] for line in records] == skipped
        last = next(line for line in lines if line["kind"] == "train")
        assert (last["loss"] == usual[-1]["loss"]) == (not skipped)
    assert records[0]["loss"] == usual[0]["loss"] and records[0]["grad_norm"] == usual[0]["grad_norm"]
    start = Trainer(config, tmp_path, open_feed(config, World()), World(), quiet=True).decoder
    end = load_decoder(tmp_path / "low/final")
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True))


def test_a_trace_of_three_steps(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, train__steps=5, log__profile=2), tmp_path / "run", quiet=True)
    trace = json.loads((tmp_path / "run/profile/rank-0.json").read_text())
    steps = [e for e in trace["traceEvents"] if e.get("name", "").startswith("Optimizer.step#")]
    assert len(steps) == 3
    assert gc.isenabled() and gc.get_freeze_count() == 0
