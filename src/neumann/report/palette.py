"""Colours and line styles: an arm looks the same in every plot and legend of a page.

Six colours after Okabe and Ito, which colour-blind readers tell apart, darkened to stand out on
white and lightened for dark pages. Line styles go round in fours beside them, so the first twelve
arms differ in their pair, and each of the first six in its colour alone.
"""

from dataclasses import dataclass

# (on white, on a dark page)
ARMS = (
    ("#0072b2", "#5ab4f0"),
    ("#d55e00", "#ff9a5c"),
    ("#008a64", "#3fd0a4"),
    ("#b0578f", "#ec9fcf"),
    ("#c08000", "#f2c14e"),
    ("#4a5568", "#c3cad6"),
)
# Drawn with these and replaced by the page's variables: no arm has one of them.
INK, MUTED, GRID, SHADE = "#1c2430", "#5b6675", "#d9dee6", "#eef1f5"
PAPER = "#ffffff"
ROLES = {INK: "ink", MUTED: "muted", GRID: "grid", SHADE: "shade", PAPER: "paper"}

Dashes = tuple[float, ...]  # lengths of line and gap in line widths; empty is solid
DASHES: tuple[Dashes, ...] = ((), (5.0, 2.0), (7.0, 1.8, 1.4, 1.8), (1.4, 1.6))
MARKERS = ("", "o", "s", "^", "D")  # for further arms
WIDTH = 1.8

# Where a line's style says what of the arm it is.
PARTS: dict[str, Dashes] = {
    "plain": (),
    "recalibrated": (3.0, 1.6),
    "repulsive force": (),
    "attractive force": (3.0, 1.6),
    "probe batch": (),
    "current batch": (3.0, 1.6),
    "scheduled": (1.0, 1.4),
    "not converged": (),
}
HOLLOW = "not converged"  # points without a line


@dataclass(frozen=True)
class Style:
    """How a line is drawn."""

    colour: str  # on white
    dashes: Dashes
    marker: str  # as matplotlib names it; empty: none


def style_of(place: int, part: str = "mean") -> Style:
    """Of the arm at this place."""
    colour = ARMS[place % len(ARMS)][0]
    if part in PARTS:
        return Style(colour, PARTS[part], MARKERS[place // len(ARMS) % len(MARKERS)])
    dashes = DASHES[place % len(DASHES)]
    return Style(colour, dashes, MARKERS[place // 12 % len(MARKERS)])


def variable(colour: str) -> str | None:
    """The page's variable for a colour of a plot; None for others."""
    if colour in ROLES:
        return f"var(--{ROLES[colour]})"
    for index, (light, _) in enumerate(ARMS):
        if colour == light:
            return f"var(--arm-{index})"
    return None
