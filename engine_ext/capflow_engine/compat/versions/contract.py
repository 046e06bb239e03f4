"""The contract: compares the surface table with the Python source of a vLLM, without importing it."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from capflow_engine.compat.versions.surface import CORE, OPTIONAL, OVERRIDES, READS, REPLACED, SYMBOLS

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Break(NamedTuple):
    """An entry of the table that a vLLM does not have, or has otherwise.

    need: the feature that is off for it.
    """

    need: str
    name: str
    problem: str


class Source:
    """Modules by name, read and parsed when first asked for.

    text: returns the text of a file, by its path from the package's parent; None if there is none.
    """

    def __init__(self, text: Callable[[str], str | None]) -> None:
        self._text = text
        self._trees: dict[str, ast.Module | None] = {}
        # The members of classes that were asked for.
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    @classmethod
    def of(cls, place: Path) -> Source:
        """Return the source in a wheel, or in a folder such as `site-packages`."""
        if place.is_dir():
            return cls(lambda name: (place / name).read_text("utf-8") if (place / name).is_file() else None)
        wheel = zipfile.ZipFile(place)
        names = set(wheel.namelist())
        return cls(lambda name: wheel.read(name).decode() if name in names else None)

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module; None if there is no such module."""
        if name not in self._trees:
            path = name.replace(".", "/")
            text = self._text(f"{path}.py")
            text = self._text(f"{path}/__init__.py") if text is None else text
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the statement that defines a name of a module, behind re-exports, and its module."""
        tree = self.module(module)
        if tree is None:
            return None
        definition: ast.AST | None = None
        for node in _statements(tree):
            if name in _names(node):
                definition = node
            elif isinstance(node, ast.ImportFrom) and (alias := _alias(node, name)) is not None:
                source = _absolute(node, module, package=self._is_package(module))
                if alias == "*":
                    if source.startswith("vllm") and (behind := self.find(source, name)) is not None:
                        return behind
                    continue
                if not source.startswith("vllm"):
                    definition = node
                    continue
                if self.module(f"{source}.{alias}") is not None:
                    definition = node
                elif (behind := self.find(source, alias)) is not None:
                    return behind
        if definition is None and self.module(f"{module}.{name}") is not None:
            return f"{module}.{name}", tree
        return None if definition is None else (module, definition)

    def class_of(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return a class, by its name or by another name of it, and its module."""
        for part in name.split("."):
            definition = self.find(module, part)
            if definition is None:
                return None
            module, node = definition
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                return self.class_of(module, node.value.id)
        return (module, node) if isinstance(node, ast.ClassDef) else None

    def member(self, module: str, cls: str, name: str) -> ast.AST | None:
        """Return the statement that defines a member of a class or of its bases: a method, a field or `self.name =`."""
        definition = self.class_of(module, cls)
        return None if definition is None else self._members_of(*definition).get(name)

    def abstract(self, module: str, cls: str) -> list[str]:
        """Return the abstract methods that a class leaves to its subclasses."""
        definition = self.class_of(module, cls)
        members = {} if definition is None else self._members_of(*definition)
        return [name for name, member in members.items() if isinstance(member, _Function) and _is_abstract(member)]

    def _members_of(self, module: str, node: ast.ClassDef) -> dict[str, ast.AST]:
        """Return the members of a class by name, with those of its bases."""
        if node in self._members:
            return self._members[node]
        members: dict[str, ast.AST] = {}
        for statement in node.body:
            for name in _names(statement):
                members.setdefault(name, statement)
        for part in ast.walk(node):
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    members.setdefault(target.attr, part)
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base  # noqa: PLW2901
            definition = self.class_of(module, base.id) if isinstance(base, ast.Name) else None
            if definition is not None:
                members = {**self._members_of(*definition), **members}
        self._members[node] = members
        return members

    def _is_package(self, module: str) -> bool:
        return self._text(module.replace(".", "/") + ".py") is None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under `if` and `try`."""
    waiting: list[ast.stmt] = list(tree.body)
    for node in waiting:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                waiting += getattr(node, part, [])


def _names(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | _Function):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _alias(node: ast.ImportFrom, name: str) -> str | None:
    return next((alias.name for alias in node.names if (alias.asname or alias.name) in (name, "*")), None)


def _absolute(node: ast.ImportFrom, module: str, *, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def breaks(theirs: Source, ours: Source | None = None) -> list[Break]:
    """Return the entries of the surface table that a vLLM does not fulfil.

    ours: the source of `capflow_engine`; by default the running one's.
    """
    ours = ours or Source.of(Path(__file__).parents[3])
    result = []
    for symbol in SYMBOLS:
        places = filter(None, (symbol.module, symbol.instead))
        if not any(theirs.find(place, symbol.name) for place in places):
            result.append(Break(symbol.need, f"{symbol.module}.{symbol.name}", "missing"))
    for override in OVERRIDES:
        module, _, path = override.theirs.partition(":")
        cls, _, name = path.rpartition(".")
        member = theirs.member(module, cls, name)
        if not isinstance(member, _Function):
            result.append(Break(override.need, f"{module}.{path}", "missing"))
            continue
        if (mine := _our_method(ours, override.ours)) is not None:
            result += [Break(override.need, f"{module}.{path}", each) for each in misfits(mine, member)]
    result += _not_implemented(theirs, ours)
    for replaced in REPLACED:
        module, _, path = replaced.theirs.partition(":")
        cls, _, name = path.rpartition(".")
        if theirs.member(module, cls, name) is None:
            result.append(Break(replaced.need, f"{module}.{path}", "missing"))
    for read in READS:
        module, _, cls = read.cls.partition(":")
        if read.unless and theirs.member(module, cls, read.unless) is not None:
            continue
        missing = [name for name in read.names if theirs.member(module, cls, name) is None]
        result += [Break(read.need, f"{module}.{cls}.{name}", "missing") for name in missing]
    return [each for each in dict.fromkeys(result) if each.need != OPTIONAL]


def _not_implemented(theirs: Source, ours: Source) -> Iterator[Break]:
    """Yield the abstract methods of vLLM's classes that our subclasses have not: such a subclass has no objects."""
    classes = [(each.ours.rpartition(".")[0], each.theirs.rpartition(".")[0], each.need) for each in OVERRIDES]
    for mine, its, need in dict.fromkeys(classes):
        module, _, cls = its.partition(":")
        for name in theirs.abstract(module, cls):
            if _our_method(ours, f"{mine}.{name}") is None:
                yield Break(need, f"{module}.{cls}.{name}", "abstract; capflow's class does not have it")


