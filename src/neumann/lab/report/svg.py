"""matplotlib's SVG as a part of a page: its colors follow the page, and its curves have names.

Colors of the palette become CSS variables, so dark mode needs no second picture, and text takes the
page's font. The plot's name makes ids unique on the page. Metadata and fixed sizes are removed.
"""

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, fromstring, tostring

from neumann.lab.report.palette import css_color

_COLOR = re.compile(r"#[0-9a-f]{6}\b", re.IGNORECASE)
_FONT = re.compile(r"font(-family)?:[^;]*'[^;]*(;|$)")
_FONT_SIZE = re.compile(r"([\d.]+)px")


def embed_svg(svg: str, plot: str, label: str, groups: Mapping[str, tuple[str, str]]) -> str:
    """Return the picture as markup for a page.

    A screen reader says the label. Elements whose id is in `groups` get their arm and part as data
    attributes and as a tooltip.
    """
    root = fromstring(svg)
    for parent in root.iter():
        for child in [child for child in parent if _local_name(child.tag) == "metadata"]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local_name(element.tag)
        group = groups.get(element.get("id", ""))
        attributes = {_local_name(key): value for key, value in element.items()}
        element.attrib.clear()
        element.attrib.update({k: _convert(k, value, plot) for k, value in attributes.items()})
        if group is not None:
            curve, part = group
            element.attrib.update({"data-curve": curve, "data-part": part})
            tooltip = Element("title")
            tooltip.text = curve if part == "mean" else f"{curve}: {part}"
            element.insert(0, tooltip)
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-label": label})
    return tostring(root, encoding="unicode")


def _convert(key: str, value: str, plot: str) -> str:
    """Convert an attribute: colors and fonts to the page's, ids to unique ones."""
    if key == "id":
        return f"{plot}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{plot}-{value[1:]}"
    if key == "style":
        value = _FONT.sub(_keep_font_size, value)
        value = _COLOR.sub(lambda match: css_color(match[0]), value).strip()
    return value.replace("url(#", f"url(#{plot}-")


def _keep_font_size(match: re.Match[str]) -> str:
    size = _FONT_SIZE.search(match[0])
    return f"font-size: {size[0]};" if size else ""


def _local_name(name: str) -> str:
    """Return a name without its XML namespace."""
    return name.rpartition("}")[2]
