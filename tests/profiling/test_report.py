"""The report, in a real browser: it shows the recorded run, loads nothing, and fits phones and dark themes.

Skipped where there is no Chromium; where CI=true that is a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsync.profiling import Change, load
from gradsync.profiling.report import write_report
from tests.profiling.raw_records import a_step, write_rank, write_run
from tests.support.browser import Browser, Page, browser_or_skip

ROW = {"sync_s": 0.05, "note": "measured: no difference", "bytes_per_step": 3e6}
ADVICE: dict[str, Any] = {
    "change": True,
    "best": "allreduce(codec=int8)",
    "world_size": 2,
    "network": {"name": "a link of 1 Gbit/s"},
    "rows": [
        ROW | {"choice": "allreduce", "share": 0.3, "step_s": 0.17, "exact": True, "risk": "none"},
        ROW | {"choice": "allreduce(codec=int8)", "share": 0.04, "step_s": 0.11, "exact": False, "risk": "low"},
        ROW | {"choice": "allreduce(codec=fp16)", "share": 0.2, "step_s": 0.14, "exact": False, "risk": "low"},
    ],
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = load(write_run(folder, steps=40, late_ms=40, wire_ms=60, codec=True))
    environment = {"network": {"bytes_per_s": 250e6}}
    write_report(run, folder / "report.html", advice=ADVICE, environment=environment, note="A <b>planted</b> run.")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_or_skip() as browser:
        yield browser


def count(page: Page, selector: str) -> int:
    return int(page.value(f"document.querySelectorAll({json.dumps(selector)}).length"))


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def test_report_loads_nothing_from_elsewhere(report: Path) -> None:
    page = report.read_text()
    assert "{{" not in page
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]+\"|url\((?!data:)|@import|https?://(?!www\.w3\.org)", page)
    assert "</b>" not in page.split('id="data">')[1].split("</script>")[0]  # markup in the data stays data
    assert len(page) < 400_000


def test_report_shows_the_recorded_run(report: Path, browser: Browser) -> None:
    page = browser.open(report)
    assert page.complaints == []
    assert page.requests == []
    verdict = text(page, "#verdict")
    assert verdict.startswith("Synchronization costs ")
    assert "it is the wire" in verdict
    assert text(page, "#verdict code") == "allreduce(codec=int8)"
    assert text(page, "#note") == "A <b>planted</b> run."
    assert count(page, "#step > div") == 6
    widths = page.value("[...document.querySelectorAll('#step > div')].map(e => e.getBoundingClientRect().width)")
    total = sum(widths)
    assert widths[0] / total == pytest.approx((60 + 100) / 2 / 169, abs=0.01)  # compute, of the mean step
    assert widths[5] / total == pytest.approx(60 / 169, abs=0.01)  # the wire
    assert count(page, "#steps svg g[data-step]") == 40
    assert count(page, "#timeline rect[data-kind=backward]") == 2  # one a rank
    assert count(page, "#timeline rect[data-kind=waiting]") >= 1
    assert count(page, "#rate circle") == 38
    assert "measured limit 2.00 Gbit/s" in text(page, "#rate")
    assert count(page, "#buckets tbody tr") == 2
    assert count(page, "#what-if tbody tr") == 3
    assert "allreduce(codec=int8)" in text(page, "tr.best")
    assert "straggler" in text(page, "#ranks")


def test_report_tooltips_appear_and_disappear(report: Path, browser: Browser) -> None:
    page = browser.open(report)
    assert page.value("document.getElementById('tip').classList.contains('on')") is False
    page.move_to("#step > div[data-part=wire]")
    assert page.value("document.getElementById('tip').classList.contains('on')") is True
    assert text(page, "#tip").startswith("wire: 60.0 ms")
    page.move_to("#timeline rect[data-kind=backward]")
    assert "rank 0: backward" in text(page, "#tip")
    page.move_to("#steps svg g[data-step='7']")
    assert text(page, "#tip").startswith("step 7, rank 0: 169 ms")
    page.move_to("#buckets tbody tr")
    assert "head.weight" in text(page, "#tip")
    page.move_to("header")
    assert page.value("document.getElementById('tip').classList.contains('on')") is False
    box = page.value("(() => { const b = document.getElementById('tip').getBoundingClientRect(); return b.right; })()")
    assert box <= 1280


def test_report_toggles_hide_and_show_parts(report: Path, browser: Browser) -> None:
    page = browser.open(report)
    drawn = count(page, "#steps rect[data-part=wire]")
    assert drawn == 40
    page.click("#steps-keys button[data-part=wire]")
    assert count(page, "#steps rect[data-part=wire]") == 0
    assert page.value("document.querySelector('#steps-keys button[data-part=wire]').ariaPressed") == "false"
    page.click("#steps-keys button[data-part=wire]")
    assert count(page, "#steps rect[data-part=wire]") == drawn
    page.click("#timeline-keys button[data-part=backward]")
    assert count(page, "#timeline rect[data-kind=backward]") == 0
    page.click("#steps-first")
    assert count(page, "#steps svg g[data-step]") == 38
    page.value(
        "(() => { const s = document.getElementById('steps-rank'); s.value = '1'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.move_to("#steps svg g[data-step='9']")
    assert text(page, "#tip").startswith("step 9, rank 1")
    assert page.complaints == []


def test_report_fits_a_phone(report: Path, browser: Browser) -> None:
    page = browser.open(report, width=360, height=740)
    assert page.complaints == []
    assert page.value("document.documentElement.scrollWidth") <= 360  # nothing to push the page sideways for
    sizes = "[...document.querySelectorAll('p, td, th, .key, .tile div')].map(e => getComputedStyle(e).fontSize)"
    smallest = min(float(size.removesuffix("px")) for size in page.value(sizes))
    assert smallest >= 12
    assert page.value("document.querySelector('#timeline svg').getBoundingClientRect().right") <= 360


@pytest.mark.parametrize("dark", [False, True])
def test_report_theme_follows_the_system_and_the_button(report: Path, browser: Browser, dark: bool) -> None:
    page = browser.open(report, dark=dark)
    ink = "getComputedStyle(document.body).color"
    ground = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    assert contrast(page.value(ink), page.value(ground)) >= 7
    soft = "getComputedStyle(document.querySelector('p.sub')).color"
    assert contrast(page.value(soft), page.value(ground)) >= 4.5
    assert (brightness(page.value(ground)) < 0.2) == dark
    page.click("#theme")
    assert (brightness(page.value(ground)) < 0.2) != dark
    assert contrast(page.value(ink), page.value(ground)) >= 7


def brightness(color: str) -> float:
    """Relative luminance, as the accessibility guidelines (WCAG) define it."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((brightness(first), brightness(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_report_works_without_advice(tmp_path: Path, browser: Browser) -> None:
    write_report(
        load(write_run(tmp_path, steps=1)), tmp_path / "one.html", advice={"problem": "the network was not measured"}
    )
    page = browser.open(tmp_path / "one.html")
    assert page.complaints == []
    assert "The network was not measured." in text(page, "#what-if-card")


