"""Legends of the page: they wrap on a phone, where a legend inside a picture cannot."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from neumann.report.curves import Curve
from neumann.report.markup import breakable, tag
from neumann.report.palette import HOLLOW, PARTS, WIDTH, style_of, variable

FEW, LETTERS = 6, 120  # arms, and their names together, of a legend that may stay in view


def swatch(place: int, part: str = "mean", *, neutral: bool = False) -> Element:
    """A piece of the line as it is drawn; `neutral` shows the line style alone."""
    style = style_of(place, part)
    colour = "var(--muted)" if neutral else variable(style.colour)
    dashes = " ".join(f"{length * WIDTH:g}" for length in style.dashes) or "none"
    line = f"stroke: {colour}; stroke-width: {WIDTH + 0.4}; stroke-dasharray: {dashes}"
    if part == HOLLOW:
        ring = f"fill: none; stroke: {colour}; stroke-width: {WIDTH}"
        children = [tag("circle", cx="16", cy="5", r="3.4", style=ring)]
        return _picture(children)
    children = [tag("line", x1="1", x2="31", y1="5", y2="5", style=line)]
    if style.marker:
        children.append(tag("circle", cx="16", cy="5", r="3", style=f"fill: {colour}"))
    return _picture(children)


def _picture(children: list[Element]) -> Element:
    return tag(
        "svg",
        children,
        class_="swatch",
        viewBox="0 0 32 10",
        width="32",
        height="10",
        aria_hidden="true",
    )


def legend(arms: Sequence[tuple[str, int]]) -> Element:
    """Names and places of arms."""
    items = [
        tag("li", swatch(place), tag("span", breakable(name)), data_arm=name)
        for name, place in arms
    ]
    return tag("ul", items, class_="legend")


def is_short(arms: Sequence[tuple[str, int]]) -> bool:
    """Whether a legend of these takes little enough room to stay in view."""
    return len(arms) <= FEW and sum(len(name) for name, _ in arms) <= LETTERS


def parts_legend(curves: Sequence[Curve]) -> Element | None:
    """What line styles mean, where they mean something else than the arm."""
    parts = [part for part in PARTS if any(curve.part == part for curve in curves)]
    if not parts:
        return None
    items = [tag("li", swatch(0, part, neutral=True), tag("span", part)) for part in parts]
    return tag("ul", items, class_="legend parts")
