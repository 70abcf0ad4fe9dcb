"""The report in a browser, as a reader sees it: nothing overlaps or is hidden, and all is named."""

import itertools
import re

import pytest

from neumann.lab.report import write_report
from neumann.lab.report.study_records import read_study
from tests.support.browser import open_page
from tests.support.fake_records import fake_comparison, fake_study, fake_sweep

selenium = pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

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


@pytest.mark.parametrize("width", [1280, 390])
def test_learning_rates_under_an_axis_do_not_overlap(browser, sweep, width):
    open_page(browser, sweep, width=width, phone=width == 390)
    boxes = find_boxes(browser, "#plot-lr-sensitivity svg [id*='axis_1'] text")
    labels = [box for box in boxes if box[0] != "learning rate"]
    assert {"0.005", "0.016", "0.5"} <= {box[0] for box in labels}
    for a, b in itertools.combinations(labels, 2):
        assert not overlap(a, b), (a[0], b[0])


LETTER_SIZES = """
    const shown = [...document.querySelectorAll('.picture svg')].filter(s => s.clientWidth);
    return shown.flatMap(svg => {
        const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
        return [...svg.querySelectorAll('text')]
            .map(text => scale * parseFloat(getComputedStyle(text).fontSize));
    });
"""


TAKER = "neumann-spectral:momentum=0.8,lr=neumann-spectral"


@pytest.fixture(scope="module")
def sweep_with_taker(tmp_path_factory):
    grid = {"neumann-spectral": [0.1, 0.4, 0.8], "muon": [0.1, 0.4, 0.8], TAKER: []}
    winners = {"neumann-spectral": 0.4, "muon": 0.4, TAKER: 0.4}
    return write_report(fake_sweep(tmp_path_factory.mktemp("t"), grid, winners))


@pytest.mark.parametrize("width", [1280, 390])
def test_a_sweep_explains_its_curves_right_below_them(browser, sweep_with_taker, width):
    open_page(browser, sweep_with_taker, width=width, phone=width == 390)
    ((_, left, _, _, bottom),) = find_boxes(browser, "#plot-lr-sensitivity .picture")
    ((words, caption_left, top, right, _),) = find_boxes(browser, "#plot-lr-sensitivity figcaption")
    assert "Circled: the chosen learning rate." in words
    assert 0 <= top - bottom < 30
    assert caption_left == left
    ((note, *_),) = find_boxes(browser, "#sensitivity .note")
    name = "neumann-spectral (momentum 0.8)"
    assert note == f"No curve: {name} takes the rate of neumann-spectral."
    title = browser.find_element("css selector", "h1").text
    charted = browser.find_elements("css selector", ".result .arm")
    assert [arm.text for arm in charted] == ["neumann-spectral", "muon", name]
    assert all(arm.text in title for arm in charted)
    if width == 1280:
        assert right - left < 800  # the picture is not blown up to the whole page


@pytest.mark.parametrize("width", [320, 360])
def test_the_choice_of_an_axis_does_not_break_inside_words(browser, comparison, width):
    open_page(browser, comparison, width=width, height=700, phone=True)
    script = """
        return [...document.querySelectorAll('.switch:not(.reference) > *')].map(e => {
            const range = document.createRange();
            range.selectNodeContents(e);
            return [e.textContent, range.getClientRects().length];
        });
    """
    found = browser.execute_script(script)
    assert {text for text, _ in found} == {"against", "epochs", "steps", "seconds"}
    assert {lines for _, lines in found} == {1}
    tops = {top for _, _, top, *_ in find_boxes(browser, "#curves .switch label")}
    assert len(tops) == 1
    assert browser.execute_script("return document.body.scrollWidth <= innerWidth")