def _is_abstract(function: _Function) -> bool:
    return any(ast.unparse(each).rpartition(".")[2] == "abstractmethod" for each in function.decorator_list)


def off(broken: list[Break]) -> Mapping[str, list[Break]]:
    """Return what is missing, by the need that it breaks; `core` is first."""
    result: dict[str, list[Break]] = {}
    for each in sorted(broken, key=lambda b: b.need != CORE):
        result.setdefault(each.need, []).append(each)
    return result


def _our_method(ours: Source, place: str) -> _Function | None:
    module, _, path = place.partition(":")
    cls, _, name = path.rpartition(".")
    tree = ours.module(module)
    assert tree is not None
    for part in cls.split("."):
        scopes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | _Function))
        tree = next(node for node in scopes if node.name == part)  # type: ignore[assignment]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    for base in getattr(tree, "bases", ()):
        if isinstance(base, ast.Name) and ours.class_of(module, base.id) is not None:
            method = _our_method(ours, f"{module}:{base.id}.{name}")
            if method is not None:
                return method
    return None


def misfits(ours: _Function, theirs: _Function) -> Iterator[str]:
    """Yield why calls of a method of vLLM's do not fit ours, and why our calls of it do not fit it."""
    mine, its = ours.args, theirs.args
    positional, their_positional = _positional(mine), _positional(its)
    named = {a.arg for a in (*positional, *mine.kwonlyargs)}
    required = len(positional) - len(mine.defaults)
    for number, parameter in enumerate(their_positional):
        if number < len(positional):
            if positional[number].arg != parameter.arg and not positional[number].arg.startswith("_"):
                yield f"parameter {number} is {parameter.arg}; capflow's is {positional[number].arg}"
        elif mine.vararg is None and parameter.arg not in named:
            yield f"capflow's method does not take {parameter.arg}"
    if required > len(their_positional) and its.vararg is None:
        yield f"has no parameter {positional[len(their_positional)].arg}"
    if mine.kwarg is None:
        for parameter in its.kwonlyargs:
            if parameter.arg not in named:
                yield f"capflow's method does not take {parameter.arg}"
    # Where versions differ, a method has a call for each.
    calls = [list(_misfits_of_call(call, its)) for call in _calls_of_super(ours)]
    if calls and all(calls):
        yield from calls[0]


def _positional(arguments: ast.arguments) -> list[ast.arg]:
    """Return the positional parameters but `self`."""
    return [*arguments.posonlyargs, *arguments.args][1:]


def _misfits_of_call(call: ast.Call, its: ast.arguments) -> Iterator[str]:
    positional = _positional(its)
    given = sum(not isinstance(argument, ast.Starred) for argument in call.args)
    if given > len(positional) and its.vararg is None:
        yield f"takes {len(positional)} arguments; capflow passes {given}"
    names = {parameter.arg for parameter in (*positional, *its.kwonlyargs)}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in names and its.kwarg is None:
            yield f"does not take {keyword.arg}"
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        return
    passed = {keyword.arg for keyword in call.keywords}
    required = positional[given : len(positional) - len(its.defaults)]
    required += [a for a, default in zip(its.kwonlyargs, its.kw_defaults, strict=True) if default is None]
    for parameter in required:
        if parameter.arg not in passed:
            yield f"needs {parameter.arg}, which capflow does not pass"


def _calls_of_super(method: _Function) -> Iterator[ast.Call]:
    """Yield the calls of `super().METHOD`, also by a local name of it."""

    def is_super(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == method.name
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "super"
        )

    local = {
        target.id
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and is_super(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and (
            is_super(node.func) or (isinstance(node.func, ast.Name) and node.func.id in local)
        ):
            yield node


def installed() -> Source:
    """Return the source of the vLLM that Python finds here, without importing it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Source.of(Path(spec.origin).parents[1])
