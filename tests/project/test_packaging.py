"""What a release carries: every module, the data beside them, the licence, and one version."""

import configparser
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser

import pytest

import capflow
from capflow.extras import EXTRAS
from tests.kit.sources import PACKAGES, ROOT, modules
from tests.kit.wheels import build_sdist, build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def files_beside_modules():
    """Everything in the packages, as the wheel names it."""
    for directory in PACKAGES.values():
        for path in directory.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(directory.parent).as_posix()


def test_everything_in_the_packages_is_in_the_wheel(wheel):
    assert set(files_beside_modules()) <= set(wheel.namelist())


def test_nothing_else_is_in_the_wheel(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {*PACKAGES, f"capflow-{capflow.__version__}.dist-info"}


def test_the_source_distribution_installs_the_same_files(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    target = tmp_path / "installed"
    subprocess.run([*pip, "--target", target, build_sdist(tmp_path / "sdist")], check=True, capture_output=True)
    for name in wheel.namelist():
        if ".dist-info/" not in name:
            assert (target / name).read_bytes() == wheel.read(name), name


def test_every_package_is_typed(wheel):
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_the_dashboard_brings_its_pages(wheel):
    pages = {name.rpartition(".")[2] for name in wheel.namelist() if name.startswith("capflow_dashboard/")}
    assert {"html", "css", "js"} <= pages


def test_the_licence_comes_along(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def requirements(extra):
    """Return the packages that an extra asks for, also through the extras that it names."""
    packages = set()
    for line in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"capflow\[(.*)\]", line)
        packages |= set().union(*map(requirements, inner[1].split(","))) if inner else {re.split(r"[<>=\[]", line)[0]}
    return packages


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_brings_the_packages_that_are_looked_for(extra):
    asked = requirements(extra)
    of_others = {"torch", "transformers"}  # vLLM brings these two
    assert EXTRAS[extra].keys() - of_others <= asked
    if extra not in ("demo", "grpc", "vllm"):  # these bring more than what shows that they are installed
        assert EXTRAS[extra].keys() == asked


def test_the_extra_all_is_what_consumers_need():
    engines = {"all", "cluster", "cpu", "demo", "docs", "grpc", "test", "torch", "vllm"}
    others = set().union(*map(requirements, PROJECT["optional-dependencies"].keys() - engines))
    assert requirements("all") == others


def test_the_metadata_names_authors_keywords_and_classifiers(wheel):
    headers = metadata(wheel)
    assert headers["Author"]
    assert headers["Keywords"]
    # The name on the index is another project's: no address of it is ours.
    assert not any("pypi.org" in url for url in headers.get_all("Project-URL") or ())
    assert "Typing :: Typed" in headers.get_all("Classifier")


def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_a_plain_install_brings_neither_torch_nor_vllm(wheel):
    needed = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
    assert not [line for line in needed if re.match(r"(torch|vllm|triton|transformers|accelerate|gguf)\b", line)]


def test_each_entry_point_names_a_module(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert set(points["capflow"].values()) <= set(modules())
    assert points["console_scripts"]["capflow"] == "capflow.cli:main"


def test_the_version_stands_in_one_place(wheel):
    assert "version" in PROJECT["dynamic"]
    assert metadata(wheel)["Version"] == capflow.__version__
    text = f'"{capflow.__version__}"'
    files = [
        path for path in [*modules().values(), ROOT / "pyproject.toml"] if text in path.read_text(encoding="utf-8")
    ]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["capflow/version.py"]


def test_the_changelog_knows_the_version():
    assert f"\n## {capflow.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("lock", ["cpu.lock", "core.lock", "tools.lock"])
def test_locks_pin_every_package_and_the_bytes_of_its_wheel(lock):
    lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]*==[A-Za-z0-9.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    assert pins == sorted(pins, key=lambda pin: pin.partition("==")[0])
    names = {pin.partition("==")[0] for pin in pins}
    core = {re.split(r"[^A-Za-z0-9_-]", line)[0].replace("_", "-").lower() for line in PROJECT["dependencies"]}
    assert (core if lock != "tools.lock" else {"cyclonedx-bom", "pip-audit"}) <= names
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec"})


def test_the_core_lock_is_part_of_the_whole_and_free_of_engines():
    whole, core = (
        {line for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines() if "==" in line}
        for name in ("cpu.lock", "core.lock")
    )
    assert {line for line in core if not line.startswith("#")} <= whole
    assert not [line for line in core if line.startswith(("torch", "vllm", "triton", "transformers"))]


def test_the_core_is_small():
    """What is needed directly, and the three packages that rich brings."""
    lines = (ROOT / "requirements" / "core.lock").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if "==" in line and not line.startswith("#")]) <= 12


def audit(tmp_path, report):
    """Run `make audit` with a pip-audit that writes this report, or none, and exits as pip-audit does."""
    checkout = tmp_path / "checkout"
    (checkout / "requirements").mkdir(parents=True)
    for name in ("tools.sh", "tools.lock"):
        shutil.copy(ROOT / "requirements" / name, checkout / "requirements")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    tools = checkout / ".tools" / "bin"
    tools.mkdir(parents=True)
    digest = hashlib.sha256((ROOT / "requirements" / "tools.lock").read_bytes()).hexdigest()[:16]
    (tools.parent / f"lock-{digest}").touch()
    program = tools / "pip-audit"
    written = "" if report is None else f"Path('.tools/audit.json').write_text({json.dumps(report)!r})"
    program.write_text(
        f"#!{sys.executable}\nfrom pathlib import Path\n{written}\nprint('No known vulnerabilities found')\n"
    )
    program.chmod(0o755)
    command = ["bash", checkout / "requirements" / "tools.sh", "audit"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


FINE = {"name": "click", "version": "1", "vulns": []}
SKIPPED = {"name": "rich", "skip_reason": "not found"}
WEAK = {"name": "numpy", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([FINE], 0, "1 packages audited, 0 vulnerabilities"),
        ([FINE, WEAK], 1, "numpy 1: X-1, fixed in 2"),
        ([FINE, SKIPPED], 2, "1 packages were not audited"),
        (None, 2, "tools.lock was not audited"),
    ],
)
def test_an_audit_says_what_it_did_not_look_up(tmp_path, packages, code, words):
    done = audit(tmp_path, None if packages is None else {"dependencies": packages})
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