def test_text_in_pictures_can_be_read_on_a_phone(browser, sweep):
    open_page(browser, sweep, width=390, height=844, phone=True)
    sizes = browser.execute_script(LETTER_SIZES)
    assert len(sizes) > 30
    assert min(sizes) > 11
    script = """
        const label = [...document.querySelectorAll('#plot-lr-sensitivity text')]
            .find(t => t.textContent.startsWith('accuracy on'));
        return label.getBoundingClientRect().right;
    """
    beside = browser.execute_script(script)
    numbers = find_boxes(browser, "#plot-lr-sensitivity svg [id*='ytick'] text")
    assert numbers
    assert all(left > beside for _, left, *_ in numbers)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_score_is_drawn_right_below_the_result(browser, comparison, width):
    open_page(browser, comparison, width=width, phone=width == 390)
    ((_, _, _, _, chart_end),) = find_boxes(browser, "#verdict .result")
    ((_, _, top, _, bottom),) = find_boxes(browser, "#verdict figure")
    assert 0 < top - chart_end < 200  # the choice of an axis, and a legend
    ((_, left, words, _, _),) = find_boxes(browser, "#verdict .findings")
    assert words > (chart_end if width == 1280 else bottom)
    assert (left > 600) == (width == 1280)
    ((_, _, numbers, _, _),) = find_boxes(browser, "#results")
    assert numbers > bottom
    shown = [title for title, *_ in find_boxes(browser, "figure h3")]
    assert shown[:2] == ["Accuracy on the test set", "Loss on the test set"]
    assert shown.count("Accuracy on the test set") == 1


def test_forces_are_against_what_the_curves_are_against_at_first(browser, comparison):
    open_page(browser, comparison)
    for plot in ("accuracy-steps", "distance", "forces"):
        found = find_boxes(browser, f"#plot-{plot} svg text")
        assert "optimizer steps" in {text for text, *_ in found}


def test_names_do_not_break_at_hyphens(browser, tmp_path):
    arms = {"neumann-spectral:lr=0.1": {}, "neumann-spectral:lr=0.2": {}, "neumann-diagonal": {}}
    path = write_report(fake_comparison(tmp_path, arms, 1, epochs=1))
    script = """
        return [...document.querySelectorAll(arguments[0] + ' .whole')]
            .filter(e => e.textContent.startsWith('neumann-') && e.offsetWidth)
            .map(e => e.getClientRects().length);
    """
    for width in (320, 350, 390, 420):
        open_page(browser, path, width=width, height=844, phone=True)
        for place in ("h1", ".result", ".findings", ".legend", "#results th", ".reference"):
            lines = browser.execute_script(script, place)
            assert lines, place
            assert set(lines) == {1}, place
        assert browser.execute_script("return document.body.scrollWidth <= innerWidth")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_chosen_reference_can_be_read(browser, tmp_path, dark):
    path = write_report(fake_comparison(tmp_path, {"neumann-spectral": {}, "sgd": {}}, 1, epochs=1))
    open_page(browser, path, dark=dark)
    label = browser.find_element("css selector", "#verdict label[for=ref-0]")
    name = label.find_element("css selector", "span")
    assert name.text == "neumann-spectral"
    page = browser.find_element("css selector", "body").value_of_css_property("background-color")
    assert name.value_of_css_property("color") == page
    assert label.value_of_css_property("background-color") != page


def test_columns_of_words_keep_apart_on_a_phone(browser, comparison):
    open_page(browser, comparison, width=390, height=844, phone=True)
    names = browser.find_elements("css selector", "#settings tbody th")
    assert names
    assert all(float(n.value_of_css_property("padding-right")[:-2]) > 8 for n in names)


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
    sizes = re.findall(r"[\d.]+\s±\s[\d.]+(?=\spoints)", sentences)
    table = browser.find_element("css selector", "#results table").text
    assert len(sizes) == len(ARMS) - 1
    for size in sizes:
        assert " ".join(size.split()) in table


def measure_hint(browser, selector):
    """Return height and opacity of the hint at a table."""
    script = """
        const hint = document.querySelector(arguments[0] + ' .hint');
        return hint ? [hint.offsetHeight, Number(getComputedStyle(hint).opacity)] : [0, 0];
    """
    return browser.execute_script(script, selector)


def test_a_table_that_is_cut_off_says_that_it_scrolls(browser, comparison):
    open_page(browser, comparison, width=390, height=844, phone=True)
    box = browser.find_element("css selector", "#results .scroll")
    height, opacity = measure_hint(browser, "#results")
    assert height > 10
    assert opacity == 1
    assert "scroll" in box.text.lower()
    assert "gradient" in box.value_of_css_property("background-image")
    arm = box.find_element("css selector", "tbody th")
    place = arm.location["x"]
    # By keyboard, to the end: the hint is no longer needed, and the arms are still in view.
    browser.execute_script("arguments[0].focus()", box)
    for _ in range(30):
        box.send_keys(Keys.ARROW_RIGHT)
    left = "return arguments[0].scrollWidth - arguments[0].clientWidth - arguments[0].scrollLeft"
    WebDriverWait(browser, 5).until(lambda _: browser.execute_script(left, box) < 2)
    WebDriverWait(browser, 5).until(lambda _: measure_hint(browser, "#results")[1] < 0.1)
    assert arm.location["x"] == pytest.approx(place, abs=1)


