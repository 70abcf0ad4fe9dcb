"""Colors and line styles: an arm looks the same in every plot, table and legend of a page.

The colors follow Okabe and Ito, so color-blind readers can tell them apart; they are darkened for
white and lightened for dark pages. Six colors and four line styles tell twelve arms apart.
"""

from dataclasses import dataclass
from typing import Any

ARMS = (  # (on white, on a dark page)
    ("#0072b2", "#5ab4f0"),
    ("#d55e00", "#ff9a5c"),
    ("#008a64", "#3fd0a4"),
    ("#b0578f", "#ec9fcf"),
    ("#c08000", "#f2c14e"),
    ("#4a5568", "#c3cad6"),
)
# Plots are drawn with these; on the page, CSS variables replace them. No arm uses one of them.
INK, MUTED, GRID, SHADE, PAPER = "#1c2430", "#5b6675", "#d9dee6", "#eef1f5", "#ffffff"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SHADE: "shade", PAPER: "paper"} | {
    light: f"arm-{index}" for index, (light, _) in enumerate(ARMS)
}

Dashes = tuple[float, ...]  # lengths of line and gap in line widths; empty: a solid line
DASHES: tuple[Dashes, ...] = ((), (5.0, 2.0), (7.0, 1.8, 1.4, 1.8), (1.4, 1.6))
MARKERS = ("", "o", "s", "^", "D")  # tell later arms apart
WIDTH = 1.8  # of a line

# Where an arm has several curves in one plot, the line style says which is which.
HOLLOW = "not converged"  # rings without a line
PARTS: dict[str, Dashes] = {
    "plain": (),
    "recalibrated": (3.0, 1.6),
    "repulsive force": (),
    "attractive force": (3.0, 1.6),
    "probe batch": (),
    "current batch": (3.0, 1.6),
    "scheduled": (1.0, 1.4),
    HOLLOW: (),
}


@dataclass(frozen=True)
class LineStyle:
    color: str  # on white
    dashes: Dashes
    marker: str  # matplotlib's name; empty: none
    hollow: bool = False

    @property
    def css_color(self) -> str:
        return css_color(self.color)

    @property
    def css_dashes(self) -> str:
        return " ".join(f"{length * WIDTH:g}" for length in self.dashes) or "none"

    def line_options(self, *, dots: bool) -> dict[str, Any]:
        """Return matplotlib's options for the line; with `dots`, a dot marks each point."""
        return {
            "color": self.color,
            "linestyle": "None" if self.hollow else (0, self.dashes) if self.dashes else "-",
            "marker": "o" if dots else self.marker or "None",
            "markerfacecolor": PAPER if self.hollow else None,
        }


def line_style(index: int, part: str = "mean") -> LineStyle:
    color = ARMS[index % len(ARMS)][0]
    if part in PARTS:
        marker = MARKERS[index // len(ARMS) % len(MARKERS)]
        return LineStyle(color, PARTS[part], marker, hollow=part == HOLLOW)
    marker = MARKERS[index // 12 % len(MARKERS)]
    return LineStyle(color, DASHES[index % len(DASHES)], marker)


def css_color(color: str) -> str:
    """Return the page's CSS variable for a color of the palette; other colors unchanged."""
    name = VARIABLES.get(color.lower())
    return color if name is None else f"var(--{name})"
