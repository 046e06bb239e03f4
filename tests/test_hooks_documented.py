"""What a plugin fills in stands in docs/plugins.md, with the signature that it has."""

import inspect
import re

import pytest
from sources import ROOT

from capflow import hookspecs
from capflow.consumer import Consumer, Context, Controller, StepView
from capflow.testing.conformance import Conformance

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def hooks():
    """Return the hooks of plugin modules, by name."""
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "capflow_spec")}


def methods(kind):
    """Return what a class has for others to fill in or call, by name."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and callable(inspect.unwrap(getattr(value, "__func__", value)))
        and not inspect.isclass(value)
    }


DOCUMENTED = [
    *(("", name, hook) for name, hook in hooks().items()),
    *(
        (kind.__name__, name, call)
        for kind in (Consumer, Context, Controller, StepView)
        for name, call in methods(kind).items()
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "call"), DOCUMENTED, ids=[f"{kind}.{name}".lstrip(".") for kind, name, _ in DOCUMENTED]
)
def test_every_hook_is_documented_with_its_signature(kind, name, call):
    section = PAGE if not kind else PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]
    signature = str(inspect.signature(getattr(call, "__func__", call))).replace("'", "")
    signature = re.sub(r"\((self|cls)(?:, )?", "(", signature)
    assert f"`{name}{signature}`" in section, f"docs/plugins.md: `{name}{signature}`"


def test_the_page_names_nothing_else():
    told = set(re.findall(r"^\* `(\w+)\(", PAGE, re.MULTILINE))
    assert told == {name for _, name, _ in DOCUMENTED}


def test_every_rule_of_the_conformance_suite_is_documented():
    rules = [name for name, _ in inspect.getmembers(Conformance, inspect.isfunction) if name.startswith("test_")]
    told = re.findall(r"^\| `(test_\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert sorted(told) == sorted((name, inspect.getdoc(getattr(Conformance, name))) for name in rules)


def test_every_hook_has_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert all(name in tests for name in hooks())
