"""The project's own source files, and what they import, read without running them."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tests" / "kit"

PROCESSES = KIT / "processes"
"""The programs that tests start as processes of their own."""

PACKAGES = {
    "capflow": ROOT / "capflow",
    "capflow_consumers": ROOT / "consumers" / "capflow_consumers",
    "capflow_dashboard": ROOT / "dashboard" / "capflow_dashboard",
    "capflow_engine": ROOT / "engine_ext" / "capflow_engine",
    "capflow_models": ROOT / "engine_ext" / "capflow_models",
}


def module_name(path: Path, package: str) -> str:
    """Return the dotted name of a file of one of `PACKAGES`."""
    parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Return every module of the project, name → file."""
    return {
        module_name(path, package): path
        for package, directory in PACKAGES.items()
        for path in sorted(directory.rglob("*.py"))
    }


def imports_of(source: str, modules: set[str]) -> set[str]:
    """Return the modules that a source imports, in functions too; `from p import m` is `p.m` if that is a module."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported.add(inner if inner in modules else node.module)
    return imported
