"""Absolute positions as an option of the decoder: each by its formula, in caches, documents, padding and files."""

from __future__ import annotations

import math

import pytest
import torch

from grape_pe import testing
from grape_pe.lab.compare.arms import Arm
from grape_pe.lab.compare.comparison import load_comparison
from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate.lengths import evaluate_language
from grape_pe.models import Decoder, DecoderConfig, load_decoder, save_decoder

KINDS = ("sinusoidal", "learned")
EXACT = testing.TOL[torch.float64]


def made(kind: str | None, **changes) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "width": 12, "layers": 2, "heads": 2, "encoding": "nope", "max_positions": 24}
    return Decoder(DecoderConfig(**{**sizes, "absolute": kind, **changes})).double().eval()


def tokens(count: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 13, (batch, count), generator=torch.Generator().manual_seed(1))


def row(model: Decoder, n: int) -> torch.Tensor:
    """What is added at position n, from the definition."""
    absolute = model.model.absolute
    if absolute.weight is not None:
        return absolute.weight[n]
    angles = [n / 10_000 ** (2 * i / 12) for i in range(6)]
    return 0.02 * torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)


def with_rows(model: Decoder, given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits of a model without absolute positions, its embeddings moved by hand."""
    plain = made(None)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if "absolute" not in name})
    plain.model.embed_tokens.register_forward_hook(lambda module, inputs, found: found + rows)
    return plain(given)


@pytest.mark.parametrize("kind", KINDS)
def test_added_to_the_embeddings(kind):
    model, given = made(kind), tokens()
    want = with_rows(model, given, torch.stack([row(model, n) for n in range(16)]))
    assert (model(given) - want).abs().max() < EXACT
    assert (model(given) - made(None)(given)).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", ("nope", "rope+fox"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_continues_the_positions(kind, encoding):
    model, given = made(kind, encoding=encoding), tokens()
    full, cache = model(given), model.cache()
    with torch.no_grad():
        parts = [model(given[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 12))]
        cache.crop(3)
        parts[2] = parts[2][:, :1]
        parts.append(model(given[:, 9:], cache=cache))
    assert (torch.cat(parts, 1) - full).abs().max() < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_padding_start_again_at_zero(kind):
    model, given = made(kind), tokens(15, 1)
    first, second = model(given[:, :6]), model(given[:, 6:])
    packed = model(given, documents=torch.tensor([0] * 6 + [1] * 9))
    assert (packed - torch.cat([first, second], 1)).abs().max() < EXACT
    holes = torch.tensor([[True, True, False, True] + [False] * 5])
    kept = ~holes[0]
    padded, alone = model(given[:, 6:], padding=holes)[:, kept], model(given[:, 6:][:, kept])
    assert (padded - alone).abs().max() < EXACT
    moved = model(given[:, :5], positions=torch.arange(9, 14)[None])
    assert (moved - first[:, :5]).abs().max() > 1e-3


def test_the_learned_table_ends_where_it_ends():
    model = made("learned")
    assert model(tokens(24)).isfinite().all()
    for arguments in (
        {},
        {"positions": torch.arange(25)[None]},
        {"documents": torch.zeros(25, dtype=torch.long)},
    ):
        with pytest.raises(ValueError, match="max_positions=24"):
            model(tokens(25), **arguments)
    cache = model.cache()
    with torch.no_grad():
        model(tokens(24), cache=cache)
        with pytest.raises(ValueError, match="max_positions=24"):
            model(tokens(1), cache=cache)
    assert cache.length == 24
    cache.crop(4)
    with torch.no_grad():  # padding may stand beyond the table
        model(tokens(6), cache=cache, padding=torch.tensor([[False] * 4 + [True] * 2] * 2))
    model(tokens(30), documents=torch.arange(30) // 15)  # each document fits
    with pytest.raises(ValueError, match="integer positions"):
        model(tokens(3), positions=torch.tensor([[0.0, 0.5, 1.0]]))
    assert made("sinusoidal")(tokens(60)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_here_and_by_transformers(kind, tmp_path):
    hf = pytest.importorskip("grape_pe.hf")
    model, given = made(kind).float(), tokens()
    save_decoder(model, tmp_path)
    again = load_decoder(tmp_path)
    assert again.config == model.config and torch.equal(again(given), model(given))
    theirs = hf.GrapeForCausalLM.from_pretrained(tmp_path).eval()
    assert (theirs(given).logits - model(given)).abs().max() < 1e-5
    new = theirs.generate(given[:, :5], max_new_tokens=6, do_sample=False)
    plain = given[:, :5]
    for _ in range(6):
        plain = torch.cat([plain, model(plain)[:, -1:].argmax(-1)], 1)
    assert torch.equal(new, plain)
    fresh = hf.GrapeForCausalLM(theirs.config)
    assert all(p.isfinite().all() for p in fresh.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_training_compiled_and_from_meta(kind):
    with torch.device("meta"):
        model = Decoder(made(kind).config)
    model = model.to_empty(device="cpu")
    model.reset_parameters()
    given = tokens()
    loss = model(given, targets=given)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert (compiled(given, targets=given) - loss).abs() < 1e-5


def test_positions_before_the_table_are_named():
    model = Decoder(
        DecoderConfig(8, width=8, layers=1, heads=1, hidden=8, absolute="learned", max_positions=24)
    )
    with pytest.raises(ValueError, match=r"from 0 to 23 .* max_positions=24.* from -3 to 4\)"):
        model(torch.zeros(1, 8, dtype=torch.long), positions=torch.arange(-3, 5))


def test_what_is_wrong_is_refused_by_name():
    with pytest.raises(ValueError, match="absolute must be 'sinusoidal', 'learned' or None"):
        made("sine")
    with pytest.raises(ValueError, match="max_positions must be a positive integer"):
        made("learned", max_positions=-1)
    spatial = made("sinusoidal", encoding="rope", encoding_options={"coords": 2})
    with pytest.raises(ValueError, match="one coordinate"):
        spatial(tokens(4), positions=torch.zeros(1, 4, 2))


def test_as_arms_of_a_comparison():
    """The table is as long as the training context unless set; longer evaluations say why there is no number."""
    recipe = load("demo")
    arm = Arm(label="learned", encoding="nope", model={"absolute": "learned"})
    config = arm.applied(recipe, 0).decoder(1000)
    assert (config.absolute, config.max_positions) == ("learned", recipe.data.sequence)
    model = made("learned", max_positions=8).float()
    found = evaluate_language(model, tokens(70, 1), 8, factors=(1, 2), tokens=32)
    losses = {(e["length"], e["window"]): e for e in found["extrapolation"]}
    assert losses[8, None]["loss"] is not None
    assert losses[16, None]["loss"] is None and "max_positions=8" in losses[16, None]["reason"]
    with pytest.raises(LabError, match="set max_positions: 1024 under model"):
        load_comparison("probes", arms=[arm], tasks=["copy"])