def test_a_table_that_fits_has_no_hint(browser, comparison):
    open_page(browser, comparison)
    assert measure_hint(browser, "#results")[0] == 0


READ_CHART = """
    const middle = e => { const b = e.getBoundingClientRect(); return b.left + b.width / 2; };
    const chart = document.querySelector('main section .result');
    return {
        first: chart.closest('section') === document.querySelector('main section'),
        ticks: [...chart.querySelectorAll('.axis text')]
            .map(t => [Number(t.textContent), middle(t)]),
        rows: [...chart.querySelectorAll('li')].map(row => {
            const line = row.querySelector('.interval'), mean = row.querySelector('.mean');
            const box = line && line.getBoundingClientRect();
            return {
                arm: row.querySelector('.arm').textContent.trim(),
                value: row.querySelector('.value').innerText,
                spoken: row.querySelector('svg').getAttribute('aria-label'),
                mean: mean && middle(mean),
                interval: box && [box.left, box.right],
                seeds: [...row.querySelectorAll('.seed')].map(middle),
                beyond: row.querySelectorAll('.beyond path').length,
            };
        }),
    };
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_result_is_charted_at_the_top(browser, comparison, width):
    open_page(browser, comparison, width=width, phone=width == 390)
    chart = browser.execute_script(READ_CHART)
    assert chart["first"]
    (low, left), *_, (high, right) = chart["ticks"]
    result = read_study(comparison.parent).comparison
    assert [row["arm"] for row in chart["rows"]] == [row.arm for row in result.rows]

    def place(value):
        return left + (right - left) * (value - low) / (high - low)

    for shown, row in zip(chart["rows"], result.rows, strict=True):
        assert shown["value"].startswith(f"{row.score.mean:.2f} ±")
        assert f"mean {row.score.mean:.2f} %, 95 % interval {row.score.low:.2f}" in shown["spoken"]
        if row.arm == "sgd (momentum 0)":  # 27 points behind: its arrow points to it
            assert shown["beyond"] == 1
            assert shown["mean"] is None
            continue
        assert shown["mean"] == pytest.approx(place(row.score.mean), abs=1.5)
        edges = [place(row.score.low), place(row.score.high)]
        # A line of 3.5 pixels has round ends.
        assert shown["interval"] == pytest.approx(edges, abs=4)
        scores = sorted(run.score for run in row.runs.values() if run.score == run.score)
        assert shown["seeds"] == pytest.approx([place(score) for score in scores], abs=1.5)
    assert "1 diverged" in chart["rows"][-1]["value"]


def read_sentences(browser):
    lists = browser.find_elements("css selector", "#verdict .findings")
    (shown,) = [each for each in lists if each.is_displayed()]
    return [" ".join(line.text.split()) for line in shown.find_elements("css selector", "li")]


def test_the_reader_chooses_the_reference(browser, comparison):
    open_page(browser, comparison)
    result = read_study(comparison.parent).comparison
    labels = browser.find_elements("css selector", "#verdict .reference label")
    assert [label.text for label in labels] == [row.arm for row in result.rows]

    def check(index):
        compared = result.compare_with(index)
        sentences = [text[0].upper() + text[1:] for text in compared.state_verdicts()]
        shown = [text[0].upper() + text[1:] for text in read_sentences(browser)]
        assert shown == [f"{text}." for text in sentences]
        name = result.rows[index].arm
        table = browser.find_element("css selector", "#results table")
        assert f"{name} ahead by" in table.text
        assert table.text.count("ahead by") == 1
        (row,) = [
            row
            for row in table.find_elements("css selector", "tbody tr")
            if "reference" in row.text
        ]
        assert row.text.startswith(name)

    check(0)
    labels[2].click()
    check(2)
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    check(3)
    assert browser.execute_script("return document.scripts.length") == 0


def test_the_reader_of_a_study_chooses_the_reference(browser, study):
    open_page(browser, study)
    table = browser.find_elements("css selector", "#results table")[1]
    before = table.find_elements("css selector", "tbody tr")[1].text
    browser.find_element("css selector", "label[for=ref-1]").click()
    after = table.find_elements("css selector", "tbody tr")[0].text
    assert before.removeprefix("sgd").replace("+", "−") == after.removeprefix("neumann")
    assert "neumann" in browser.find_element("css selector", "#points").text
