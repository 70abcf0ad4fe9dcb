"""HTML as a tree, so that text cannot become markup.

Everything on a page is a text or an attribute of an element; what is special in HTML is escaped
when the tree is written, in one place, by the standard library. Only `style` is written as it is,
and takes this package's own text alone.
"""

import re
from collections.abc import Iterable
from unicodedata import category
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None


def tag(name: str, /, *children: Child | Iterable[Child], **attributes: str | None) -> Element:
    """An element; attributes are spelled as in `class_`, `data_plot`; None leaves one out."""
    made = Element(
        name,
        {
            key.rstrip("_").replace("_", "-"): readable(value)
            for key, value in attributes.items()
            if value is not None
        },
    )
    for child in children:
        if child is None or isinstance(child, Element | str):
            _add(made, child)
        else:
            for each in child:
                _add(made, each)
    return made


def breakable(name: str) -> list[Child]:
    """A long name that may be broken after its separators."""
    pieces = re.findall(r"[^:,_/]*[:,_/]?", name)
    made: list[Child] = []
    for piece in filter(None, pieces):
        made += [tag("wbr"), piece] if made else [piece]
    return made


def document(html: Element) -> bytes:
    """The page as a file."""
    text = tostring(html, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode()


def readable(text: str) -> str:
    """Without what no page can hold: control characters, and halves of characters.

    A file name that is no text comes with the latter.
    """
    return "".join("\ufffd" if category(c) in ("Cc", "Cs") and c not in "\t\n" else c for c in text)


def _add(parent: Element, child: Child) -> None:
    if isinstance(child, Element):
        parent.append(child)
    elif child is not None:
        text = child if parent.tag == "style" else readable(child)
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + text
        else:
            parent.text = (parent.text or "") + text
