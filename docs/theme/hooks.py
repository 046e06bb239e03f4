"""What the documentation site needs beside its pages; mkdocs.yml names this file as its hook.

The pages of docs/ are written to be read on a code host too. Here they become pages of the site: the README and its
neighbours get pages of their own, the marks that the tests read are taken off code blocks, and the script that draws
Mermaid pictures is put into the site.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent

OUTSIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "reporting.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
}
"""Files of the repository's root, and what they are called in the site."""

MERMAID = "assets/javascripts/mermaid.js"

_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")
_FENCE = re.compile(r"^(```\w+) (?:file=(?P<file>\S+)|\S+)$", re.MULTILINE)


def mermaid() -> Path:
    """Return Mermaid's script, as a Python package brings it; the package itself is not imported."""
    package = importlib.util.find_spec("mermaidx")
    if package is None or package.origin is None:
        raise PluginError("got no package mermaidx, expected Mermaid's script in it; pip install 'capflow[docs]'")
    return Path(package.origin).parent / "assets" / "mermaid.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and Mermaid, which a package for Python brings."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, MERMAID, content=mermaid().read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links at the site's pages, and give each code block that is a file its name as a title."""
    outside = page.file.src_uri in OUTSIDE.values()

    def target(match: re.Match[str]) -> str:
        link = match[1]
        if outside:
            return OUTSIDE.get(link, link.removeprefix("docs/"))
        return OUTSIDE.get(link.removeprefix("../"), link) if link.startswith("../") else link

    def fence(match: re.Match[str]) -> str:
        return f'{match[1]} title="{match["file"]}"' if match["file"] else match[1]

    return _FENCE.sub(fence, _LINK.sub(target, markdown))