def test_report_shows_changes_of_the_members_of_an_elastic_run(tmp_path: Path, browser: Browser) -> None:
    lost = Change(epoch=2, cause="a <i>test</i>", before=(0, 1), members=(0,), lost=(1,), discarded=True, stalled_s=0.2)
    joined = Change(
        epoch=3, cause="it waits", before=(0,), members=(0, 1), joined=(1,), healed=(1,), healed_bytes=204_000_000,
        over="tcp over eth0", stalled_s=0.4, restoring_s=0.3,
    )  # fmt: skip
    steps = [a_step(number, 0) for number in range(8)]
    interrupted = a_step(4, 0)
    interrupted.discarded, interrupted.changes = True, [lost]
    steps[6].changes = [joined]
    write_rank(tmp_path, 0, [*steps[:4], interrupted, *steps[4:]])
    write_rank(tmp_path, 1, [a_step(number, 1) for number in range(8)])
    with open(tmp_path / "rank-1.jsonl", "a") as file:
        file.write('{"step": 8, "st\n')  # the worker was killed while it wrote
    recorded = load(tmp_path)
    assert [step.step for step in recorded.steps(0)] == list(range(8))
    assert [step.step for step in recorded.discarded[0]] == [4]
    write_report(recorded, tmp_path / "elastic.html")
    page = browser.open(tmp_path / "elastic.html")
    assert page.complaints == []
    assert count(page, "#members tbody tr") == 2
    assert "1 lost, 1 step done again, 600 ms stalled" in text(page, "#members-sub")
    assert "1 loststep done again" in text(page, "#members tbody tr")
    assert "204 MB over tcp over eth0" in text(page, "#members tbody tr:last-child")
    page.move_to("#members tbody tr")
    assert text(page, "#tip") == "a <i>test</i>"


def test_report_of_a_run_whose_members_stay_has_no_section_for_them(report: Path, browser: Browser) -> None:
    page = browser.open(report)
    assert page.value("document.getElementById('members-card').hidden") is True
