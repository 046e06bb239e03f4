"""The public names: plugins, examples and documentation import from `capflow`, which imports nothing before its use."""

import ast
import importlib
import re
import subprocess
import sys

import pytest

import capflow
from tests.kit.sources import ROOT, modules

PUBLIC = {
    "capflow": set(capflow.__all__),
    "capflow.testing": set(importlib.import_module("capflow.testing").__all__),
    "capflow_engine.serve.rpc": {"capflow_pb2", "capflow_pb2_grpc"},
    "capflow_engine.serve.rpc.capflow_pb2_grpc": {"GenerateStub", "SteeringStub"},
    "capflow_models": set(importlib.import_module("capflow_models").__all__),
}
"""The names that may be imported from each module. The modules of gRPC are generated from the schema."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
PLUGINS = [
    ROOT / "consumers" / "capflow_consumers" / "log.py",
    *sorted((ROOT / "capflow" / "plugin_template").glob("*.py.txt")),
    *sorted((ROOT / "examples").rglob("*.py")),
]


def imported(source):
    """Return what a source imports, as pairs: a module, and the name from it or None."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def inner(source):
    """Return the imports of inner names in a source. The package of a plugin is not one of capflow's."""
    packages = {name.partition(".")[0] for name in modules()}
    return [
        (module, name)
        for module, name in imported(source)
        if module.partition(".")[0] in packages
        and (module not in PUBLIC or (name is not None and name not in PUBLIC[module]))
    ]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.name)
def test_plugins_and_examples_import_public_names(path):
    source = path.read_text(encoding="utf-8").replace("${Class}", "Name").replace("$module", "name")
    assert inner(source) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_import_public_names(page):
    snippets = SNIPPET.findall(page.read_text(encoding="utf-8"))
    assert [name for code in snippets for name in inner(code)] == []


@pytest.mark.parametrize(
    ("source", "imports"),
    [
        ("from capflow.errors import explain", [("capflow.errors", "explain")]),
        ("from capflow import limits", [("capflow", "limits")]),
        ("def f():\n    import capflow.hub.hub", [("capflow.hub.hub", None)]),
        ("import capflow\nfrom capflow import explain\nfrom capflow.testing import MemoryHub\nimport numpy", []),
    ],
)
def test_the_reader_of_imports_sees_what_is_inner(source, imports):
    assert inner(source) == imports


def homes():
    """Return the public names by module as type checkers read them, each with the name that it has there."""
    (block,) = (
        node for node in ast.parse((ROOT / "capflow/__init__.py").read_text("utf-8")).body if isinstance(node, ast.If)
    )
    return {alias.asname or alias.name: (node.module, alias.name) for node in block.body for alias in node.names}


def test_type_checkers_and_programs_see_the_same_names():
    assert homes() == capflow._MODULES
    assert {*homes(), "__version__"} == set(capflow.__all__)
    assert dir(capflow) == sorted(capflow.__all__)


@pytest.mark.parametrize("name", sorted(homes()))
def test_each_public_name_is_where_it_is_said_to_be(name):
    module, inside = homes()[name]
    if module.startswith("capflow_engine") or name == "TorchRows":
        source = modules()[module].read_text(encoding="utf-8")
        defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert inside in defined
    else:
        assert getattr(capflow, name) is getattr(importlib.import_module(module), inside)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'capflow' has no attribute 'frame_of'"):
        capflow.frame_of  # noqa: B018


def loaded(source):
    """Return the modules, outside the standard library, that a program has loaded at its end."""
    packages = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names"
    inner_modules = "(name for name in sys.modules if name.startswith('capflow.'))"
    code = f"{source}\nimport sys; print(*{packages}, *{inner_modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_capflow_loads_only_its_version():
    before = loaded("")
    assert loaded("import capflow") - before == {"capflow", "capflow.version"}


@pytest.mark.parametrize(
    "use", ["capflow.Consumer, capflow.Context, capflow.hookimpl", "capflow.Steer", "capflow.explain"]
)
def test_what_a_plugin_needs_loads_no_engine_no_socket_and_no_database(use):
    heavy = {"torch", "vllm", "triton", "transformers", "duckdb", "pyarrow", "zmq", "rich", "click", "websockets"}
    assert loaded(f"import capflow; {use}").isdisjoint(heavy)
