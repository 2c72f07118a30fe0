"""Diagnostics: formulas against measurements, the laws of live models, the command."""

from __future__ import annotations

import json
import math

import pytest
import torch

import grape_pe as grape
from grape_pe.bias import SlopeBias, SlopeTerm
from grape_pe.commands import inspect as command
from grape_pe.commands.errors import CommandError
from grape_pe.commands.parsers import Parser
from grape_pe.encodings.additive import alibi_slopes
from grape_pe.encodings.base import Encoded, Encoding
from grape_pe.lab.errors import LabError
from grape_pe.lab.inspect.capture import attention_reach, bias_reach, observe, observe_encoding
from grape_pe.lab.inspect.inspection import inspect, inspect_layer
from grape_pe.models import save_decoder
from report_data import make_model

NAMES = [*grape.names(), "rope+fox", "grape-m-mix+alibi"]


@pytest.mark.parametrize("name", NAMES)
def test_formulas_agree_with_explicit_matrices(name):
    (layer,) = inspect(name, heads=4, head_dim=16, tokens=80).layers
    wanted = (
        [] if name in ("pope", "logn") else [1, 4, 16, 64]
    )  # no matrix acts on q and k, or none by the distance
    assert [row.distance for row in layer.spectral] == wanted
    for row in layer.spectral:
        assert row.difference < 1e-5, row
        for quantity in row.quantities:
            if quantity.name.endswith("≥"):
                assert quantity.measured >= quantity.closed * (1 - 1e-9)
            elif quantity.name.endswith("≤"):
                assert quantity.measured <= quantity.closed + 1e-9


def test_alibis_condition_number_by_hand():
    (layer,) = inspect("alibi", heads=4, head_dim=8).layers
    for row in layer.spectral:
        s = alibi_slopes(4)[0] * row.distance  # Eq. S4, for the steepest head
        want = 1 + s**2 / 2 + s * math.sqrt(1 + s**2 / 4)
        assert row.head == 0 and row.quantities[2].measured == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_relative_law_on_live_models(name):
    model = make_model(name)
    with torch.no_grad():
        for parameter in model.model.encoding_of(0).parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    view = observe(model, torch.randint(0, 64, (48,)))[0]
    law = inspect_layer(view).law
    if view.encoding.breaks_relative_law:
        assert name in ("grape-ap", "logn", "fire")
        assert law.holds is None and law.residual > 1e-3 and "not promised" in law.note
    elif name == "liere":  # matrix_exp of 1000 generators: see how far its accuracy reaches
        assert law.residual < 1e-3
    else:
        assert law.holds is True and law.residual <= law.tolerance


class Absolute(Encoding):
    """Breaks the relative law and does not say so."""

    def encode(self, tokens, state):
        n = tokens.positions[..., 0].unsqueeze(1)
        rate = 1e-3 * n.to(tokens.working).expand(1, self.shape.heads, -1)
        return Encoded(tokens.q, tokens.k, SlopeBias((SlopeTerm(n, n, rate),)))


@pytest.mark.parametrize("name", ("logn", "rope+logn", "pope", "pope+fox", "xpos+fox"))
def test_no_action_is_shown_where_none_is_known(name):
    """Neither in the table nor in the picture: a factor of the query is not the identity."""
    found = inspect(name, heads=2, head_dim=8, tokens=20)
    assert not found.layers[0].spectral and not found.picture["singular"]
    assert found.layers[0].spectral_about.startswith("no ") and found.picture["singular_about"].startswith(
        "no "
    )


@pytest.mark.parametrize("width", (8, 9))
def test_the_picture_of_xpos_has_the_measured_singular_values(width):
    found = inspect("xpos", heads=2, head_dim=width, tokens=20)
    curves, at = found.picture["singular"], found.picture["distances"]
    assert len(curves) == 2
    for row in found.layers[0].spectral:
        larger, smaller = (quantity.measured for quantity in row.quantities)
        i = at.index(row.distance)
        for curve in curves:
            assert curve["larger"][i] == pytest.approx(larger, rel=1e-3)
            assert curve["smaller"][i] == pytest.approx(smaller, rel=1e-3)


def test_clocks_of_planes_are_not_shown_as_heads(capsys):
    call("grape-m-ctx[phase_per_plane=true]", "--heads", 2, "--head-dim", 8)
    assert "all heads" in capsys.readouterr().out
    call("grape-m-ctx[phase_per_plane=true,phase_per_head=true]", "--heads", 2, "--head-dim", 8)
    out = capsys.readouterr().out.partition("phase added by each token")[2].partition("Closed form")[0]
    assert out.count("head ") == 2


