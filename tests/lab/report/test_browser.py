"""The report in a browser: curves, colors and widths; it loads nothing and runs no scripts."""

import json
from pathlib import Path

import pytest

from neumann.lab.report import page, write_report
from tests.support.browser import open_page
from tests.support.fake_records import fake_comparison, fake_sweep

pytestmark = pytest.mark.slow

COMMAND = "neumann:warmup_epochs=1,reset_epochs=2"
NEUMANN, PLAIN, WILD = "neumann", "sgd", "adam"
HOSTILE = "sgd:<script>window.hacked=1</script>"
LONG_COMMAND = "sgd:" + ",".join(f"option_number_{i}=0.123456789" for i in range(7))
LONG = "sgd (option number 0 0.123456789)"
AXES = ("epochs", "steps", "seconds")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    arms = {
        COMMAND: {"spectrum": 10},
        PLAIN: {"spectrum": 10},
        "adam:lr=9": {"diverged": 50},
        HOSTILE: {},
        LONG_COMMAND: {},
    }
    folder = fake_comparison(tmp_path_factory.mktemp("c"), arms, 2, target=96.0, batchnorm=True)
    return write_report(folder)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    rates = [0.1, 0.2, 0.4, 0.8, 3.2]
    winners = {"neumann:warmup_epochs=1": 0.4, "sgd": 0.4}
    folder = fake_sweep(tmp_path_factory.mktemp("s"), dict.fromkeys(winners, rates), winners)
    return write_report(folder)


def find_curves(browser, plot):
    """Return (arm, part) of everything a plot draws, in its order."""
    script = """
        const figure = document.querySelector(`figure[data-plot="${arguments[0]}"]`);
        return [...figure.querySelectorAll('[data-curve]')]
            .filter(group => group.querySelector('path, use'))
            .map(group => [group.dataset.curve, group.dataset.part]);
    """
    return [tuple(pair) for pair in browser.execute_script(script, plot)]


def find_plots(browser):
    script = "return [...document.querySelectorAll('figure')].map(f => f.dataset.plot)"
    return set(browser.execute_script(script))


