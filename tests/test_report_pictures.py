"""Pictures: right numbers, every encoding, bounded size."""

from __future__ import annotations

import json
import math

import pytest
import torch

import grape_pe as grape
from grape_pe.encodings.additive import alibi_slopes
from grape_pe.lab.inspect.capture import observe
from grape_pe.lab.inspect.figure_data import encoding_picture, picture
from grape_pe.lab.report.picture_figures import picture_figures
from grape_pe.lab.report.style import Style
from report_data import WORDS, make_model

TOKENS = torch.randint(0, 64, (48,), generator=torch.Generator().manual_seed(1))
TEXT = [WORDS[i % len(WORDS)] for i in range(48)]
LOOK = Style(0, "solid", "circle")


def drawn(name: str, **options):
    return picture(make_model(name, **options), TOKENS, TEXT)


@pytest.mark.parametrize("name", [*grape.names(), "rope+fox", "grape-m+grape-ap", "path+fox"])
def test_every_encoding_has_a_picture(name):
    found = drawn(name)
    assert len(json.dumps(found, allow_nan=False)) < 150_000
    figures = {figure.key: figure for figure in picture_figures(found, LOOK, "p")}
    assert {"p-heatmap", "p-reach"} <= figures.keys()
    assert bool(found["bias"]) == ("p-bias" in figures)
    rotates = name.startswith(("rope", "grape-m", "liere", "string", "xpos"))
    assert rotates == ("p-kernel" in figures)
    assert (rotates and name != "xpos") == ("p-spectrum" in figures)  # xpos has singular values instead
    assert bool(found["bias"]) or found["heatmap_of"] == "attention"


def test_alibis_bias_is_its_slopes():
    found = drawn("alibi")
    for entry in found["bias"]:
        slope = alibi_slopes(4)[entry["head"]]
        want = [-slope * d for d in found["distances"]]
        assert entry["mean"] == pytest.approx(want, rel=1e-2) and "low" not in entry


def test_ropes_kernel_is_the_mean_cosine():
    found = drawn("rope")
    theta = found["spectrum"][0]["now"]
    want = [sum(math.cos(d * t) for t in theta) / len(theta) for d in found["kernel_distances"]]
    assert found["kernel"][0]["mean"] == pytest.approx(want, abs=6e-3)
    assert found["kernel"][0]["head"] is None and found["singular"] == []


def test_contents_make_bands_and_gates():
    found = drawn("fox", kv_shift=True)
    assert all("low" in entry for entry in found["bias"])
    names = {gate["name"].split(":")[0] for gate in found["gates"]}
    assert names == {"share of weight kept for each token passed", "KV-shift"}
    for gate in found["gates"]:
        for quantiles in gate["quantiles"]:
            assert quantiles == sorted(quantiles) and quantiles[0] >= 0 and quantiles[-1] <= 1


def test_a_large_model_still_fits():
    model = make_model("grape-a-qk", layers=6, heads=12)
    tokens = torch.randint(0, 64, (1, 300), generator=torch.Generator().manual_seed(2))
    found = picture(model, tokens, ["word"] * 300)
    assert found["tokens"] == 256 and len(found["words"]) == 28
    assert len(json.dumps(found)) < 150_000
    assert {entry["layer"] for entry in found["bias"]} == {0, 2, 3, 5}


def test_observing_leaves_no_trace():
    model = make_model("grape-ap", kv_shift=True).train()
    observe(model, TOKENS)
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_that_diverged_still_has_a_picture():
    model = make_model("liere")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    assert json.dumps(picture_or_figures(picture(model, TOKENS, TEXT)), allow_nan=False)


def picture_or_figures(found):
    return [figure.payload() for figure in picture_figures(found, LOOK, "p")]


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        picture(make_model("rope"), TOKENS[:1], TEXT)


def test_an_encoding_alone_has_a_picture():
    enc = grape.build("grape-ap", heads=4, head_dim=8, width=32)
    found = encoding_picture(enc, "grape-ap", tokens=32)
    assert found["breaks_relative_law"] and len(found["bias"]) == 4
