"""Small charts as SVG files: axes, lines, dots, bars, cells. Texts follow the reader's light or dark scheme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 328, 245
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 40
#: readable on white and on dark grey
COLOURS = ("#2f7ed8", "#e07b1a", "#2f9e57", "#b35bd6", "#d64550", "#8a8a8a")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:13px}"
    ".axis{stroke:#888;stroke-width:1;fill:none}.grid{stroke:#888;stroke-opacity:.25}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}}"
)

Range = tuple[float, float]


class Chart:
    """One panel. Data coordinates go in, SVG comes out."""

    def __init__(
        self, title: str, x: Range, y: Range, xlabel: str = "", ylabel: str = "", square: bool = False
    ) -> None:
        self.title, self.x, self.y = title, x, y
        self.height = TOP + BOTTOM + (WIDTH - LEFT - RIGHT) if square else HEIGHT
        self.parts: list[str] = [self.text(WIDTH / 2, 16, title, "middle", "title")]
        self.legend_rows = 0
        if xlabel:
            self.parts.append(self.text((LEFT + WIDTH - RIGHT) / 2, self.height - 6, xlabel, "middle"))
        if ylabel:
            middle = (TOP + self.height - BOTTOM) / 2
            turned = f'transform="rotate(-90 12 {middle:g})"'
            self.parts.append(
                f'<text x="12" y="{middle:g}" text-anchor="middle" {turned}>{escape(ylabel)}</text>'
            )

    @staticmethod
    def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
        named = f' class="{kind}"' if kind else ""
        return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(content)}</text>'

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a data point lies on the page."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        bottom = self.height - BOTTOM
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(bottom - up * (bottom - TOP), 1)

    def axes(self, xticks: Sequence[float], yticks: Sequence[float], xnames: Sequence[str] = ()) -> Chart:
        for value in yticks:
            (left, y), (right, _) = self.at(self.x[0], value), self.at(self.x[1], value)
            self.parts.append(f'<path class="grid" d="M{left} {y}H{right}"/>')
            self.parts.append(self.text(LEFT - 5, y + 4, f"{value + 0.0:g}", "end"))
        for value, name in zip(xticks, xnames or [f"{value:g}" for value in xticks], strict=True):
            x, y = self.at(value, self.y[0])
            self.parts.append(self.text(x, y + 15, name, "middle"))
        (x0, y0), (x1, y1) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[1])
        self.parts.append(f'<path class="axis" d="M{x0} {y1}V{y0}H{x1}"/>')
        return self

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str, dash: str = "") -> Chart:
        """A polyline; what leaves the panel is left out."""
        low, high = self.y
        inside = [(x, y) for x, y in zip(xs, ys, strict=True) if low <= y <= high]
        path = " ".join(f"{a:g},{b:g}" for a, b in (self.at(x, y) for x, y in inside))
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline class="line" stroke="{colour}"{dashed} points="{path}"/>')
        return self

    def dot(self, x: float, y: float, colour: str, radius: float = 4) -> Chart:
        a, b = self.at(x, y)
        self.parts.append(f'<circle cx="{a}" cy="{b}" r="{radius:g}" fill="{colour}"/>')
        return self

    def bar(self, x: float, y: float, colour: str, width: float = 0.8) -> Chart:
        """From zero to y."""
        (a, b), (c, d) = self.at(x - width / 2, y), self.at(x + width / 2, 0)
        top, height = min(b, d), abs(d - b)
        self.parts.append(
            f'<rect x="{a}" y="{top:g}" width="{c - a:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )
        return self

    def cell(self, x: float, y: float, colour: str, strength: float) -> Chart:
        """A unit square, the more opaque the stronger."""
        (a, b), (c, d) = self.at(x, y + 1), self.at(x + 1, y)
        self.parts.append(
            f'<rect x="{a}" y="{b}" width="{c - a:.1f}" height="{d - b:.1f}" '
            f'fill="{colour}" fill-opacity="{strength:.2f}"/>'
        )
        return self

    def label(self, x: float, y: float, content: str, anchor: str = "start") -> Chart:
        a, b = self.at(x, y)
        self.parts.append(self.text(a, b, content, anchor))
        return self

    def legend(self, content: str, colour: str, x: float, y: float) -> Chart:
        """One row, below the earlier ones; (x, y) is the first row's place in data coordinates."""
        a, b = self.at(x, y)
        b += 16 * self.legend_rows
        self.legend_rows += 1
        self.parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{a} {b:g}h16"/>')
        self.parts.append(self.text(a + 21, b + 4, content))
        return self

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>"]) + "\n"
