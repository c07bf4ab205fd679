"""What the site does with links that lead out of `docs/`: each file of the repository that is linked to becomes a page of it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_UPWARDS = re.compile(r"\]\((\.\./[^)#]+)(#[^)]*)?\)")
_CELL, _CODE, _BREAK = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"<code>[^<]*"), re.compile(r"(\w[._])(?=\w)")
"""A cell of a table, code in it, and where its names may break."""
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}
_ROOM = "source"
"""The folder of the site that these pages are in."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of `docs/` that a page links to."""
    root = Path(config.docs_dir).parent
    for page in files.documentation_pages():
        for target, _ in _UPWARDS.findall(page.content_string):
            path = _outside(target, page)
            place = f"{_ROOM}/{path}.md"
            if path and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=_page(root, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it
    """Lead links out of `docs/` to those pages."""
    up = posixpath.relpath(_ROOM, posixpath.dirname(page.file.src_uri) or ".")

    def led(found: re.Match[str]) -> str:
        path = _outside(found[1], page.file)
        return f"]({up}/{path}.md)" if path else found[0]

    return _UPWARDS.sub(led, markdown)


def _outside(target: str, page: File) -> str:
    """Return the path in the repository that a link of a page leads to, or "" if it stays within `docs/`."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), target))
    return path.removeprefix("../") if path.startswith("../") else ""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it
    """Let names in tables break after their dots and underscores."""
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _BREAK.sub(r"\1<wbr>", code[0]), cell[0]), html)


def _page(root: Path, path: str) -> str:
    """A file of the repository as a page; one that is missing fails the build, as any dead link does."""
    text = (root / path).read_text("utf-8")
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n~~~~{{ .{language} }}\n{text}~~~~\n"
