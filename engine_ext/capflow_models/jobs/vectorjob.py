"""The program of the commands of `capflow vectors` that fit nothing. Its one argument is a `VectorJob` as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

import capflow
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.kinds import load_probe
from capflow.probes.labels import read_groups
from capflow.saes.load import load_sae
from capflow.text.printable import printable
from capflow_models.backends import Backend, check_directions, open_model
from capflow_models.jobs.ending import run_program
from capflow_models.jobs.table import print_table
from capflow_models.runs.lines import read_lines
from capflow_models.spec import Vector
from capflow_models.vectors.file import check_out, origin_of, save_vectors
from capflow_models.vectors.sets import read_pairs
from capflow_models.vectors.sources import load_directions, of_length, probe_vector, sae_vector
from capflow_models.vectors.tables import Projections, cosines, norms

ALL = "all"
"""The group of rows without another one."""


class VectorJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the commands.

    files: of vectors; for `sae` and `probe` the one source.
    site: of the autoencoder, if its files have none.
    features: coefficients by feature.
    name: of the probe.
    length: that of the vector; 0 for its own.
    everything: compare every vector with every other one.
    data, labels, positions: a data set, the file with its groups, and which rows.
    prompts, pairs: the file whose last tokens are projected.
    """

    task: Literal["sae", "probe", "norms", "cosine", "project"]
    files: list[str]
    out: str = ""
    site: str = ""
    features: dict[int, float] = {}
    name: str = ""
    length: float = 0.0
    as_json: bool = False
    everything: bool = False
    data: str = ""
    labels: str = ""
    positions: str = "all"
    prompts: str = ""
    pairs: str = ""
    model: str = ""
    backend: Backend | None = None
    arguments: dict[str, Any] = {}


class GroupedPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of prompts: `{"prompt": …, "group": …}`; an `id` is not read."""

    prompt: str
    group: str = ALL
    id: str = ""


def work(job: VectorJob) -> None:
    """Do a job."""
    if job.task in ("sae", "probe"):
        make(job)
        return
    files = {path: load_directions(path) for path in dict.fromkeys(job.files)}
    if job.task == "norms":
        show(norms(files), job)
    elif job.task == "cosine":
        show(cosines(files, everything=job.everything), job)
    else:
        show(project(job, Projections(files)), job)


def make(job: VectorJob) -> None:
    """Write the vector of a probe or of features."""
    check_out(job.out)
    (source,) = job.files
    vector: Vector
    if job.task == "sae":
        sae = load_sae(source, job.site or None)
        site, vector = sae.target, sae_vector(sae, job.features)
        fields = {"features": ",".join(f"{number}={value:g}" for number, value in job.features.items())}
    else:
        probe = load_probe(source)
        site, vector = probe.site, probe_vector(probe, job.name or None)
        fields = {"probe": job.name or probe.names[0]}
    if job.length:
        vector = of_length(vector, job.length, source)
    save_vectors(job.out, {site.layer: vector}, hook=site.hook, origin=origin_of(source, method=job.task, **fields))
    length = float(np.linalg.norm(vector.astype(np.float64)))
    print(printable(f"capflow: {job.out}, a vector at {site} of length {length:.4g}"), file=sys.stderr)


def project(job: VectorJob, projections: Projections) -> Sequence[msgspec.Struct]:
    """Return the table of the projections of a data set's rows, or of prompts' last rows."""
    if job.data:
        _project_data(job, projections)
    else:
        _project_prompts(job, projections)
    return list(projections.table())


def _project_data(job: VectorJob, projections: Projections) -> None:
    positions = Positions.parse(job.positions, where="--positions")
    groups = read_groups(Path(job.labels)) if job.labels else None
    sites: set[Site] = set()
    count = 0
    for capture in capflow.open(job.data):
        group = ALL if groups is None else groups.get(capture.id)
        if group is None:
            continue
        wanted = positions.at(capture.prompt_length)
        for site in projections.sites:
            if site not in capture:
                continue
            rows = capture[site]
            chosen = np.array([int(position) in wanted for position in rows.positions], bool)
            if chosen.any():
                projections.add(site, np.asarray(rows.rows)[chosen], group, f"request {capture.id}")
                sites.add(site)
                count += 1
    absent = [str(site) for site in projections.sites if site not in sites]
    if absent:
        expected = f"rows at {', '.join(absent)}" + (" of the requests that are labelled" if job.labels else "")
        raise UsageError(explain(f"--data {job.data}", got=f"rows at {_listed(sites)}", expected=expected))


def _listed(sites: Iterable[Site]) -> str:
    return ", ".join(map(str, sorted(sites))) or "none of the vectors' sites"


def _project_prompts(job: VectorJob, projections: Projections) -> None:
    if job.pairs:
        pairs = [(p.message, n.message) for p, n in read_pairs(Path(job.pairs))]
        prompts = [each for pair in pairs for each in zip(pair, ("positive", "negative"), strict=True)]
    else:
        prompts = [(line.prompt, line.group) for line in read_lines(Path(job.prompts), "--prompts", GroupedPrompt)]
    check_directions(job.model, job.arguments, projections.directions)
    arguments = dict(job.arguments)
    if job.backend == "vllm":
        arguments.setdefault("sites", [str(site) for site in projections.sites])
    with open_model(job.backend or "vllm", job.model, arguments) as model:
        projections.check(model.info, job.model)
        rows = model.last_rows([text for text, _ in prompts], projections.sites)
    for site, at_site in rows.items():
        for group in dict.fromkeys(group for _, group in prompts):
            chosen = [number for number, (_, its) in enumerate(prompts) if its == group]
            projections.add(site, at_site[chosen], group, f"group {group}")


def show(lines: Sequence[msgspec.Struct], job: VectorJob) -> None:
    """Print a table, or a JSON object a line."""
    if job.as_json:
        for line in lines:
            print(msgspec.json.encode(line).decode())
        return
    fields = lines[0].__struct_fields__
    print_table(
        [name.replace("_", " ") for name in fields], [[getattr(line, name) for name in fields] for line in lines]
    )


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: work(msgspec.json.decode(sys.argv[1], type=VectorJob)))


if __name__ == "__main__":
    sys.exit(main())
