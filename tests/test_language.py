"""Language evaluation by streaming: the losses of the full forward, whatever the chunks, windowed too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grape_pe as grape
from grape_pe.attention import attend
from grape_pe.lab.data.batches import Batch
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate import lengths as language
from grape_pe.lab.evaluate.lengths import evaluate_language, stream_losses, token_losses, validation_loss
from grape_pe.models import Decoder, DecoderConfig
from grape_pe.testing import TOL

NAMES = [*grape.names(), "rope+fox", "grape-m+grape-ap"]
V = 23


def small(encoding="rope", **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "width": 16, "layers": 2, "heads": 2, "encoding": encoding}
    model = Decoder(DecoderConfig(**{**sizes, **options})).double()
    with torch.no_grad():  # away from the initial values, where gates are still
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def words(*shape, seed=1):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_losses(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")


@pytest.fixture
def windowed(monkeypatch):
    """Makes the uncached forward attend with a window, and the first keys as sinks."""

    def use(window, sinks=0):
        def limited(*args, **masks):
            return attend(*args, **{"window": window, "sinks": sinks, **masks}, impl="reference")

        monkeypatch.setattr("grape_pe.cache.inputs.attend", limited)

    yield use
    monkeypatch.undo()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOL[torch.float32], atol=TOL[torch.float32])


@pytest.mark.parametrize("kv_shift", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_full(name, kv_shift):
    model, tokens = small(name, kv_shift=kv_shift), words(2, 20)
    want = full_losses(model, tokens)
    assert want.std() > 0.1
    for chunk in (7, 19) if kv_shift else (64,):
        got = stream_losses(model, tokens, chunk=chunk)
        assert got.dtype == torch.float32 and got.shape == (2, 19)
        close(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_windowed_stream_is_attention_with_that_window(name, windowed):
    model, tokens = small(name, kv_shift=True), words(2, 40)
    unlimited = full_losses(model, tokens)
    got = {chunk: stream_losses(model, tokens, chunk=chunk, window=6) for chunk in (1, 5, 16, 64)}
    windowed(6)
    want = full_losses(model, tokens)
    assert (want - unlimited).abs().max() > 1e-3
    for losses in got.values():
        close(losses, want)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "grape-a-qk", "grape-m-ctx"])
def test_sinks_stay_visible(name, windowed):
    model, tokens = small(name), words(1, 40)
    cache = model.cache(window=5, sinks=3, rollback=2)
    with torch.no_grad():
        got = torch.cat([model(part, cache=cache) for part in tokens.split([1, 9, 1, 1, 20, 8], 1)], 1)
        windowed(5, 3)
        close(got.float(), model(tokens).float())


def test_sinks_are_refused_where_the_bias_sums_over_what_is_gone():
    model = small("grape-ap")
    with pytest.raises(ValueError, match="without sinks"):
        model(words(1, 4), cache=model.cache(window=5, sinks=2))


def test_window_bounds_the_cache():
    model = small()
    cache = model.cache(window=8, rollback=0)
    with torch.no_grad():
        for part in words(1, 400).split(4, 1):
            model(part, cache=cache)
    assert cache.length == 400
    assert max(t.shape[2] for t in cache.layers[0].tokens.storage.values()) <= 64


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["rope", "fox", "grape-ap", "path"]),
    length=st.integers(2, 33),
    chunk=st.integers(1, 40),
    window=st.none() | st.integers(1, 40),
)
def test_chunks_change_nothing(name, length, chunk, window):
    model, tokens = small(name), words(2, length)
    close(
        stream_losses(model, tokens, chunk=chunk, window=window),
        stream_losses(model, tokens, chunk=length, window=window),
    )


def test_token_losses_in_pieces(monkeypatch):
    hidden, head, targets = torch.randn(2, 9, 4), torch.randn(V, 4), words(2, 9)
    targets[0, 3] = -100
    whole = token_losses(hidden, head, targets)
    monkeypatch.setattr("grape_pe.models.loss.CHUNK_ELEMENTS", 4 * V)
    close(token_losses(hidden, head, targets), whole)
    assert whole[0, 3] == 0 and (whole > 0).sum() == 17


class Fixed:
    vocab_size, validation_rows = V, 5

    def __init__(self):
        self.tokens, self.targets = words(5, 8, seed=2), words(5, 8, seed=3)
        self.targets[1:3, :6] = -100

    def validation(self, rows):
        index = list(rows)
        return Batch(self.tokens[index], self.targets[index], None)


def test_validation_loss_weighs_targets_alike():
    model, data = small(), Fixed()
    with torch.no_grad():
        want = float(model(data.tokens, targets=data.targets))
        three = float(model(data.tokens[:3], targets=data.targets[:3]))
    assert validation_loss(model, data, batch=2) == pytest.approx(want, rel=1e-6)
    assert validation_loss(model, data, 3, batch=2) == pytest.approx(three, rel=1e-6)
    assert validation_loss(model, data, 99) == pytest.approx(want, rel=1e-6)


def test_evaluation_reads_the_same_text_at_every_length():
    model, tokens = small("grape-ap"), words(400)
    found = evaluate_language(model, tokens, 8, factors=(1, 2, 4), tokens=64, seed=5, chunk=6)
    entries = {(e["length"], e["window"]): e for e in found["extrapolation"]}
    assert list(entries) == [(8, None), (16, None), (32, None), (8, 8), (16, 8), (32, 8)]
    assert {e["tokens"] for e in entries.values()} == {64}
    text = language._Source(tokens).stretches(32, 64, 5)
    rows = text.unfold(1, 17, 16).reshape(-1, 17)
    losses = full_losses(model, rows).double()
    entry = entries[16, None]
    assert entry["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert entry["tail_loss"] == pytest.approx(float(losses[:, -8:].mean()), rel=1e-5)
    assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
    each = [float(full_losses(model, one.unfold(0, 17, 16)).double().mean()) for one in text]
    assert entry["stretches"] == pytest.approx(each, rel=1e-5) and len(each) == 2
    assert entries[8, None]["loss"] == entries[8, 8]["loss"]
    assert entries[32, None]["loss"] != entries[32, 8]["loss"]


def test_loss_by_position_pools_all_lengths():
    model, tokens = small(), words(400)
    found = evaluate_language(model, tokens, 8, factors=(1, 4), tokens=64, windows=(None,))
    position, loss = found["by_position"]["position"], found["by_position"]["loss"]
    assert position == [1, 2, 3, 4, 5, 6, 7, 8, 10.5, 14.5, 18.5, 22.5, 26.5, 30.5]
    text = language._Source(tokens).stretches(32, 64, 0)
    short, long = (full_losses(model, text.unfold(1, n + 1, n).reshape(-1, n + 1)) for n in (8, 32))
    assert loss[2] == pytest.approx(float(torch.cat([short[:, 2], long[:, 2]]).mean()), rel=1e-5)
    assert loss[9] == pytest.approx(float(long[:, 12:16].mean()), rel=1e-5)


def test_stretches_depend_on_the_seed_and_do_not_overlap():
    source = language._Source(torch.arange(1000))
    first, again, other = (source.stretches(50, 500, seed) for seed in (0, 0, 1))
    assert first.equal(again) and not first.equal(other)
    starts = first[:, 0].tolist()
    assert len(set(starts)) == 10 and all(start % 50 == 0 for start in starts)
    assert first.equal(first[:, :1] + torch.arange(51))


def test_what_cannot_be_measured_has_a_reason(monkeypatch):
    model, tokens = small(), words(20)
    found = evaluate_language(model, tokens, 8, factors=(1, 2, 4), tokens=16)["extrapolation"]
    assert found[1]["loss"] is not None
    assert found[2]["loss"] is None and "33 tokens" in found[2]["reason"]
    plain = model.cache

    def refusing(**options):
        if options["window"] is not None:
            raise ValueError("no windows here")
        return plain(**options)

    monkeypatch.setattr(model, "cache", refusing)
    found = evaluate_language(model, tokens, 8, factors=(1, 2), tokens=16)["extrapolation"]
    assert found[3] == {
        "length": 16, "window": 8, "loss": None, "perplexity": None, "tail_loss": None, "tokens": 0,
        "stretches": [], "reason": "no windows here",
    }  # fmt: skip


def test_a_diverged_model_has_no_loss():
    model = small()
    with torch.no_grad():
        model.head.fill_(math.nan)
    entry = evaluate_language(model, words(40), 8, factors=(1,), tokens=8)["extrapolation"][0]
    assert entry["loss"] is None and entry["perplexity"] is None


def test_errors_say_what_to_do():
    model = small()
    with pytest.raises(LabError, match=r"needs 65 tokens.*has 40"):
        evaluate_language(model, words(40), 64)
    with pytest.raises(LabError, match="at least 2 tokens"):
        stream_losses(model, words(3, 1))
    with pytest.raises(LabError, match="chunk"):
        stream_losses(model, words(3, 4), chunk=0)
    with pytest.raises(LabError, match="train_length"):
        evaluate_language(model, words(40), 0)


def test_a_prepared_dataset_is_read_from_its_validation_split():
    class Shard:
        def __init__(self, tokens):
            self.tokens = tokens

    class Prepared:  # what _Source asks of a Dataset
        manifest = type(
            "Manifest", (), {"of": lambda self, split: [Shard(30), Shard(70)] * (split == "val")}
        )()

        def read(self, shard, start, count):
            return torch.arange(start, start + count).numpy() + 1000 * (shard.tokens == 70)

    text = language._Source(Prepared()).stretches(20, 1000, 0)
    assert sorted(text[:, 0].tolist()) == [0, 1000, 1020, 1040]
    assert language._Source(Prepared()).longest == 70
