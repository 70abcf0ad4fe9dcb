"""Markup injected into every text of the records: a report's page shows it and never runs it.

A case writes the records of a run, a comparison or a sweep, replaces one text in them (or many, or
a key, or a number) by hostile markup, and writes the report. The page may show the text or leave it
out, and the command may refuse the records in one line, but the page has exactly the kinds of
elements and attributes that it has without the injection.
"""

import json
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from neumann.lab.errors import UsageError
from neumann.lab.report import drawing, write_report
from neumann.lab.storage.atomic_files import StorageError
from neumann.lab.training import records
from tests.soak.mutations import list_places
from tests.soak.program import Program, check
from tests.support.fake_records import fake_comparison, fake_run, fake_sweep

MARK = "injected"
PAYLOADS = (
    f"<script>{MARK}()</script>",
    f'"><img src=x onerror="{MARK}()">',
    f"'><svg onload='{MARK}()'>",
    f"</style><script>{MARK}()</script><style>",
    f"--><{MARK}-tag {MARK}=1>",
    f"</title></head><body onload={MARK}()>",
    f"]]><{MARK}-tag>",
    f'" onmouseover="{MARK}()" x="',
    f"' {MARK}='1",
    f"javascript:{MARK}()",
    f"{{{{ {MARK} }}}}{{% raw %}}<b {MARK}>",
    f"$\\frac{{<{MARK}-tag>}}$",
    f"</svg><iframe srcdoc='<script>{MARK}()</script>'>",
    f"\x00<\x00script>{MARK}()</script>\u2028",
    f"&lt;script&gt;<a href=javascript:{MARK}()>x</a>",
    f"}} * {{ background: url(//{MARK}) }}",
    f"a\n<base href='//{MARK}'>\r\n<meta http-equiv=refresh content='0;url=//{MARK}'>",
    "\ud800<script>\udfff",
)
DRAWN = 40  # one case in so many draws its plots, which takes seconds; plots contain names too
RECORDS = ("config.json", "metrics.jsonl", "summary.json", "comparison.json", "sweep.json")


class Pages(Program):
    name = "html"
    counted = ("pages", "refused", "fields")
    weight = 0.5

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self._before = (drawing.draw, records.describe_environment)
        found = records.describe_environment()  # runs git
        records.describe_environment = lambda: found
        self._shapes: dict[str, set[Any]] = {}
        self._templates: dict[str, Path] = {}

    def close(self) -> None:
        drawing.draw, records.describe_environment = self._before

    def run(self, case: int, counts: Counter[str]) -> None:
        chance = self.chance(case)
        kind = ("run", "comparison", "sweep")[case % 3]
        drawn = case % DRAWN == DRAWN - 1
        drawing.draw = (
            self._before[0] if drawn else lambda plot: drawing.Picture("<svg></svg>", b"png")
        )
        allowed = self._read_shape(kind, drawn)
        payload = chance.choice(PAYLOADS)
        name = chance.choice(("records", payload.replace("/", "∕").replace("\x00", "")[:80]))
        if any("\ud800" <= c <= "\udfff" for c in name):
            name = "records"
        folder = self.folder / f"case-{case}" / name
        shutil.copytree(self._template(kind), folder)
        files = sorted(path for path in folder.rglob("*") if path.name in RECORDS)
        if chance.random() < 0.6:  # where most of the texts are
            files = [path for path in files if path.name == "config.json"]
        chosen = chance.sample(files, k=min(len(files), chance.choice((1, 1, 2, 50))))
        often = chance.choice((None, None, None, 0.1, 1.0))
        for path in chosen:
            counts["fields"] += inject(path, payload, chance, often)
        try:
            page = write_report(folder)
        except (UsageError, StorageError) as error:
            check("\n" not in str(error), f"an error of several lines: {error!r}")
            counts["refused"] += 1
        else:
            text = page.read_text(encoding="utf-8", errors="surrogateescape")
            extra = read_shape(text) - allowed
            check(not extra, f"the page has {sorted(map(str, extra))[:3]}")
            counts["pages"] += 1
        shutil.rmtree(self.folder / f"case-{case}")

    def _template(self, kind: str) -> Path:
        folder = self.folder / f"template-{kind}"
        if kind in self._templates:
            return folder
        if kind == "run":
            fake_run(folder, "neumann", epochs=2, spectrum=10, batchnorm=True)
        elif kind == "comparison":
            arms = {"neumann:warmup_epochs=1": {}, "sgd": {}, "sgd:lr=9": {"diverged": 9}}
            fake_comparison(folder, arms, 2, epochs=2, target=50.0, spectrum=20)
        else:
            rates = [0.1, 0.4, 0.8]
            winners = {"neumann": 0.4, "sgd": 0.4}
            fake_sweep(folder, {"neumann": rates, "sgd": rates}, winners, search_seeds=1, seeds=2)
        self._templates[kind] = folder
        return folder

    def _read_shape(self, kind: str, drawn: bool) -> set[Any]:
        """What pages of any kind may have."""
        key = f"{kind} {drawn}"
        if key not in self._shapes:
            text = write_report(self._template(kind)).read_text()
            self._shapes[key] = read_shape(text)
            shutil.rmtree(self._template(kind) / "plots")
            (self._template(kind) / "report.html").unlink()
        return set().union(*self._shapes.values()) | EXTRA


