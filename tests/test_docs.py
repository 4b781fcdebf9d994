"""The README and docs/: every Python block runs, every command line is read, every link leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch

from gradsync import spec
from gradsync.cli.main import main
from gradsync.comm import disconnect

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# What a page takes for granted: the README's three lines go into a script that the reader already has.
GIVEN = {
    "README.md": """
import torch

dataset = torch.utils.data.TensorDataset(torch.randn(100, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
}

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_")  # of their variables' names

FENCED = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<text>.+?) *$", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    runs: bool  # not marked `no-run`
    line: int  # of its first line, from 1
    text: str


def blocks_of(page: Path, language: str) -> list[Block]:
    content = page.read_text()
    found = []
    for match in FENCED.finditer(content):
        words = match["info"].split()
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = content.count("\n", 0, match.start("text")) + 1
        found.append(Block(words[0] if words else "", "no-run" not in words, line, text))
    assert all(block.language for block in found), "a block says what it is: python, sh, text"
    return [block for block in found if block.language == language]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """A module that is as a new script in an empty folder: connected to nobody, and nothing of it stays."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(spec._library, "_entries", dict(spec._library._entries))
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    disconnect()
    with torch.random.fork_rng():
        yield module
    disconnect()


@each_page
def test_python_blocks_run(page: Path, script: ModuleType) -> None:
    exec(GIVEN.get(page.name, ""), vars(script))
    for block in blocks_of(page, "python"):
        # Empty lines before it: a traceback then names the page's own line.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        if block.runs:
            exec(code, vars(script))


@each_page
def test_commands_are_understood(page: Path) -> None:
    """Every ``gradsync`` line of a shell block is read by the command line itself, which then does not run it."""
    for block in blocks_of(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["gradsync"]:
                command = main.commands[words[1]]
                try:
                    command.make_context(words[1], words[2:])
                except click.ClickException as error:
                    pytest.fail(f"{page.name}: `{line}`: {error.format_message()}")


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_resolve(page: Path) -> None:
    for match in LINK.finditer(FENCED.sub("", page.read_text())):
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        where = page.parent / path if path else page
        assert where.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors_of(where), f"{page.name} links to {target}: no such heading"


def test_every_page_is_in_the_index() -> None:
    linked = {match["target"] for match in LINK.finditer((DOCS / "index.md").read_text())}
    assert linked >= {page.name for page in DOCS.glob("*.md")} - {"index.md"}
