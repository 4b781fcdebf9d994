"""The README, docs/ and the other pages: Python blocks run, commands parse, links resolve, named paths exist."""

from __future__ import annotations

import ast
import importlib
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

from benchmarks import step_time_figure
from gradsync.cli.main import main
from gradsync.comm import disconnect
from gradsync.replicas.header import BUSY_SLOTS, FIELDS, NUM_VALUES
from gradsync.spec import registry

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

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

PATH = re.compile(r"`(?P<path>[\w./-]+/|[\w./-]*\w\.(?:py|md|toml|yml|txt))`")  # a file or folder, in backticks

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


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
    """A module that acts as a new script in an empty folder: not connected, and removed after the test."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(registry._library, "_entries", dict(registry._library._entries))
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
        else:
            check_imports(block.text)


def check_imports(source: str) -> None:
    """What a block that does not run imports from gradsync is there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradsync":
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert missing == [], f"{node.module} has no {', '.join(missing)}"


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


def linked_from(page: Path) -> set[Path]:
    targets = (match["target"].partition("#")[0] for match in LINK.finditer(FENCED.sub("", page.read_text())))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_index_links_every_page() -> None:
    api = DOCS / "reference" / "api"  # the index links its first page; the site's navigation has the others
    missing = {page for page in DOCS.rglob("*.md") if page.parent != api} - linked_from(DOCS / "index.md")
    assert missing == {DOCS / "index.md"}


def test_every_benchmark_result_is_linked() -> None:
    linked = set[Path]().union(*(linked_from(page) for page in PAGES))
    assert set(RESULTS.iterdir()) - linked == set(), "a result that no page quotes: link it, or delete it"


def test_figure_of_the_readme_shows_the_results() -> None:
    assert step_time_figure.FIGURE.read_text() == step_time_figure.draw(), "run: python benchmarks/step_time_figure.py"


def test_architecture_names_paths_that_exist() -> None:
    """A path is relative to the project or to src/gradsync; in a row of the tree, to the folder of the row."""
    package = ROOT / "src" / "gradsync"
    missing, found = [], 0
    for line in (DOCS / "architecture.md").read_text().splitlines():
        paths = [match["path"] for match in PATH.finditer(line)]
        folder = package / paths[0] if paths and line.startswith(f"| `{paths[0]}` |") else package
        found += len(paths)
        missing += [path for path in paths if not any((base / path).exists() for base in (ROOT, package, folder))]
    assert missing == []
    assert found > 300


def test_architecture_names_functions_that_exist() -> None:
    """A name in brackets behind a file is defined in it: `engine/engine.py` (`_join`)."""
    page = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`(\w+/[\w/]+\.py)` \(`([\w.]+)`\)", page)
    assert len(named) > 20
    for path, name in named:
        text = (ROOT / "src" / "gradsync" / path).read_text()
        missing = [part for part in name.split(".") if not re.search(rf"(def|class) {part}\b", text)]
        assert missing == [], f"{path} does not define {name}"


@pytest.mark.parametrize("heading", ["The way of one exact gradient", "The way of one int8 gradient"])
def test_architecture_traces_a_gradient_through_few_files(heading: str) -> None:
    section = (DOCS / "architecture.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    files = {match["path"] for match in PATH.finditer(section) if match["path"].endswith(".py")}
    assert 6 <= len(files) <= 12


def test_architecture_shows_every_package() -> None:
    page = (DOCS / "architecture.md").read_text()
    packages = [path for path in (ROOT / "src" / "gradsync").rglob("*") if (path / "__init__.py").exists()]
    names = [f"`{path.relative_to(ROOT / 'src' / 'gradsync').as_posix()}/`" for path in packages]
    assert [name for name in names if name not in page] == []


def test_extending_names_every_value_of_the_header() -> None:
    page = (DOCS / "extending.md").read_text()
    table = page[page.index("## The header") :]
    named = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(FIELDS)
    assert NUM_VALUES == 17
    assert "seventeen float64 values of each rank" in table
    assert f"the busy times of {BUSY_SLOTS} ranks" in table
