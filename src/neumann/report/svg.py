"""matplotlib's SVG as a part of a page: its colours follow the page, its curves can be found.

Colours of the palette become CSS variables, so that dark mode needs no second picture. Text takes
the page's font. A group that the drawing named gets data attributes and a tooltip; ids are made
unique by the plot's name. What matplotlib writes besides (metadata, comments, sizes) goes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, fromstring

from neumann.report.markup import readable
from neumann.report.palette import variable

_COLOUR = re.compile(r"#[0-9a-f]{6}\b", re.IGNORECASE)
_FAMILY = re.compile(r"font(-family)?:[^;]*'[^;]*(;|$)")
_SIZE = re.compile(r"([\d.]+)px")


@dataclass(frozen=True)
class Named:
    """What a group of the picture is."""

    curve: str  # the arm
    part: str


def embedded(svg: str, plot: str, label: str, names: Mapping[str, Named]) -> Element:
    """The picture as an element of a page.

    Args:
        svg: as matplotlib wrote it.
        plot: the name of the plot, which its ids begin with.
        label: what a screen reader says.
        names: what the groups with these ids are.
    """
    root = fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) == "metadata":
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            element.set(_local(key), _styled(value) if key == "style" else value)
        name = names.get(element.get("id", ""))
        if name is not None:
            element.set("data-curve", readable(name.curve))
            element.set("data-part", name.part)
            _tooltip(element, f"{name.curve}: {name.part}" if name.part != "mean" else name.curve)
    _prefix(root, plot)
    box = root.get("viewBox", "")
    root.attrib.clear()
    for key, value in (("viewBox", box), ("role", "img"), ("aria-label", label)):
        root.set(key, readable(value))
    return root


def _tooltip(element: Element, text: str) -> None:
    title = SubElement(element, "title")
    title.text = readable(text)
    element.remove(title)
    element.insert(0, title)


def _prefix(root: Element, plot: str) -> None:
    for element in root.iter():
        for key, value in element.items():
            if key == "id":
                element.set(key, f"{plot}-{value}")
            elif key == "href" and value.startswith("#"):
                element.set(key, f"#{plot}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{plot}-"))


def _styled(style: str) -> str:
    style = _FAMILY.sub(_size_alone, style)
    return _COLOUR.sub(lambda match: variable(match[0].lower()) or match[0], style).strip()


def _size_alone(match: re.Match[str]) -> str:
    size = _SIZE.search(match[0])
    return f"font-size: {size[0]};" if size else ""


def _local(name: object) -> str:
    return str(name).rpartition("}")[2]
