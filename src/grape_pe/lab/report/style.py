"""How arms look: one colour, dash and marker for each, the same in every figure.

Colours are written as CSS variables ("var(--arm-3)", with "@0.2" for opacity) and resolved by the page's
script, so that figures follow light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .results import ArmResults

# Nine hues a palette, found by search: to normal eyes and with simulated protanopia, deuteranopia and
# tritanopia the first eight are at least 12 apart in OKLab (x 100), the ninth 8 from any; each has 3:1
# contrast or more with the ground.
LIGHT = ("#1b62c2", "#eb6d0b", "#11a499", "#9d377c", "#a87aec", "#57590f", "#19168c", "#550932", "#906c63")
DARK = ("#1d77e0", "#f78a13", "#45c195", "#bd3998", "#bea3fd", "#82762b", "#97fdfb", "#f5e31e", "#998b9c")
#: plotly's name of a dash, and the same dash in SVG
DASHES = {
    "solid": "",
    "dash": "6 3",
    "dot": "2 3",
    "dashdot": "6 3 2 3",
    "longdash": "10 3",
    "longdashdot": "9 2 2 2",
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")


@dataclass(frozen=True)
class Style:
    """The look of one arm."""

    hue: int
    dash: str
    symbol: str

    @property
    def color(self) -> str:
        return f"var(--arm-{self.hue})"

    def faint(self, opacity: float) -> str:
        return f"{self.color}@{opacity}"

    @property
    def swatch(self) -> str:
        """A short line in SVG."""
        dashed = f' stroke-dasharray="{DASHES[self.dash]}"' if DASHES[self.dash] else ""
        return (
            '<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true"><line x1="1" y1="6" x2="25" y2="6" '
            f'stroke-width="3" stroke="{self.color}"{dashed}/></svg>'
        )


Looks = Mapping[str, Style]


def styles(arms: Sequence[ArmResults]) -> dict[str, Style]:
    """Label to style. Arms of one encoding (with and without KV-shift) share a hue and differ in dash;
    from the tenth encoding on, hues come again with other dashes."""
    families: dict[str, int] = {}
    out: dict[str, Style] = {}
    for arm in arms:
        family = families.setdefault(str(arm.arm.encoding), len(families))
        hue = family % len(LIGHT)
        variant = sum(style.hue == hue for style in out.values())
        dash = list(DASHES)[variant % len(DASHES)]
        out[arm.label] = Style(hue, dash, SYMBOLS[(family + 3 * variant) % len(SYMBOLS)])
    return out


def palette_css() -> str:
    """The variables of both palettes."""
    light, dark = ("".join(f"--arm-{i}:{c};" for i, c in enumerate(colors)) for colors in (LIGHT, DARK))
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
