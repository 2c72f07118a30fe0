"""The report in a real browser: no errors, every figure drawn, readable narrow and wide, light and dark."""

from __future__ import annotations

import time

import pytest

from browser import open_browser, require_browser, set_screen
from grape_pe.lab.inspect.inspection import inspect
from grape_pe.lab.report import write_report
from grape_pe.lab.report.page import picture_page, write_page
from report_data import ARMS, write_synthetic

SOME = [arm for arm in ARMS if arm["label"] in ("rope", "grape-m", "fox+kv", "grape-ap")]
PATIENCE = 60.0  # seconds, for machines that do much else; a quiet one needs two
GROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 28)"}

OPEN_ALL = """
document.querySelectorAll('details').forEach((d) => { d.open = true; });
window.dispatchEvent(new Event('beforeprint'));
"""
COUNT = """
const plots = [...document.querySelectorAll('.plot')];
const drawn = plots.filter((p) => p.querySelector('.main-svg') && p.querySelector(
  '.scatterlayer .trace, .heatmaplayer image, .barlayer .trace, .boxlayer .trace'));
const missing = plots.filter((p) => !drawn.includes(p)).map((p) => p.dataset.figure);
return {total: plots.length, missing,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  wide: plots.filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.dataset.figure),
  ground: getComputedStyle(document.body).backgroundColor,
  ink: plots.at(-1).querySelector('.xtick text')?.style.fill,
  small: plots.filter((p) => p.clientWidth < 150).map((p) => p.dataset.figure)};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    require_browser()
    with open_browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    require_browser()
    directory = write_synthetic(tmp_path_factory.mktemp("synthetic"), SOME)
    return write_report([directory], directory / "report.html")


def wait_until_drawn(window, inks=()):
    """What the page says once nothing is missing and labels left the `inks` of before (or in a minute)."""
    end = time.monotonic() + PATIENCE
    while True:
        found = window.execute_script(COUNT)
        if not (found["missing"] or found["ink"] in inks) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def draw(window, figure):
    """Scroll a figure into view and wait for it."""
    script = "const p = document.querySelector(`[data-figure='${arguments[0]}']`); p.scrollIntoView();"
    end = time.monotonic() + PATIENCE
    while not window.execute_script(f"{script} return p.querySelector('.main-svg');", figure):
        assert time.monotonic() < end, f"{figure} was never drawn"
        time.sleep(0.05)


def errors(window):
    return [entry for entry in window.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("width, height", [(1280, 900), (400, 800)])
def test_the_report_is_drawn_and_fits_light_and_dark(browser, page, width, height):
    """The page is loaded light and then turned dark, as a system does in the evening."""
    inks = set()
    for theme in ("light", "dark"):
        set_screen(browser, width, height, theme)
        if theme == "light":
            browser.get(page.as_uri())
            browser.execute_script(OPEN_ALL)
        found = wait_until_drawn(browser, inks)
        assert found["total"] > 25 and found["missing"] == []
        assert found["overflow"] <= 0 and found["wide"] == [] and found["small"] == []
        assert found["ground"] == GROUND[theme]
        assert errors(browser) == []
        inks.add(found["ink"])
    assert len(inks) == 2


def wait_for_first(window):
    """The colour of the first figure's tick labels, once there are some."""
    end = time.monotonic() + PATIENCE
    script = "const t = document.querySelector('.plot .xtick text'); return t && t.style.fill;"
    while (fill := window.execute_script(script)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return fill


def test_only_what_is_near_the_screen_is_drawn(browser, page):
    set_screen(browser, 1280, 900, "light")
    browser.get(page.as_uri())
    wait_for_first(browser)
    drawn = browser.execute_script("return document.querySelectorAll('[data-drawn]').length")
    assert 0 < drawn < 12


def test_chips_hide_an_encoding_everywhere_and_views_can_be_chosen(browser, page):
    set_screen(browser, 1280, 900, "light")
    browser.get(page.as_uri())
    for figure in ("extrapolation-full", "picture-0-bias"):
        draw(browser, figure)
    traces = (
        "return document.querySelectorAll('[data-figure=\"extrapolation-full\"] .scatterlayer .trace').length"
    )
    before = browser.execute_script(traces)
    browser.execute_script("document.querySelector('.chip[data-arm=\"rope\"]').click()")
    assert browser.execute_script(traces) == before - 2  # the line and its band
    heading = "return document.querySelector('tbody th').textContent.trim()"
    best = browser.execute_script(heading)
    browser.execute_script("document.querySelectorAll('thead button')[5].click()")  # slowest first
    browser.execute_script("document.querySelectorAll('thead button')[5].click()")  # fastest first
    assert browser.execute_script(heading) == "rope" != best
    changed = browser.execute_script(
        "const f = document.querySelector(\"[data-figure='picture-0-bias']\").closest('figure');"
        "const s = f.querySelector('select');"
        "const y = () => JSON.stringify(f.querySelector('.plot').data[1].y); const a = y();"
        "s.value = 1; s.dispatchEvent(new Event('change')); return a !== y();"
    )
    assert changed and errors(browser) == []


def test_the_picture_page_of_one_encoding(browser, tmp_path):
    found = inspect("grape-m+grape-a-qk", heads=4, head_dim=8)
    path = write_page(picture_page(found.encoding, found.picture), tmp_path / "picture.html")
    set_screen(browser, 400, 800, "dark")
    browser.get(path.as_uri())
    browser.execute_script(OPEN_ALL)
    seen = wait_until_drawn(browser)
    assert seen["total"] == 7 and seen["missing"] == [] and seen["overflow"] <= 0
    assert errors(browser) == []
