"""The atlas and `grape encodings`: facts of every encoding, documents made from them, the page."""

from __future__ import annotations

import json
import math
import re
import runpy
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from browser import open_browser, set_screen
from grape_pe import cli, testing
from grape_pe.encodings.facts import Facts
from grape_pe.encodings.registry import entry, facts
from grape_pe.lab.atlas import cost
from grape_pe.lab.atlas.entries import measure, measure_all
from grape_pe.lab.atlas.page import atlas_page, formula_html
from grape_pe.testing.laws import deviation

ROOT = Path(__file__).parent.parent
NEEDED = [field.name for field in fields(Facts) if field.name not in ("recovers", "learned", "law_with")]


def test_measuring_leaves_the_random_state():
    before = torch.get_rng_state()
    measure("grape-m", timed=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_encoding_has_facts():
    lacking = [name for name in grape.names() if facts(name) is None]
    assert not lacking, f"no Facts in the attribute `facts` of the classes of: {', '.join(lacking)}"


@pytest.mark.parametrize("name", [name for name in grape.names() if facts(name) is not None])
def test_facts_are_complete_and_true(name: str):
    said = facts(name)
    assert all(getattr(said, field).strip() for field in NEEDED)
    assert "\n" not in said.about and len(said.about) <= 90
    assert not re.search(r"\{[^}]*$|_$|\^$", said.formula)
    enc = grape.build(name, heads=2, head_dim=8, width=8)
    assert bool(said.learned) == bool(list(enc.parameters()))
    if said.law_with:
        assert enc.breaks_relative_law
        testing.assert_relative_law(grape.build(name, heads=2, head_dim=8, width=8, **said.law_with))


def test_facts_are_of_registered_names():
    """A subclass does not inherit what is said of its base."""
    for name in grape.names():
        for each in entry(name).cls.facts:
            assert each.name in grape.names() and facts(each.name).about == each.about


def test_documents_are_made_from_the_registry():
    for path, text in runpy.run_path(str(ROOT / "tools/atlas.py"))["documents"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run python tools/atlas.py"


def test_options_have_the_defaults_of_what_is_built():
    assert entry("grape-a-dict").options()["atoms"] == 4
    assert "learned" not in entry("rope").options()
    basis = entry("grape-m-basis").options()
    assert basis["learned"] is True and basis["base"] == 10_000.0  # its own before those of its base


def test_a_deviation_sees_what_is_not_finite():
    one, inf = torch.ones(2), torch.tensor([1.0, -math.inf])
    assert deviation(inf, inf) == 0.0
    assert deviation(inf, one) == deviation(one, inf) == math.inf
    assert deviation(one * math.nan, one) == math.inf
    assert deviation(3 * one, 2 * one) == 0.5


def test_numbers_tell_laws_that_hold_from_laws_that_do_not():
    found = {
        name: testing.law_errors(grape.build(name, heads=2, head_dim=8, width=8)) for name in grape.names()
    }
    assert found["grape-ap"].relative > 1e-2 and found["grape-ap"].composition > 1e-2
    assert found["rope"].composed == "G(n) G(m) = G(n + m)" and found["rope"].composition < 1e-5
    assert found["fox"].composed.startswith("b(t, j)") and found["alibi"].composition == 0
    assert found["grape-a-shift"].largest_bias > 0 and "non-positive" not in found["grape-a-shift"].kept()
    assert all("streaming" in each.kept() for each in found.values())


def test_encodings_are_listed_and_described(capsys):
    assert cli.main(["encodings"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(name)} ", listed, re.M) for name in grape.names())
    assert max(map(len, listed.splitlines())) <= 120
    assert cli.main(["encodings", "grape-ap"]) == 0
    said = capsys.readouterr().out
    assert "probe_rotation='key'" in said and "not relative" in said and "arXiv:2512.07805" in said
    assert cli.main(["encodings", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["fox"]["options"] == {"forget_bias": 0.0} and "composition" in found["fox"]["laws"]
    assert cli.main(["encodings", "foxx"]) == 2
    assert "did you mean fox" in capsys.readouterr().err


def test_formulas_are_marked_up_and_escaped():
    assert formula_html("s_h <q, k> x_{ij}^T `a_b`".replace("`a_b`", "`ab`")) == (
        "s<sub>h</sub> &lt;q, k&gt; x<sub>ij</sub><sup>T</sup> <code>ab</code>"
    )


class Marked(grape.Encoding):
    """Facts with characters that HTML reads."""

    facts = (Facts("marked", "a <b> & 'c'", "G_n = <I>", 'none: "x"', "A & B, 2020, arXiv:2001.00001"),)

    def encode(self, tokens, state):
        return grape.Encoded(tokens.q, tokens.k, grape.NoBias())


class Outline(HTMLParser):
    """Ids, links, and what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found["id"]} if found.get("id") else set()
        self.links += [found["href"]] if tag == "a" and found.get("href") else []
        self.fetched += [value for key in ("src", "srcset") if (value := found.get(key))]


@pytest.fixture(scope="module")
def entries():
    from grape_pe.encodings import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "ENTRIES", dict(registry.ENTRIES))
        patch.setattr(cost, "TOKENS", 48)
        patch.setattr(cost, "ROUNDS", 1)
        grape.register("marked", Marked)
        told: list[str] = []
        found = measure_all(
            ["rope", "alibi", "grape-ap", "path", "marked"], lambda _, name: told.append(name)
        )
        assert told == [each.name for each in found]
        yield found


def test_the_page_needs_nothing_else(entries):
    text = atlas_page(entries)
    outline = Outline()
    outline.feed(text)
    assert not outline.fetched
    inside = {link[1:] for link in outline.links if link.startswith("#")}
    assert inside <= outline.ids and {f"encoding-{each.name}" for each in entries} <= inside
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL).group(1))
    drawn = re.findall(r'data-figure="([^"]+)"', text)
    assert sorted(drawn) == sorted(figures) and {f"encoding-{each.name}-reach" for each in entries} <= set(
        drawn
    )
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # without plotly
    assert len(own) < 300_000 and own.count('<svg class="spark"') == len(entries)
    assert "a &lt;b&gt; &amp; 'c'" in own and "<b>" not in own
    assert 'href="https://arxiv.org/abs/2001.00001"' in text


def test_what_is_measured(entries):
    rope, alibi, path_integral, path, _ = entries
    assert rope.extra_bytes == 0 and alibi.extra_bytes == 8 and path_integral.extra_bytes == 8 * 8 * 4
    assert (rope.bias, alibi.bias, path_integral.bias, path.bias) == ("none", "slope", "path", "tile")
    assert not rope.picture["bias"] and len(rope.picture["kernel"]) == 1
    bias, reach = alibi.picture["bias"], [each["half"] for each in alibi.picture["reach"]]
    assert len(bias) == len(reach) == 8 and bias[0]["mean"][1] == pytest.approx(-0.5)
    assert reach[0] <= 2 < reach[-1]
    assert all(each.cost.train > 0 and each.cost.decode > 0 for each in entries)
    assert measure("rope", timed=False).cost is None


def test_the_command_writes_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "TOKENS", 32)
    out = tmp_path / "new" / "atlas.html"
    assert cli.main(["atlas", "--encodings", "nope", "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == f"Atlas: {out}\n" and "encoding-nope" in out.read_text()
    assert cli.main(["atlas", "--encodings", "rope,noope", "--out", str(out)]) == 2
    assert "did you mean nope" in capsys.readouterr().err


@pytest.mark.slow
def test_sorting_and_filtering_in_a_browser(entries, tmp_path):
    page = tmp_path / "atlas.html"
    page.write_text(atlas_page(entries))
    names = (
        "return [...document.querySelectorAll('tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => row.children[0].dataset.value)"
    )
    with open_browser(tmp_path / "profile") as window:
        set_screen(window, 400, 800, "light")
        window.get(page.as_uri())
        assert window.execute_script("return document.documentElement.scrollWidth") <= 400
        by_cache = "document.querySelectorAll('thead button')[7].click();"
        assert window.execute_script(by_cache + names)[-1] == "path"
        typed = "const f = document.querySelector('.filter'); f.value = 'alibi'; f.dispatchEvent(new Event('input'));"
        assert sorted(window.execute_script(typed + names)) == ["alibi", "grape-ap"]  # which contains ALiBi
        picked = "document.querySelector('[data-word=\"law:relative\"]').click();"
        assert window.execute_script(picked + names) == ["alibi"]
        assert window.execute_script("return document.querySelector('.count').textContent") == "1 of 5"
        assert not [line for line in window.get_log("browser") if line["level"] == "SEVERE"]
