"""A hook of mkdocs: formulas become MathML while the site is built, so that pages show them without scripts.
Numbers like `2.19 ± 0.01` are kept on one line.

arithmatex marks formulas in the HTML of a page; here each is converted. `\\tag{M3}` puts the label at the
right-hand edge and gives the formula the address `#eq-m3`.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
TAG = re.compile(r"\\tag\{(\w+)\}")
#: what browsers ignore, and what they understand instead
SPACES = {"negativethinmathspace": "-0.167em"}
FRAKTUR = {letter: f"&#x{0x1D51E + index:X};" for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
WORD = re.compile(r'<mrow>((?:<mi mathvariant="normal">[A-Za-z]</mi>){2,})</mrow>')
RANGE = re.compile(r"(?<=\d) (±|…) (?=[+-]?\d)")
NOT_CONVERTED = re.compile(r"<m[ion][^>]*>\\[^<]*</m[ion]>")


class FormulaError(ValueError):
    """A formula that has no MathML; the message shows it."""


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    content = RANGE.sub("\u00a0\\1\u00a0", content)
    content = BLOCK.sub(lambda found: display(html.unescape(found[1])), content)
    return INLINE.sub(lambda found: mathml(html.unescape(found[1])), content)


def display(latex: str) -> str:
    """A formula on a line of its own, with its label."""
    tag = TAG.search(latex)
    math = mathml(TAG.sub("", latex), "block")
    if tag is None:
        return f'<div class="formula">{math}</div>'
    label = f'<span class="formula-label">({tag[1]})</span>'
    return f'<div class="formula" id="eq-{tag[1].lower()}">{math}{label}</div>'


def mathml(latex: str, kind: str = "inline") -> str:
    """The formula as an element that browsers draw themselves."""
    try:
        out = convert(latex.strip(), display=kind)
    except Exception as problem:
        raise FormulaError(f"no MathML for ${latex.strip()}$: {problem!r}") from problem
    out = _for_browsers(out)
    if unknown := NOT_CONVERTED.search(out):
        raise FormulaError(f"{unknown[0]} has no MathML, in ${latex.strip()}$")
    return out


def _for_browsers(out: str) -> str:
    for name, width in SPACES.items():
        out = out.replace(f'width="{name}"', f'width="{width}"')
    out = re.sub(r'<mi mathvariant="fraktur">([a-z])</mi>', lambda m: f"<mi>{FRAKTUR[m[1]]}</mi>", out)
    out = re.sub(r">\\([{}])</mo>", r">\1</mo>", out)  # \bigl\{ keeps its backslash
    out = WORD.sub(lambda m: f"<mi>{''.join(re.findall(r'>(.)<', m[1]))}</mi>", out)  # one word, upright
    return out.replace(' mathvariant="monospace"', ' class="code"')