def luminance(color):
    red, green, blue = (int(part) for part in color.strip("rgba()").split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def read_style(browser, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return browser.execute_script(script, selector, name)


def take_screenshot(browser, folder, name):
    """Take a screenshot and check that it is not empty: one color would make a small file."""
    path = Path(folder) / f"{name}.png"
    assert browser.save_screenshot(str(path))
    assert path.stat().st_size > 20_000


def test_each_plot_shows_its_curves(browser, comparison, tmp_path):
    open_page(browser, comparison)
    take_screenshot(browser, tmp_path, "desktop")
    phases = {(NEUMANN, "warm-up"), (NEUMANN, "resets")}
    healthy = {
        (arm, part) for arm in (NEUMANN, PLAIN, HOSTILE, LONG) for part in ("mean", "spread")
    }
    schedules = {pair for pair in healthy if pair[1] == "mean"}
    for axis in AXES:
        for name in ("accuracy", "loss", "train-loss"):
            found = find_curves(browser, f"{name}-{axis}")
            assert set(found) == healthy | phases | {(WILD, "diverged")}, (name, axis)
        assert set(find_curves(browser, f"learning-rate-{axis}")) == (
            schedules | phases | {(WILD, "diverged")}
        )
    assert set(find_curves(browser, "distance")) == {(NEUMANN, "mean")} | phases
    assert set(find_curves(browser, "forces")) == phases | {
        (NEUMANN, "repulsive force"),
        (NEUMANN, "attractive force"),
    }
    both = {
        (arm, part)
        for arm in (NEUMANN, PLAIN, HOSTILE, LONG)
        for part in ("plain", "recalibrated", "spread")
    }
    assert set(find_curves(browser, "recalibrated")) == both | phases
    for name in ("largest", "smallest", "lr", "momentum"):
        extra = {"largest": (), "smallest": ("not converged",)}.get(name, ("scheduled",))
        parts = ("probe batch", "current batch", "spread", *extra)
        assert set(find_curves(browser, f"curvature-{name}")) == phases | {
            (arm, part) for arm in (NEUMANN, PLAIN) for part in parts
        }
    # Two runs diverged: a line and a cross each.
    assert find_curves(browser, "accuracy-epochs").count((WILD, "diverged")) == 4


def test_a_sweep_shows_sensitivity(browser, sweep, tmp_path):
    open_page(browser, sweep)
    take_screenshot(browser, tmp_path, "sweep")
    arms = ("neumann", "sgd")
    parts = ("mean", "spread", "diverged", "chosen")
    assert set(find_curves(browser, "lr-sensitivity")) == {(a, p) for a in arms for p in parts}
    assert "lr-sensitivity" in find_plots(browser)
    final = [pair for pair in find_curves(browser, "accuracy-steps") if pair[1] == "mean"]
    assert final == [("neumann", "mean"), ("sgd", "mean")]


def test_the_axis_can_be_chosen_without_scripts(browser, comparison):
    open_page(browser, comparison)
    for axis in AXES:
        browser.find_element("css selector", f"label[for=axis-{axis}]").click()
        shown = [
            plot
            for plot in sorted(find_plots(browser))
            if plot.startswith("accuracy-")
            and browser.find_element("id", f"plot-{plot}").is_displayed()
        ]
        assert shown == [f"accuracy-{axis}"]
    assert browser.execute_script("return document.scripts.length") == 0


@pytest.mark.parametrize(("few", "axis"), [(500, "steps"), (1, "epochs")])
def test_curves_are_against_steps_at_first_where_those_are_few(
    browser, monkeypatch, tmp_path, few, axis
):
    monkeypatch.setattr(page, "FEW_STEPS", few)
    open_page(browser, write_report(fake_comparison(tmp_path, {PLAIN: {}}, 1)))
    shown = [a for a in AXES if browser.find_element("id", f"plot-accuracy-{a}").is_displayed()]
    assert shown == [axis]


def test_choosing_an_axis_does_not_move_the_page(browser, sweep):
    open_page(browser, sweep)
    browser.execute_script("document.getElementById('plot-loss-steps').scrollIntoView()")
    before = browser.execute_script("return scrollY")
    browser.find_element("css selector", "#curves label[for=axis-epochs]").click()
    assert browser.find_element("id", "plot-loss-epochs").is_displayed()
    assert browser.execute_script("return scrollY") == pytest.approx(before, abs=60)


def test_hostile_names_stay_text(browser, comparison):
    open_page(browser, comparison)
    assert browser.execute_script("return window.hacked") is None
    assert HOSTILE in browser.find_element("id", "verdict").text
    assert HOSTILE in browser.find_element("css selector", "#results table").text
    legend = browser.find_elements("css selector", "#curves .legend li")
    assert [item.get_attribute("data-arm") for item in legend] == [
        NEUMANN,
        PLAIN,
        WILD,
        HOSTILE,
        LONG,
    ]
    assert legend[3].text == HOSTILE


def test_the_page_loads_nothing_and_logs_no_errors(browser, comparison):
    browser.get_log("performance"), browser.get_log("browser")
    open_page(browser, comparison)
    requests = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            requests.append(message["params"]["request"]["url"])
    assert {url for url in requests if not url.startswith("data:")} == {comparison.as_uri()}
    assert browser.get_log("browser") == []


def test_a_phone_scrolls_in_one_direction(browser, comparison, tmp_path):
    open_page(browser, comparison, width=390, height=844, phone=True)
    take_screenshot(browser, tmp_path, "phone")
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    assert browser.execute_script("return document.body.scrollWidth <= innerWidth")
    assert browser.execute_script("return innerWidth") == 390
    box = browser.find_element("css selector", "#results .scroll")
    assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    # One column, and text large enough to read.
    text = "document.querySelector('#plot-accuracy-steps svg text').getBoundingClientRect()"
    assert browser.execute_script(f"return {text}.height") > 9
    width = browser.find_element("id", "plot-accuracy-steps").size["width"]
    assert width > 340


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_and_its_plots_follow_the_color_scheme(browser, comparison, tmp_path, dark):
    open_page(browser, comparison, dark=dark)
    take_screenshot(browser, tmp_path, "dark" if dark else "light")
    paper = luminance(read_style(browser, "body", "backgroundColor"))
    letters = [
        luminance(read_style(browser, "body", "color")),
        luminance(read_style(browser, "#plot-accuracy-epochs svg text", "fill")),
        luminance(read_style(browser, "#results td.number", "color")),
    ]
    if dark:
        assert paper < 40
        assert min(letters) > 140
    else:
        assert paper > 240
        assert max(letters) < 110
    line = "#plot-accuracy-epochs [data-part=mean] path"
    assert abs(luminance(read_style(browser, line, "stroke")) - paper) > 70
