"""How two configurations differ, in words for an error message."""

from typing import Any

SHOWN = 3  # differing keys that are named
_ABSENT = object()


def difference_of(there: Any, here: Any) -> str:
    """The first keys whose values differ; empty if none does."""
    before, now = _flat(there), _flat(here)
    keys = [
        key
        for key in dict.fromkeys([*now, *before])
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]
    shown = [f"{key} is {_show(before, key)} there, {_show(now, key)} here" for key in keys[:SHOWN]]
    rest = [f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return ", ".join(shown + rest)


def _show(flat: dict[str, Any], key: str) -> str:
    text = repr(flat[key]) if key in flat else "not set"
    return text if len(text) <= 40 else text[:39] + "…"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys with dots between: {"a": {"b": 1}} is {"a.b": 1}."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat |= _flat(child, f"{prefix}.{key}" if prefix else key)
    return flat
