"""The documentation site: it builds without a warning, and a browser shows it with nothing from the network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser_or_skip

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_or_skip() as started:
        yield started


def test_site_has_generated_reference(site: Path) -> None:
    assert "--nproc-per-node" in (site / "reference" / "cli.html").read_text()
    assert "outer_momentum=0.9" in (site / "reference" / "specs.html").read_text()
    assert "Keep this model in step" in (site / "reference" / "api" / "gradsync.html").read_text()
    assert (site / "project" / "SECURITY.html").exists()


@pytest.mark.parametrize("width", [1280, 390])
def test_start_page_opens_from_a_file(site: Path, browser: Browser, width: int) -> None:
    page = browser.open(site / "index.html", width=width)
    assert page.value("document.querySelector('h1').innerText").startswith("gradsync")
    assert page.value("document.querySelector('img[alt^=Step]').naturalWidth") > 0
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    assert page.requests == []
    assert page.complaints == []


def test_search_works_from_a_file(site: Path, browser: Browser) -> None:
    page = browser.open(site / "how_to" / "data.html")
    found = page.value(
        """new Promise((resolve) => {
            const query = document.querySelector('input[data-md-component=search-query]')
            query.focus(); query.value = 'heartbeat'; query.dispatchEvent(new Event('keyup'))
            const look = () => {
                const link = document.querySelector('.md-search-result__link')
                link ? resolve(link.getAttribute('href')) : setTimeout(look, 50)
            }
            look(); setTimeout(() => resolve('nothing was found'), 10000)
        })"""
    )
    assert ".html" in found
    assert page.requests == []
