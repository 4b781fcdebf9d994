"""The comparison's page in a real browser: it draws the curves, its buttons work, it loads nothing, it fits a phone.

Skipped where there is no Chromium; where CI=true that is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsync.compare import ComparisonSummary, Curve, summarize
from gradsync.compare.page import SENT, render
from gradsync.compare.summary import common_loss
from tests.support.browser import Browser, browser_or_skip


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = tuple(range(1, 41))
    curves = {
        name: Curve(
            steps,
            tuple(pace * at for at in steps),
            tuple(sent * at for at in steps),
            tuple(4 - 0.05 * at for at in steps),
        )
        for name, pace, sent in (("allreduce", 0.2, 2e6), ("allreduce(codec=int8)", 0.1, 5e5))
    }
    target = common_loss(list(curves.values()))
    runs = [summarize(name, curve, target=target).as_dict() for name, curve in curves.items()]
    runs.append(ComparisonSummary(strategy="onebit_adam", failure="ValueError: it goes with Adam").as_dict())
    drawn = {name: {**vars(curve), "smoothed": curve.smoothed()} for name, curve in curves.items()}
    path = tmp_path_factory.mktemp("compare") / "compare.html"
    path.write_text(
        render(
            {"title": "train.py: 2 workers", "target_loss": target, "runs": runs, "curves": drawn, "sent": SENT[True]}
        )
    )
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_or_skip() as browser:
        yield browser


def test_page_draws_every_run_and_its_buttons_work(page_file: Path, browser: Browser) -> None:
    page = browser.open(page_file)
    count = "document.querySelectorAll('polyline.curve').length"
    assert page.value("document.querySelector('.headline').textContent") == (
        "To a loss of 2.125, allreduce(codec=int8) is 2.00 times as fast as allreduce."
    )
    assert page.value("document.querySelectorAll('tbody tr').length") == 3
    assert page.value(count) == 2
    first = "document.querySelector('polyline.curve').getAttribute('points')"
    by_seconds = page.value(first)
    assert len(by_seconds.split()) == 40
    page.click("[data-axis=bytes]")
    assert page.value(first) == by_seconds, "the first run ends last by either"
    assert page.value("document.getElementById('against').textContent") == "bytes"
    page.click("#legend button")
    assert page.value(count) == 1
    page.click("#raw")
    assert page.value(count) == 2
    page.click("#legend button")
    assert page.value(count) == 4
    assert page.requests == []
    assert page.complaints == []


def test_page_tooltip_shows_a_curves_figures(page_file: Path, browser: Browser) -> None:
    page = browser.open(page_file)
    page.value("document.getElementById('chart').scrollIntoView({block: 'center'})")
    x, y = page.value(
        "(() => { const box = document.getElementById('chart').getBoundingClientRect();"
        " const [x, y] = document.querySelector('polyline.curve').getAttribute('points').split(' ')[20].split(',');"
        " return [box.x + x * box.width / 1000, box.y + y * box.height / 460]; })()"
    )
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.value("document.getElementById('tip').className") == "on"
    assert "loss 2." in page.value("document.getElementById('tip').textContent")
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.value("document.getElementById('tip').className") == ""


@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone_in_light_and_dark(page_file: Path, browser: Browser, dark: bool) -> None:
    page = browser.open(page_file, width=360, height=740, dark=dark)
    assert page.value("document.documentElement.scrollWidth") <= 360
    ground, ink = (page.value(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
    light = [sum(map(int, colour[4:-1].split(","))) for colour in (ground, ink)]
    assert (light[0] < light[1]) == dark
    page.click("#theme")
    assert page.value("getComputedStyle(document.body).backgroundColor") != ground
    assert page.complaints == []
