"""What our code never does: run what it was sent. No pickle, no eval, no numpy or torch loader that unpickles."""

import ast

import pytest

from tests.kit.sources import ROOT, modules

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "runpy"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "unsafe_load", "read_pickle", "to_pickle"}
SKIPPED = {"tests", "build", "dist", "demo-data"}  # tests start what they wrote themselves

FILES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not (parts := path.relative_to(ROOT).parts)[0].startswith(".") and parts[0] not in SKIPPED
)


def offences(source: str) -> list[str]:
    """Return the banned imports and calls of a source, each with its line."""
    tree = ast.parse(source)
    names = _names(tree)
    problems = []
    for node in ast.walk(tree):
        offence = _offence(node, names)
        if offence:
            problems.append(f"line {getattr(node, 'lineno', '?')}: {offence}")
    return problems


def _names(tree: ast.AST) -> dict[str, str]:
    """Return what the names that a source imports stand for, wherever it imports them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    """Return the dotted name that an expression is, "" where it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _is_banned(module: str | None) -> bool:
    return (module or "").partition(".")[0] in BANNED_MODULES


def _offence(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Import):
        return next((alias.name for alias in node.names if _is_banned(alias.name)), "")
    if isinstance(node, ast.ImportFrom):
        if _is_banned(node.module):
            return str(node.module)
        return next((alias.name for alias in node.names if alias.name in BANNED_METHODS), "")
    if isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
        return node.attr
    if isinstance(node, ast.Constant) and node.value in BANNED_METHODS:  # for getattr
        return str(node.value)
    return _banned_call(node, names) if isinstance(node, ast.Call) else ""


def _banned_call(node: ast.Call, names: dict[str, str]) -> str:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    called = _full_name(node.func, names)
    if "allow_pickle" in given and not _is(given["allow_pickle"], False):
        return "allow_pickle"
    if called in BANNED_CALLS or called.removeprefix("builtins.") in BANNED_CALLS:
        return called
    if called == "numpy.load" and (len(node.args) > 2 or None in given):
        return "numpy.load with what may be allow_pickle"
    if called in ("torch.load", "torch.serialization.load") and not _is(given.get("weights_only"), True):
        return "torch.load without weights_only=True"
    if called in ("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "yaml.load"):
        return called
    if called == "importlib.import_module" and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value) if _is_banned(str(node.args[0].value)) else ""
    return ""


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_every_source_is_looked_at():
    """Also the examples, the benchmarks, and what makes the environment."""
    looked_at = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert {"capflow", "consumers", "dashboard", "engine_ext", "examples", "benchmarks", "requirements"} <= looked_at
    assert set(modules().values()) <= set(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_was_sent(path):
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "from torch import load as read\nread(path, weights_only=flag)",
        "import torch.serialization\ntorch.serialization.load(path)",
        "torch.jit.load(path)",
        "torch.load(path, **options)",
        "np.load(path, allow_pickle=flag)",
        "import numpy as np\nnp.load(path, None, True)",
        "import numpy as np\nnp.load(path, **options)",
        "import builtins\nbuiltins.eval(text)",
        "import _pickle",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module('dill')",
        "getattr(socket, 'recv_pyobj')()",
        "from pandas import read_pickle",
        "def f():\n    def g():\n        import shelve",
    ],
)
def test_the_search_finds_what_is_banned(source):
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(x)",
        "torch.load(p, weights_only=True)",
        "from torch import load\nload(p, weights_only=True)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "torch.compile(model)",
        "model.eval()",
        "import json",
    ],
)
def test_the_search_leaves_the_rest(source):
    assert not offences(source)
