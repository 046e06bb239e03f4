"""The voice of code and pages: no banned phrase, no line over 120, no vague name, no comment behind a field."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.sources import ROOT

LINE_MAX = 120
PHRASES = (
    "always holds:",
    "are told of",
    "is told of",
    "likewise",
    "so too",
    "told of",
    "what always holds",
    "what becomes of",
    "what came of",
    "what is known of",
    "what is said",
    "what was said",
)
NAMES = {"found", "known", "said", "told", "what", "whats"}
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
SELF = "tests/project/test_style.py"

_PHRASE = re.compile(rf"\b({'|'.join(map(re.escape, PHRASES))})(?!\w)", re.IGNORECASE)
_TOOL_COMMENT = re.compile(r"# *(noqa|type:|pragma|nosec|fmt:)")


def problems(name: str, text: str) -> list[str]:
    """Return what is wrong with a file, a line each."""
    rows = text.splitlines()
    offences = [*_lines(rows, markdown=name.endswith(".md")), *(_phrases(rows) if name != SELF else ())]
    if name.endswith(".py"):
        tree = ast.parse(text)
        offences += [*_names(tree), *_comments(tree, rows)]
    return [f"{name}:{number}: {message}" for number, message in offences]


def _lines(rows: list[str], *, markdown: bool) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, row in enumerate(rows, 1):
        fenced ^= markdown and row.lstrip().startswith(("```", "~~~"))
        table = markdown and row.lstrip().startswith("|")
        if len(row) > LINE_MAX and not (fenced or table):
            yield number, f"a line of {len(row)} characters, expected at most {LINE_MAX}"


def _phrases(rows: list[str]) -> Iterator[tuple[int, str]]:
    for number, row in enumerate(rows, 1):
        for match in _PHRASE.finditer(row):
            yield number, f"the phrase {match[1].lower()!r}"


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                pass
            case _:
                continue
        if name in NAMES:
            yield node.lineno, f"the name {name!r}, expected a noun"


def _comments(tree: ast.Module, rows: list[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and _is_field(node):
            comment = rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
            if comment.startswith("#") and not _TOOL_COMMENT.match(comment):
                yield node.end_lineno, "a comment behind a field, expected above it"


def _is_field(node: ast.AnnAssign | ast.Assign) -> bool:
    """Return whether an assignment is that of a field: `name: type = …`, or `self.name = …`."""
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    is_of_self = all(isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self" for t in targets)
    return is_of_self or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))


def _folder(name: str) -> str:
    """Return the folder of a file: two levels of `capflow` and `tests`, one of the others, "." for the root."""
    parents = name.split("/")[:-1]
    return "/".join(parents[: 2 if name.startswith(("capflow/", "tests/")) else 1]) or "."


def _files() -> dict[str, list[str]]:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = defaultdict(list)
    for name in listed.stdout.splitlines():
        if not GENERATED.search(name) and Path(ROOT, name).exists():
            folders[_folder(name)].append(name)
    return folders


FILES = _files()


@pytest.mark.parametrize("folder", sorted(FILES))
def test_a_folder_follows_the_style(folder):
    lines = [line for name in FILES[folder] for line in problems(name, Path(ROOT, name).read_text(encoding="utf-8"))]
    assert not lines, "\n".join(["", *lines])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\n" + "#" * 121, "a.py:2: a line of 121 characters, expected at most 120"),
        ("a.md", "word " * 25, "a.md:1: a line of 125 characters, expected at most 120"),
        ("a.md", "Rows, Likewise.", "a.md:1: the phrase 'likewise'"),
        ("a.py", '"""What always holds: rows."""', "a.py:1: the phrase 'what always holds'"),
        ("a.py", "found = 1", "a.py:1: the name 'found', expected a noun"),
        ("a.py", "def f(*, what): ...", "a.py:1: the name 'what', expected a noun"),
        ("a.py", "[0 for said in ()]", "a.py:1: the name 'said', expected a noun"),
        ("a.py", "match 1:\n    case told: ...", "a.py:2: the name 'told', expected a noun"),
        ("a.py", "class A:\n    rows: int = 0  # lost", "a.py:2: a comment behind a field, expected above it"),
        ("a.py", "self.rows = 0  # lost", "a.py:1: a comment behind a field, expected above it"),
    ],
)
def test_each_rule_names_file_and_line(name, text, message):
    assert problems(name, text) == [message]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", f"| {'-' * 130} |\n```\n{'x' * 130}\n```\nShort."),
        ("a.py", "rows: int = 0  # noqa: X\nasked = {'what': 1}\nx.found = 1  # a count"),
    ],
)
def test_the_style_allows(name, text):
    assert problems(name, text) == []
