"""The documentation: every page reachable, every link and formula good, every command one that exists."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import griffe
import pytest
import yaml

from grape_pe import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [*PAGES, ROOT / "README.md"]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?!\s)([^$]+?)(?<![\s\\])\$(?![\w$])", re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tool(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / f"{name}.py")))


def prose(path: Path) -> str:
    return CODE.sub("", path.read_text(encoding="utf-8"))


def nav_pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        for each in entry:
            yield from nav_pages(each)


def test_the_navigation_has_every_page_once():
    listed = list(nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def anchors(path: Path) -> set[str]:
    """The addresses of a page's headings, made as Python-Markdown makes them."""
    from markdown.extensions.toc import slugify, unique

    used: set[str] = set()
    for title in re.findall(
        r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M
    ):
        unique(slugify(title.replace("`", ""), "-"), used)
    return used


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_links_lead_somewhere(path: Path):
    for target in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{named(path)} links to {target}"
        if anchor:
            assert anchor in anchors(page), f"{named(path)} links to {target}, which has no such heading"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_formulas_become_mathml(path: Path):
    formulas = tool("formulas")
    for block, inline in MATH.findall(prose(path)):
        shown = formulas.display(block) if block else formulas.mathml(inline)
        assert "<math" in shown and "\\" not in re.sub(r"<mtext.*?</mtext>", "", shown), block or inline


def test_a_formula_without_mathml_is_an_error():
    formulas = tool("formulas")
    with pytest.raises(formulas.FormulaError, match="frobnicate"):
        formulas.mathml(r"\frobnicate{x}")


def test_formulas_have_what_browsers_need():
    formulas = tool("formulas")
    assert 'id="eq-m3"' in formulas.display(r"x=1\tag{M3}") and "(M3)" in formulas.display(r"x=1\tag{M3}")
    assert "<mi>slope</mi>" in formulas.mathml(r"\mathrm{slope}_h")
    assert "&#x1D530;" in formulas.mathml(r"\mathfrak{s}")
    assert 'width="-0.167em"' in formulas.mathml(r"a\!b")


def commands(path: Path) -> list[str]:
    """Lines of code and whole code spans that begin with `grape `, without comments and placeholders."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?: {4}|\$ )?(?:torchrun .*? -m )?(grape [a-z].*)$", text, re.M)
    spans = re.findall(r"`(grape [a-z][^`\n]*)`", text)
    said = [re.split(r"\s#\s| > | \| | && ", line)[0].strip() for line in (*lines, *spans)]
    return [line for line in said if not re.search(r"\b[A-Z]{3,}\b|…", line)]


parser = functools.cache(cli.parser)


def parses(line: str) -> bool:
    options = shlex.split(line)[1:]
    try:
        _, left = parser().parse_known_args(options)
    except SystemExit as end:
        return end.code == 0
    return not left


def is_a_name(line: str) -> bool:
    """`grape bench attention` in a sentence may stand for the command with anything after it."""
    words = line.split()[1:]
    return len(words) <= 2 and parses(f"grape {' '.join(words)} --help")


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_commands_exist(path: Path, capsys):
    for line in commands(path):
        assert parses(line) or is_a_name(line), f"{named(path)}: {line}\n{capsys.readouterr().err}"


def test_the_check_of_commands_can_fail():
    assert parses("grape compare demo --seeds 2")
    assert not parses("grape compare demo --seads 2")
    assert not parses("grape comparison demo") and not is_a_name("grape comparison")


def test_every_command_is_documented():
    text = (DOCS / "commands.md").read_text()
    top = parser()._subparsers._group_actions[0].choices
    for name in top:
        assert f"`grape {name}" in text, f"docs/commands.md does not mention grape {name}"


@functools.cache
def api() -> list[griffe.Object]:
    """The functions and classes shown by docs/api."""
    package = griffe.load("grape_pe", search_paths=[ROOT / "src"])
    lines = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    found = (package[name] for name in re.findall(r"^::: grape_pe\.([\w.]+)$", lines, re.M))
    return [each.final_target if each.is_alias else each for each in found]


def parameters(shown: griffe.Object) -> list[str]:
    """What the docstring should describe: arguments, or the fields of a dataclass."""
    if shown.is_class and "dataclass" in shown.labels:
        own = (each for each in shown.members.values() if not each.is_alias and each.is_attribute)
        fields = (each for each in own if each.annotation and "property" not in each.labels)
        return [each.name for each in fields if "ClassVar" not in str(each.annotation)]
    function = shown.members.get("__init__") if shown.is_class else shown
    given = function.parameters if isinstance(function, griffe.Function) else ()
    names = [each.name.lstrip("*") for each in given]
    return names[1:] if shown.is_class else names


def described(shown: griffe.Object) -> set[str]:
    parts = shown.docstring.parse("google", warnings=False) if shown.docstring else []
    return {row.name.lstrip("*") for part in parts if part.kind.value == "parameters" for row in part.value}


def test_the_reference_describes_every_parameter():
    assert len(api()) > 120
    missing = {each.path: sorted({*parameters(each)} - described(each)) for each in api()}
    missing.pop("grape_pe.lab.tasks.base.Task")  # its other fields are constants of each task's class
    assert not {path: names for path, names in missing.items() if names}


def test_figures_are_drawn_and_used():
    pages = (DOCS / "idea.md").read_text() + (ROOT / "README.md").read_text()
    used = set(re.findall(r"assets/([\w-]+\.svg)\)", pages))
    assert used == {path.name for path in (DOCS / "assets").glob("*.svg")}


class Resources(HTMLParser):
    """What a browser would fetch for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed"):
            self.fetched.append(found.get("src") or "")
        if tag == "link" and found.get("rel") != "canonical":
            self.fetched.append(found.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The strict build, cut off from the network by proxies that do not exist."""
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(out)]
    done = subprocess.run(build, cwd=ROOT, env={**os.environ, **nowhere}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_pages_fetch_nothing(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)  # and 404.html
    for page in pages:
        found = Resources()
        found.feed(page.read_text(encoding="utf-8"))
        outside = [each for each in found.fetched if re.match(r"(https?:)?//", each)]
        assert not outside, f"{page.name} fetches {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), (
            sheet.name
        )


@pytest.mark.slow
def test_built_pages_have_formulas_and_reference(site: Path):
    maths = (site / "math.html").read_text(encoding="utf-8")
    assert maths.count("<math") == len(MATH.findall(prose(DOCS / "math.md")))
    assert 'id="eq-a7"' in maths and "arithmatex" not in maths
    for page in sorted((site / "api").glob("*.html")):
        assert page.read_text(encoding="utf-8").count('class="doc doc-object') >= 1, page.name


@pytest.mark.slow
def test_search_works_on_pages_opened_as_files(site: Path, tmp_path: Path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    from browser import open_browser, set_screen

    with open_browser(tmp_path) as window:
        set_screen(window, 1280, 900, "light")  # a narrow screen hides the field
        window.get((site / "index.html").as_uri())
        window.find_element(By.CSS_SELECTOR, ".md-search__input").click()
        window.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("sinks")
        found = ".md-search-result__item"
        items = WebDriverWait(window, 30).until(lambda page: page.find_elements(By.CSS_SELECTOR, found))
        assert any("sinks" in item.text.lower() for item in items)