# What a page has in some situations only: arms that diverged or differ, a note, a missing plot.
TAGS = "mark b p details summary table tr td th thead tbody ul li wbr code section h2 h3 div span"
EXTRA = {("tag", name) for name in TAGS.split()}
EXTRA |= {("attribute", tag, "class") for tag in ("p", "div", "td", "th", "span", "tr", "section")}


class Shape(HTMLParser):
    """The elements and attributes of a page, and every value that could run or load."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: set[Any] = set()
        self._inside_style = False

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(("tag", name))
        self._inside_style = name in ("style", "script")
        for key, value in attributes:
            self.found.add(("attribute", name, key))
            active = key in ("href", "src", "style", "action", "xlink:href", "srcdoc", "content")
            if active and MARK in (value or ""):
                self.found.add(("value", name, key, value))

    def handle_endtag(self, name: str) -> None:
        self._inside_style = False

    def handle_data(self, data: str) -> None:
        if self._inside_style and MARK in data:
            self.found.add(("style", data[:80]))

    def handle_comment(self, data: str) -> None:
        if MARK in data:
            self.found.add(("comment", data[:80]))


def read_shape(text: str) -> set[Any]:
    shape = Shape()
    shape.feed(text)
    shape.close()
    return shape.found


def inject(path: Path, payload: str, chance: Any, often: float | None) -> int:
    """Replace one value or key, or a share of all; returns how many."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    contents = [json.loads(line) for line in lines if line.strip()]
    places = [place for content in contents for place in list_places(content)]
    # Only texts may hold any text, so they are what a page shows; most numbers are refused.
    texts = [(holder, key) for holder, key in places if isinstance(holder[key], str)]
    places = texts if texts and chance.random() < 0.9 else places
    chosen = [place for place in places if chance.random() < often] if often else []
    chosen = chosen or [chance.choice(places)]
    for holder, key in chosen:
        if key not in holder if isinstance(holder, dict) else key >= len(holder):
            continue
        if isinstance(holder, dict) and chance.random() < 0.03:
            holder[payload] = holder.pop(key)
        else:
            before = holder[key]
            joined = isinstance(before, str) and chance.random() < 0.3
            holder[key] = before + payload if joined else payload
    indent = None if path.suffix == ".jsonl" else 1
    text = "".join(json.dumps(content, indent=indent) + "\n" for content in contents)
    path.write_text(text)
    return len(chosen)
