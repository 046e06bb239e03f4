"""The kit for plugins: writes a package with a working consumer and its tests, to be changed.

The package is made from the files of `capflow/plugin_template`; `$name`, `$module` and `$Class` in them stand for the
plugin's names.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple

from capflow.errors import CapflowError, UsageError, explain

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_LENGTH_MAX = 40
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "$module.py": "consumer.py.txt",
    "test_$module.py": "test_consumer.py.txt",
}


class Names(NamedTuple):
    """The names of a plugin: of its consumer, its module, and its class."""

    name: str
    module: str
    cls: str

    @classmethod
    def of(cls, name: str, taken: Collection[str]) -> Names:
        """Return the names of a plugin. Raises UsageError for a name that is not allowed or taken.

        taken: the names of installed plugins.
        """
        if not _NAME.fullmatch(name) or len(name) > _LENGTH_MAX:
            words = "in words joined with -, like loudest or token-norms"
            expected = f"at most {_LENGTH_MAX} lower-case letters and digits, {words}"
            raise UsageError(explain("NAME", got=name, expected=expected))
        if keyword.iskeyword(name) or name == "test":
            raise UsageError(explain("NAME", got=name, expected="a name that Python does not use"))
        if name in taken:
            do = "`capflow plugins` lists them"
            raise UsageError(explain("NAME", got=name, expected="one that no installed plugin has", do=do))
        module = "capflow_" + name.replace("-", "_")
        if importlib.util.find_spec(module) is not None:
            raise UsageError(explain("NAME", got=name, expected=f"one whose module, {module}, is not installed"))
        return cls(name, module, "".join(word.capitalize() for word in name.split("-")))


def write_plugin(names: Names, directory: Path) -> list[Path]:
    """Write a plugin's package into a new directory. Returns its files.

    Raises UsageError if the directory exists, CapflowError if it cannot be written. Then nothing of it is left.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        do = "name another directory with --directory, or remove it"
        raise UsageError(explain(str(directory), got="something that is there", expected="nothing", do=do)) from None
    except OSError as e:
        raise UsageError(explain(str(directory), got=e.strerror or str(e), expected="a directory to make")) from e
    words = {"name": names.name, "module": names.module, "Class": names.cls}
    template = resources.files("capflow") / "plugin_template"
    written = []
    try:
        for name, source in _FILES.items():
            path = directory / Template(name).substitute(words)
            text = Template((template / source).read_text(encoding="utf-8")).substitute(words)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as e:
        shutil.rmtree(directory, ignore_errors=True)
        raise CapflowError(explain(f"{directory} cannot be written", got=e.strerror or str(e))) from e
    return written