def test_heads_that_are_not_turned_have_no_spectrum(capsys):
    call("rope[rotary_heads=1]", "--heads", 4, "--head-dim", 8)
    assert "4 planes for 1 of 4 heads" in capsys.readouterr().out


def test_a_broken_law_is_seen():
    law = inspect_layer(observe_encoding(Absolute(grape.build("nope", heads=2, head_dim=4).shape), 40)).law
    assert law.holds is False and "BROKEN" in law.note


def test_reach_of_alibi_is_that_of_its_slopes():
    (layer,) = inspect("alibi", heads=4, head_dim=8).layers
    for reach, slope in zip(layer.reach, alibi_slopes(4), strict=True):
        want = [math.floor(-math.log(level) / slope) + 1 for level in (0.5, math.exp(-1))]
        assert reach.bias_half == (want[0] if want[0] < 128 else None)
        assert reach.bias_e in (want[1], want[1] - 1, None)


def test_reach_of_attention_counts_from_the_query():
    near, uniform = torch.eye(8).expand(1, 1, 8, 8), torch.ones(8, 8).tril()
    uniform = (uniform / uniform.sum(-1, keepdim=True)).expand(1, 1, 8, 8)
    assert attention_reach(near, 0.5).tolist() == [0.0]
    assert attention_reach(uniform, 0.5).tolist() == [2.0]  # rows of 5 to 8 keys: 2, 2, 3, 3
    assert bias_reach([0.0, -0.5, -1.0], 0.5) == 2
    assert bias_reach([0.0, -0.5], 0.5) is None


def test_a_learned_spectrum_says_how_far_it_moved():
    model = make_model("grape-m")
    encoding = model.model.encoding_of(0)
    with torch.no_grad():
        encoding.frequencies.delta[..., 2] = 16 * math.log(1.25)
    layer = inspect_layer(observe(model, torch.randint(0, 64, (32,)))[0])
    assert layer.spectrum.moved == pytest.approx(0.25, rel=1e-4)
    assert layer.spectrum.wavelengths[0][0] == pytest.approx(2 * math.pi)
    assert layer.spectral[0].difference < 1e-5


@pytest.fixture
def run(tmp_path):
    """A run directory with a saved model."""
    save_decoder(make_model("grape-a-qk", kv_shift=True), tmp_path / "final")
    return tmp_path


@pytest.mark.parametrize("where", ["", "final"])
def test_a_checkpoint_is_found_from_its_run(run, where):
    found = inspect(str(run / where))
    assert found.encoding == "grape-a-qk" and len(found.layers) == 2 and "random tokens" in found.sample
    assert {h.gate.split(":")[0].split(",")[0] for h in found.layers[0].histograms} == {
        "share of weight kept for each token passed",
        "KV-shift",
    }
    for histogram in found.layers[0].histograms:
        assert histogram.low <= histogram.median <= histogram.high
    json.dumps(found.to_json(), allow_nan=False)


def test_the_models_own_tokenizer_reads_the_text(run):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"the": 0, "[UNK]": 1, "vine": 2, "<|endoftext|>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(run / "final" / "tokenizer.json"))
    assert inspect(str(run)).sample.startswith("a text of")


def call(*arguments):
    parser = Parser()
    command.add_parsers(parser.add_subparsers())
    options = parser.parse_args(["inspect", *map(str, arguments)])
    return options.run(options)


@pytest.mark.parametrize("name", ["grape-ap", "rope", "path", "nope", "grape-m+fox", "path+fox"])
def test_one_layer_fits_a_screen(name, capsys):
    assert call(name, "--heads", 8, "--head-dim", 8) == 0
    out = capsys.readouterr().out
    assert "Relative law" in out and "Closed form / measured" in out
    assert len(out.splitlines()) <= 48


def test_json_html_and_layers(run, tmp_path, capsys):
    assert call(run, "--layer", 2, "--html", tmp_path / "p.html") == 0
    assert "layer 2 of 2" in capsys.readouterr().out
    assert "data-figure" in (tmp_path / "p.html").read_text()
    assert call(run, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["layers"]) == 2 and said["layers"][0]["spectral"][0]["quantities"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["grap-ap"], "did you mean"),
        (["no/such/directory"], "no directory"),
        (["rope", "--layer", "2"], "from 1 to 1"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    with pytest.raises((LabError, CommandError), match=message):
        call(*arguments)


def test_what_is_no_model_or_diverged_is_refused(tmp_path):
    with pytest.raises(LabError, match="is not a run, a checkpoint or a model directory"):
        inspect(str(tmp_path))
    model = make_model("rope")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.nan
    save_decoder(model, tmp_path)
    with pytest.raises(LabError, match="diverged"):
        inspect(str(tmp_path))


def test_bars_show_zero_as_nothing():
    assert command.bars([0, 1, 8]) == " ▁█"
