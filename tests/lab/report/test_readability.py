"""The report in a browser, as a reader sees it: nothing overlaps, is cut off or is hidden."""

import itertools
import re

import pytest

from neumann.lab.report import write_report
from tests.support.browser import open_page
from tests.support.fake_records import fake_comparison, fake_study, fake_sweep

pytestmark = pytest.mark.slow


ARMS = {
    "neumann:warmup_epochs=1,reset_epochs=2": {},
    "sgd:lr=0.2,momentum=0.9": {},
    "sgd:lr=0.2,momentum=0": {"best": 70.0},
    "adamw:lr=0.003,weight_decay=0.01": {},
    "plain=adam:lr=0.001": {"diverged_seeds": (1,)},
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_report(fake_comparison(tmp_path_factory.mktemp("c"), ARMS, 3, target=96.0))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    rates = [0.005, 0.0155, 0.016, *(0.02 * 1.3**i for i in range(9)), 0.5]
    chosen = {"sgd": 0.016}
    folder = fake_sweep(tmp_path_factory.mktemp("s"), {"sgd": rates}, chosen, search_seeds=1)
    return write_report(folder)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    points = ["batch_size=128", "batch_size=512", "batch_size=2048"]
    arms = {"neumann": {}, "sgd": {}}
    return write_report(fake_study(tmp_path_factory.mktemp("st"), arms, points))


def find_boxes(browser, selector):
    """Return (text, left, top, right, bottom) of the elements that can be seen."""
    script = """
        return [...document.querySelectorAll(arguments[0])]
            .map(e => [e.textContent, e.getBoundingClientRect()])
            .filter(([text, box]) => text.trim() && box.width)
            .map(([text, box]) => [text, box.left, box.top, box.right, box.bottom]);
    """
    return browser.execute_script(script, selector)


def overlap(a, b):
    return a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]


def test_learning_rates_under_an_axis_do_not_overlap(browser, sweep):
    open_page(browser, sweep)
    boxes = find_boxes(browser, "#plot-lr-sensitivity svg [id*='axis_1'] text")
    labels = [box for box in boxes if box[0] != "learning rate"]
    assert {"0.005", "0.016", "0.5"} <= {box[0] for box in labels}
    for a, b in itertools.combinations(labels, 2):
        assert not overlap(a, b), (a[0], b[0])


def test_the_target_is_named_in_front_of_the_curves(browser, comparison):
    open_page(browser, comparison)
    script = """
        const svg = document.querySelector('#plot-accuracy-epochs svg');
        const label = [...svg.querySelectorAll('text')].find(t => t.textContent == 'target 96 %');
        const behind = label.parentElement.querySelector('path');
        const curves = [...svg.querySelectorAll('[data-curve]')];
        const after = Node.DOCUMENT_POSITION_FOLLOWING;
        return [curves.length, curves.every(c => c.compareDocumentPosition(label) & after),
            behind && getComputedStyle(behind).fill,
            getComputedStyle(document.body).backgroundColor];
    """
    count, on_top, fill, paper = browser.execute_script(script)
    assert count >= 4
    assert on_top
    assert fill == paper


def read_header(browser, path):
    open_page(browser, path)
    kind, title = (browser.find_element("css selector", f"header {x}") for x in ("p", "h1"))
    return kind.text, title.text


def test_the_title_names_or_counts_all_arms(browser, comparison, tmp_path):
    _, title = read_header(browser, comparison)
    assert title == "neumann, sgd (momentum 0.9), sgd (momentum 0), adamw and plain on digits"
    assert title == browser.title
    few = write_report(fake_comparison(tmp_path, {"sgd": {}, "sgd:momentum=0": {}}, 1, epochs=1))
    assert read_header(browser, few)[1] == "sgd and sgd (momentum 0) on digits"


def test_the_line_above_the_title_says_what_the_page_is(browser, comparison, sweep, study):
    assert read_header(browser, comparison)[0] == "Comparison of 5 arms · digits · mlp"
    assert read_header(browser, sweep)[0] == "Learning-rate sweep · digits · mlp"
    assert read_header(browser, study)[0] == "Study · digits · mlp · batch size 128, 512 and 2048"
    point = study.parent / "batch_size=512" / "report.html"
    assert read_header(browser, point)[0] == "Comparison of 2 arms · digits · mlp"


def test_arms_have_short_names_and_their_commands_stand_under_settings(browser, comparison):
    open_page(browser, comparison)
    names = ["neumann", "sgd (momentum 0.9)", "sgd (momentum 0)", "adamw", "plain"]
    for selector in ("#results tbody th", "#curves .legend li"):
        found = browser.find_elements("css selector", selector)
        assert [each.text for each in found if each.text] == names
    elsewhere = "section:not(#settings), header"
    for text in (each.text for each in browser.find_elements("css selector", elsewhere)):
        assert not any(arm in text for arm in ARMS)
    settings = browser.find_element("id", "settings").text
    assert all(arm in settings for arm in ARMS)


def test_sentences_and_tables_round_alike(browser, comparison):
    open_page(browser, comparison)
    sentences = browser.find_element("id", "verdict").text
    sizes = re.findall(r"[\d.]+ ± [\d.]+ points", sentences)
    table = browser.find_element("css selector", "#results table").text
    assert len(sizes) == len(ARMS) - 1
    for size in sizes:
        assert size.removesuffix(" points") in table
