"""Each probe against a slow, obvious reading of its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grape_pe.lab.errors import LabError
from grape_pe.lab.tasks import Case, build_task, names
from grape_pe.lab.tasks.dice import Dice
from grape_pe.lab.tasks.words import multiplication

NO = -100


def rows(task, length=None, split="train", depth=None, count=40, seed=0):
    case = Case(split, length or task.length, depth)
    tokens, targets = task.sample(Dice((seed,), range(count)), case)
    return tokens.tolist(), targets.tolist()


# Random numbers ---------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63), first=st.integers(0, 500), count=st.integers(1, 20))
def test_a_row_does_not_know_its_neighbours(seed, first, count):
    together = Dice((seed, 1), range(first + count))
    alone = Dice((seed, 1), range(first, first + count))
    for draw in (lambda d: d.uniform(3, 2), lambda d: d.integers(0, 9, 4), lambda d: d.distinct(12, 5)):
        assert (draw(together)[first:] == draw(alone)).all()


def test_uniform_is_uniform_along_every_axis():
    drawn = Dice((7,), range(400)).uniform(400)
    for axis in (0, 1):
        assert abs(drawn.mean(axis) - 0.5).max() < 5 * (1 / 12 / 400) ** 0.5
    counts = np.histogram(drawn, 64)[0]
    assert ((counts - 2500) ** 2 / 2500).sum() < 63 + 5 * (2 * 63) ** 0.5  # chi-square
    for shifted in (drawn[1:], np.roll(drawn, 1, 1)[1:]):  # neighbours in both directions
        assert abs(np.corrcoef(drawn[:-1].ravel(), shifted.ravel())[0, 1]) < 0.02
    other = Dice((8,), range(400)).uniform(400)
    assert abs(np.corrcoef(drawn.ravel(), other.ravel())[0, 1]) < 0.02
    assert not (drawn == other).any()


def test_weighted_draws_follow_the_weights():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    drawn = Dice((3,), range(40_000)).weighted(weights, 2)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0], minlength=4) / len(drawn)
    assert abs(first - weights / 10).max() < 0.01
    second = np.bincount(drawn[drawn[:, 0] == 3, 1], minlength=4)
    assert abs(second / second.sum() - np.array([1, 2, 3, 0]) / 6).max() < 0.02


# Definitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split, rate", [("train", 0.8), ("in-distribution", 0.8), ("sparse", 0.98), ("dense", 0.1)]
)
def test_flip_flop(split, rate):
    tokens, targets = rows(build_task("flip-flop"), split=split, count=60)
    kinds = np.array(tokens)[:, 2:-2:2]
    assert abs((kinds == 2).mean() - rate) < 0.015
    assert abs((kinds == 0).mean() - (1 - rate) / 2) < 0.015
    for line, wanted in zip(tokens, targets, strict=True):
        assert line[0] == 0 and line[-2] == 1 and len(line) == 512
        memory = None
        for t in range(0, len(line), 2):
            instruction, bit = line[t : t + 2]
            assert instruction in (0, 1, 2) and bit in (3, 4)
            memory = bit if instruction == 0 else memory
            assert wanted[t] == (memory if instruction == 1 else NO)
            assert instruction != 1 or bit == memory
            assert wanted[t + 1] == NO
    assert abs((np.array(tokens)[:, 1::2] == 4).mean() - 0.5) < 0.1


def test_flip_flop_as_a_language_model():
    task = build_task("flip-flop", loss="all", length=32)
    for line, wanted in zip(*rows(task), strict=True):
        assert wanted == [*line[1:], NO]
    assert rows(task, split="dense")[1] == rows(build_task("flip-flop", length=32), split="dense")[1]


@pytest.mark.parametrize(
    "split, length, pairs", [("train", 64, 8), ("same-pairs", 256, 8), ("more-pairs", 256, 32)]
)
def test_mqar(split, length, pairs):
    tokens, targets = rows(build_task("mqar"), length, split)
    for line, wanted in zip(tokens, targets, strict=True):
        assert len(line) == length
        said = dict(zip(line[: 2 * pairs : 2], line[1 : 2 * pairs : 2], strict=True))
        assert len(said) == pairs == len(set(said.values()))
        assert all(1 <= key < 256 <= value < 512 for key, value in said.items())
        asked = {t: line[t] for t in range(2 * pairs, length) if wanted[t] != NO}
        assert sorted(asked.values()) == sorted(said)
        assert all(t % 2 == 0 and wanted[t] == said[key] for t, key in asked.items())
        assert all(line[t] == 0 for t in range(2 * pairs, length) if t not in asked)
        assert wanted[: 2 * pairs] == [NO] * 2 * pairs


def test_mqar_queries_are_mostly_near_and_filler_may_be_random():
    targets = np.array(rows(build_task("mqar", pairs=1), 64, count=4000)[1])
    gaps = np.nonzero(targets != NO)[1] // 2 - 1
    weights = np.arange(1.0, 32) ** -0.99
    want = weights / weights.sum()
    assert abs(np.bincount(gaps, minlength=31) / 4000 - want).max() < 0.03
    tokens = np.array(rows(build_task("mqar", random_filler=True))[0])
    assert (tokens[:, 17::2] != 0).mean() > 0.9


@pytest.mark.parametrize("back", [1, 2, 3])
def test_mqar_nback(back):
    tokens, targets = rows(build_task("mqar-nback", back=back))
    asked = 0
    for line, wanted in zip(tokens, targets, strict=True):
        given_values = {}
        for t in range(0, len(line), 2):
            history = given_values.setdefault(line[t], [])
            assert wanted[t] == (history[-back] if len(history) >= back else NO)
            assert wanted[t + 1] == NO and line[t] < 8 <= line[t + 1] < 40
            history.append(line[t + 1])
            asked += wanted[t] != NO
    assert asked > 40 * 20


@pytest.mark.parametrize("name, answer", [("copy", list), ("reverse", lambda s: s[::-1]), ("sort", sorted)])
def test_strings(name, answer):
    for line, wanted in zip(*rows(build_task(name), 11), strict=True):
        string, separator, rest = line[:11], line[11], line[12:]
        want = list(answer(string))
        assert separator == 16 and max(string) < 16
        assert rest == want[:-1]
        assert wanted == [NO] * 11 + want


def test_selective_copy():
    for line, wanted in zip(*rows(build_task("selective-copy"), 50), strict=True):
        kept = [symbol for symbol in line[:50] if symbol != 0]
        assert len(kept) == 16 and all(1 <= symbol <= 14 for symbol in kept)
        assert line[50:] == [15] * 16
        assert wanted == [NO] * 50 + kept


@pytest.mark.parametrize("split, idle", [("train", 0.7), ("same-rate", 0.7), ("sparse", 0.95)])
def test_count(split, idle):
    tokens, targets = rows(build_task("count"), 200, split)
    values, nothing = set(), 0
    for line, wanted in zip(tokens, targets, strict=True):
        counts = [0, 0, 0]
        for operation in line[:200]:
            nothing += operation == 0
            if 1 <= operation <= 3:
                counts[operation - 1] = 0
            elif operation:
                assert 4 <= operation <= 6
                counts[operation - 4] += 1
            assert max(counts) <= 10
        assert line[200:] == [7, 8, 9]
        assert wanted == [NO] * 200 + [10 + count for count in counts]
        values |= set(counts)
    assert idle - 0.02 < nothing / 8000 < idle + 0.12  # some additions would exceed 10
    assert len(values) >= 6


def test_parity():
    for line, wanted in zip(*rows(build_task("parity")), strict=True):
        assert wanted == [sum(line[: t + 1]) % 2 for t in range(len(line))]


@pytest.mark.parametrize("name, order", [("a5", 60), ("s5", 120), ("parity", 2)])
def test_groups(name, order):
    task = build_task(name)
    elements, table = task.elements(), multiplication(type(task))
    assert len(elements) == order == task.vocab_size and elements[0] == tuple(sorted(elements[0]))
    assert all(sorted(line) == list(range(order)) for line in [*table.tolist(), *table.T.tolist()])
    a, b, c = Dice((1,), range(50)).integers(0, order, 3).T
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    for line, wanted in zip(*rows(task, 9, count=10), strict=True):
        things = list(range(len(elements[0])))
        for t, token in enumerate(line):
            things = [elements[token][thing] for thing in things]
            assert elements[wanted[t]] == tuple(things)


def test_a5_and_s5_do_not_commute():
    for name in ("a5", "s5"):
        table = multiplication(type(build_task(name)))
        assert (table != table.T).any()


@pytest.mark.parametrize("depth", [None, 0.0, 0.25, 0.5, 1.0])
def test_passkey(depth):
    task = build_task("passkey")
    tokens, targets = rows(task, 100, "test", depth)
    places = []
    for line, wanted in zip(tokens, targets, strict=True):
        assert len(line) == 100
        place = line.index(10)
        secret = line[place + 1 : place + 6]
        assert all(digit < 10 for digit in secret) and line[95] == 10 and line[96:] == secret[:4]
        assert wanted == [NO] * 95 + secret
        filler = line[:place] + line[place + 6 : 95]
        assert filler == [11 + i % 24 for i in range(89)]
        places.append(place)
    if depth is None:
        assert len(set(places)) > 20 and min(places) < 15 and max(places) > 74
    else:
        assert set(places) == {min(89, int(depth * 90))}


# Every one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_tokens_are_in_the_vocabulary_and_rows_have_answers(name):
    task = build_task(name)
    for case in [
        Case("train", n) for n in task.train_lengths()[:: max(1, len(task.train_lengths()) // 5)]
    ] + [case for case in task.cases() if case.length <= 4 * task.length]:
        tokens, targets = task.sample(Dice((0,), range(5)), case)
        assert tokens.shape == targets.shape and tokens.dtype == targets.dtype == np.int64
        assert tokens.min() >= 0 and tokens.max() < task.vocab_size
        asked = targets != NO
        assert asked.any(1).all() and targets[asked].min() >= 0 and targets.max() < task.vocab_size
    assert 0 < task.chance <= 0.5


@pytest.mark.parametrize("name", names())
def test_the_smallest_length_works_and_less_is_refused(name):
    task = build_task(name)
    least = task.smallest()
    _, targets = task.sample(Dice((0,), range(20)), Case("train", least))
    assert (targets != NO).any(1).all()
    with pytest.raises(LabError, match=f"at least {least}"):
        task.sample(Dice((0,), range(2)), Case("train", least - 1))
    with pytest.raises(LabError, match="splits"):
        task.sample(Dice((0,), range(2)), Case("nowhere", task.length))


def test_names_and_options_are_checked():
    with pytest.raises(LabError, match=r"did you mean.*flip-flop"):
        build_task("flipflop")
    with pytest.raises(LabError, match="did you mean symbols"):
        build_task("copy", symbol=4)
    for name, options, message in [
        ("copy", {"length": "8"}, "length must be a whole number, got .8."),
        ("copy", {"length": 8, "shortest": 9}, "shortest must not exceed"),
        ("copy", {"symbols": 1}, "symbols"),
        ("flip-flop", {"length": 7}, "multiple of 2"),
        ("flip-flop", {"ignore": 1.5}, "ignore must be at most 1, got 1.5"),
        ("flip-flop", {"loss": "some"}, "read"),
        ("mqar", {"pairs": 300, "length": 4096}, "vocabulary"),
        ("mqar-nback", {"back": 0}, "back"),
        ("count", {"idle": 2}, "idle must be at most 1"),
        ("passkey", {"digits": 0}, "digits"),
        ("selective-copy", {"symbols": 0}, "symbols"),
    ]:
        with pytest.raises(LabError, match=message):
            build_task(name, **options)
    assert build_task("count", idle=0).idle == 0


def test_options_are_written_in_brackets():
    assert build_task("mqar[length=128,pairs=8]") == build_task("mqar", length=128, pairs=8)
    assert build_task("mqar[pairs=8]", pairs=2, length=64).pairs == 8
    with pytest.raises(LabError, match="cannot read the option 'pairs'"):
        build_task("mqar[pairs]")
