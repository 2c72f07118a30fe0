"""Training batches of the probes, and the scores of models on them."""

import json
from dataclasses import asdict

import pytest
import torch

from grape_pe.lab.errors import LabError
from grape_pe.lab.tasks import Case, TaskBatches, build_task, names, score
from grape_pe.lab.tasks import scoring as module
from grape_pe.lab.tasks.batches import draw
from grape_pe.models import Decoder, DecoderConfig


def tiny(vocab_size=64, encoding="rope", **options):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocab_size=vocab_size, width=32, layers=2, heads=2, encoding=encoding, **options)
    )


# Batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_rows_are_the_same_however_they_are_shared_out(name):
    batches = TaskBatches(build_task(name), batch=6, seed=3)
    for step in (0, 5):
        whole = batches.batch(step, range(6))
        parts = [batches.batch(step, rows) for rows in (range(0, 1), range(1, 4), range(4, 6))]
        assert torch.cat([part.tokens for part in parts]).equal(whole.tokens)
        assert torch.cat([part.targets for part in parts]).equal(whole.targets)
        assert whole.tokens.dtype == whole.targets.dtype == torch.int64 and whole.documents is None
        assert (
            TaskBatches(build_task(name), batch=64, seed=3).batch(step, range(6)).tokens.equal(whole.tokens)
        )


@pytest.mark.parametrize("name", names())
def test_seeds_steps_and_streams_differ(name):
    task = build_task(name, shortest=0)
    one, other = TaskBatches(task, 4, seed=0), TaskBatches(task, 4, seed=1)
    first = one.batch(0, range(4)).tokens
    assert not first.equal(one.batch(1, range(4)).tokens)
    assert not first.equal(other.batch(0, range(4)).tokens)
    assert not first.equal(one.validation(range(4)).tokens)
    assert one.validation(range(2, 4)).tokens.equal(other.validation(range(4)).tokens[2:])
    assert one.vocab_size == task.vocab_size and one.validation_rows == 512


def test_lengths_are_drawn_for_each_step():
    batches = TaskBatches(build_task("copy", length=6, shortest=3), batch=2)
    lengths = [batches.length(step) for step in range(2000)]
    assert set(lengths) == {3, 4, 5, 6}
    assert all(abs(lengths.count(n) / 2000 - 0.25) < 0.05 for n in range(3, 7))
    assert batches.batch(0, range(2)).tokens.shape == (2, 2 * lengths[0])
    assert batches.validation(range(1)).tokens.shape == (1, 12)


def test_test_rows_are_not_training_rows():
    task = build_task("copy", length=16, shortest=16)
    case = Case("test", 16)
    test = {tuple(row) for row in draw(task, (0, 3, 0), range(500), case).tokens.tolist()}
    train = TaskBatches(task, 500, seed=0).batch(0, range(500)).tokens.tolist()
    assert len(test) == 500 and not test & {tuple(row) for row in train}


def test_rows_outside_are_refused():
    batches = TaskBatches(build_task("copy"), batch=4)
    with pytest.raises(LabError, match="rows 0 to 3"):
        batches.batch(0, range(3, 5))
    with pytest.raises(LabError, match="rows 0 to 511"):
        batches.validation(range(512, 513))
    with pytest.raises(LabError, match="must be 0 or more"):
        batches.batch(-1, range(1))
    with pytest.raises(LabError, match="at least 1"):
        TaskBatches(build_task("copy"), batch=0)


# Scores -----------------------------------------------------------------------------------------


def by_hand(model, task, case, path, samples):
    """Whole logits, row by row."""
    exact, right, answers = 0, 0, 0
    for row in range(samples):
        some = draw(task, path, range(row, row + 1), case)
        with torch.no_grad():
            guess = model(some.tokens).argmax(-1)
        hits = (guess == some.targets)[some.targets != -100]
        exact, right, answers = exact + bool(hits.all()), right + int(hits.sum()), answers + len(hits)
    return exact / samples, right / answers


@pytest.mark.parametrize("encoding", ["rope", "fox", "grape-ap", "path"])
def test_scores_are_those_of_the_full_forward(encoding):
    model, task = tiny(2, encoding), build_task("parity", length=3, shortest=3)
    scores = score(model, task, seed=4, samples=9, batch=4)
    assert [s.length for s in scores] == [3, 6, 12, 24, 48]
    for i, case in enumerate(task.cases()):
        want = by_hand(model, task, case, (4, 3, i), scores[i].samples)
        assert (scores[i].exact, scores[i].token) == pytest.approx(want)
    assert 0 < scores[0].token < 1


def test_every_cell_is_scored_and_json_can_hold_it():
    task = build_task("passkey", length=16, shortest=16)
    scores = score(tiny(), task, samples=2, lengths=[16, 40])
    cells = [(s.length, s.depth) for s in scores]
    assert cells == [(n, d) for n in (16, 40) for d in (0.0, 0.25, 0.5, 0.75, 1.0)]
    said = json.loads(json.dumps([asdict(s) for s in scores]))
    assert said[0]["task"] == "passkey" and said[0]["split"] == "test" and said[0]["samples"] == 2
    assert said[0]["answers"] == 10 and said[0]["chance"] == 0.1
    splits = [s.split for s in score(tiny(), build_task("flip-flop", length=8), samples=1, lengths=[8])]
    assert splits == ["in-distribution", "sparse", "dense"]


def test_long_cells_have_fewer_rows(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 64)
    scores = score(tiny(3), build_task("parity", length=4, shortest=4), samples=40)
    assert [s.samples for s in scores] == [40, 20, 10, 8, 8]
    assert score(tiny(3), build_task("parity"), samples=3, lengths=[512])[0].samples == 3


def test_scores_depend_on_the_seed_alone():
    model, task = tiny(), build_task("flip-flop", length=200)
    one, again, other = (
        score(model, task, seed=s, samples=6, lengths=[200], batch=b) for s, b in ((0, 2), (0, 6), (1, 6))
    )
    assert one == again
    assert one[0].answers != other[0].answers


def test_a_model_that_learned_the_task_is_recognised():
    """Copying within the training length is learned in seconds; the scores must show it."""
    task = build_task("copy", length=3, shortest=3, symbols=3)
    model = tiny(4, kv_shift=True)
    before = score(model, task, samples=50, lengths=[3])[0]
    batches, adam = TaskBatches(task, 32), torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(200):
        batch = batches.batch(step, range(32))
        adam.zero_grad()
        model(batch.tokens, targets=batch.targets).backward()
        adam.step()
    after = score(model, task, samples=50, lengths=[3])[0]
    assert before.exact < 0.2 and before.token < 0.6
    assert after.exact > 0.9 and after.token >= after.exact


def test_a_model_of_another_vocabulary_is_refused():
    with pytest.raises(LabError, match="120 tokens, the model knows 64"):
        score(tiny(64), build_task("s5"))
    with pytest.raises(LabError, match="at least 1"):
        score(tiny(), build_task("copy"), samples=0)
