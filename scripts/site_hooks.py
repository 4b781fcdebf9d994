"""What the documentation site needs beyond MkDocs: pages are written to read well on GitHub too.

- A link to a file outside docs/ works in the site: the Markdown files of the project's root become pages below
  ``project/``, a benchmark's result is copied to ``results/``, and a source file becomes a page below ``source/``.
- ``<!-- help: run -->`` becomes what ``gradsync run --help`` prints; ``<!-- specs: codec -->`` the table of registered
  codecs with their arguments. So these pages never lag behind the code.
- A fence marked ``python no-run`` (tests/test_docs.py compiles it and does not run it) is shown as Python.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
FENCE = re.compile(r"^( *```)python no-run$", re.MULTILINE)
ROLE, BARE = re.compile(r":[a-z]+:`~?([^`]+)`"), r"`\1`"  # Sphinx's, in docstrings
GENERATED = re.compile(r"^<!-- (?P<what>help|specs): (?P<name>[\w-]+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    pages += [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    added: set[Path] = set()
    for page in pages:
        outside = [page] if page.parent == ROOT else []
        outside += [target for target in _targets(page) if not target.is_relative_to(ROOT / "docs")]
        for target in outside:
            if target not in added and target.is_file():
                added.add(target)
                files.append(_generated(target, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to the site's addresses of their targets, and insert the generated parts."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    original = ROOT / Path(here).name if here.startswith("project/") else ROOT / "docs" / here

    def moved(match: re.Match[str]) -> str:
        target = _resolve(original, match["path"])
        if target is None:
            return match[0]
        uri = posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")
        return f"{match['before']}{uri}{match['anchor'] or ''}{match['after']}"

    markdown = FENCE.sub(r"\1python", LINK.sub(moved, markdown))
    return GENERATED.sub(lambda match: _GENERATORS[match["what"]](match["name"]), markdown)


def _resolve(page: Path, link: str) -> Path | None:
    """The file of the project that a link of a page leads to; None for an address."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return Path(posixpath.normpath(page.parent / link))


def _targets(page: Path) -> list[Path]:
    return [target for match in LINK.finditer(page.read_text()) if (target := _resolve(page, match["path"]))]


def _uri(target: Path) -> str:
    """The site's address of a file of the project."""
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    if target == ROOT / "README.md":
        return "index.md"
    if target.parent == ROOT and target.suffix == ".md":
        return f"project/{target.name}"
    if target.parent == ROOT / "benchmarks" / "results":
        return f"results/{target.name}"
    return f"source/{target.relative_to(ROOT).as_posix()}.md"


def _generated(target: Path, config: MkDocsConfig) -> File:
    uri = _uri(target)
    if not uri.startswith("source/"):
        return File.generated(config, uri, abs_src_path=str(target))
    name = target.relative_to(ROOT).as_posix()
    text = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n"
    return File.generated(config, uri, content=f"{text}{target.read_text()}````\n")


def _help(command: str) -> str:
    import click

    from gradsync.cli.main import main

    found = main.commands[command]
    context = click.Context(found, info_name=f"gradsync {command}", max_content_width=90, terminal_width=90)
    return f"```text\n{found.get_help(context)}\n```"


def _specs(kind: str) -> str:
    import gradsync  # noqa: F401 (registers the names)
    from gradsync.spec.registry import _library

    rows = ["| name | arguments and their defaults | |", "| --- | --- | --- |"]
    for name in _library.names(kind):
        factory = _library._entries[kind, name].factory
        parameters = inspect.signature(factory).parameters.values()
        shown = ", ".join(f"`{p.replace(annotation=p.empty)}`" for p in parameters)
        summary = (inspect.getdoc(factory) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {shown} | {ROLE.sub(BARE, summary)} |")
    return "\n".join(rows)


_GENERATORS = {"help": _help, "specs": _specs}
