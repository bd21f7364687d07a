"""The page of ``hwrl report`` in a real browser: what it draws, what it filters, and what it does not run."""

from __future__ import annotations

from pathlib import Path

from hwrl_report import build_page
from tests.support.browser import Browser
from tests.support.browser import browser as browser
from tests.support.run_files import ATTACK
from tests.support.run_files import run as run

REWARD = "document.querySelector('figure[data-chart=reward]')"
SET = "e = {}; e.value = '{}'; e.dispatchEvent(new Event('{}', {{bubbles: true}}))"


def opened(browser: Browser, run: Path) -> Browser:
    page = run / "report.html"
    page.write_bytes(build_page(run))
    browser.open(page)
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # sizes settle
    return browser


def count(browser: Browser, selector: str) -> int:
    return int(browser.evaluate(f"document.querySelectorAll('{selector}').length"))


def test_it_draws_every_curve_and_runs_nothing_of_a_sample(browser: Browser, run: Path) -> None:
    opened(browser, run)
    assert browser.evaluate("document.title") == f"{run.parent.name}/<b>run · hwrl report"
    figures = "[...document.querySelectorAll('section:not(#other-metrics) figure')]"
    assert browser.evaluate(f"{figures}.filter(f => !f.querySelector('path')).map(f => f.dataset.chart)") == []
    assert count(browser, "#learning figure path.curve") == 6
    assert count(browser, "figure[data-chart=bars-trainer] path.bar") == 3
    assert count(browser, "figure[data-chart=reward] line.event") == 3
    assert ATTACK in browser.evaluate("document.querySelector('article[data-step=\"3\"]').textContent")
    assert count(browser, "#other-metrics path.curve") == 0
    details = "document.querySelector('#other-metrics details')"
    browser.evaluate(f"new Promise(done => {{ e = {details}; e.addEventListener('toggle', done); e.open = true }})")
    assert count(browser, "#other-metrics path.curve") > 0
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []


def test_samples_are_filtered_by_step_reward_and_text(browser: Browser, run: Path) -> None:
    opened(browser, run)
    shown = "[...document.querySelectorAll('article:not([hidden])')].map(a => Number(a.dataset.step))"

    def enter(name: str, value: object) -> None:
        browser.evaluate(SET.format(f"document.querySelector('input[name={name}]')", value, "input"))

    assert len(browser.evaluate(shown)) == 30
    enter("step-from", 20)
    enter("reward-to", 0.8)
    assert browser.evaluate(shown) == [24, 23, 22, 21, 20]
    enter("text", "ANSWER 22")
    assert browser.evaluate(shown) == [22]
    assert browser.evaluate("document.getElementById('sample-matches').textContent") == "1 match"


def test_a_drag_zooms_all_charts_and_the_controls_redraw_them(browser: Browser, run: Path) -> None:
    opened(browser, run)
    left, top, width = browser.evaluate(
        f"(b => [b.x, b.y, b.width])({REWARD}.querySelector('svg').getBoundingClientRect())"
    )
    loss = "document.querySelector('figure[data-chart=loss] path.curve').getAttribute('d')"
    whole = browser.evaluate(loss)
    x, y = left + width / 2, top + 60
    browser.mouse("mousePressed", x, y, buttons=1)
    browser.mouse("mouseMoved", x + 80, y, buttons=1)
    browser.mouse("mouseReleased", x + 80, y)
    assert browser.evaluate(loss) != whole and not browser.evaluate("document.getElementById('reset').disabled")
    browser.evaluate("document.getElementById('reset').click()")
    assert browser.evaluate(loss) == whole
    browser.mouse("mouseMoved", x, y)
    assert 0.1 < float(browser.evaluate(f"{REWARD}.querySelector('li b').textContent")) < 0.2, (
        "of the step at the mouse"
    )
    browser.evaluate(SET.format("document.getElementById('smoothing')", 0.9, "input"))
    assert browser.evaluate(loss) != whole
    browser.evaluate(SET.format("document.getElementById('x-axis')", "time", "change"))
    assert " s" in browser.evaluate(f"{REWARD}.querySelector('text.x').textContent")
    assert browser.problems == []
