"""Analyse a sharded data set on many machines: Daft plans, Ray runs.

    python examples/cluster.py rows/ --probe examples/code.safetensors --ray auto

Prints the mean norm of the rows by layer, and the tokens with the highest scores on each probe of the file. `rows` is
the root of a data set of `filesystem:layout=sharded`, or its URL, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`.
Without `--ray` it runs in threads on this machine. `--ray auto` joins the cluster to which this machine belongs,
`--ray local` starts one of this machine alone.

The probes must be linear. Only the columns and row groups that a step needs are read. Vectors never leave the workers.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import daft
import ml_dtypes
import numpy as np
from daft import DataType, col, lit
from daft.exceptions import DaftCoreException
from daft.io import IOConfig, S3Config

from capflow import Probe, UsageError, explain


def rows_of(vectors: daft.Series, dtype: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return a column of vectors as `[n, hidden_size]` float32; bfloat16 is stored as uint16."""
    stored = vectors.to_arrow()
    flat = stored.flatten().to_numpy(zero_copy_only=False)
    if dtype == "bfloat16":
        flat = flat.astype(np.uint16).view(ml_dtypes.bfloat16)
    return flat.reshape(len(stored), -1).astype(np.float32)


@daft.udf(return_dtype=DataType.float64())
def norm(vectors: daft.Series, dtype: str) -> Any:
    """Return the length of each row."""
    return np.linalg.norm(rows_of(vectors, dtype), axis=1).astype(np.float64)


@daft.udf(return_dtype=DataType.float64())
def score(vectors: daft.Series, dtype: str, weight: list[float], bias: float) -> Any:
    """Return a probe's score of each row."""
    return (rows_of(vectors, dtype) @ np.array(weight, np.float32) + bias).astype(np.float64)


def mean_norms(data: daft.DataFrame, dtype: str) -> daft.DataFrame:
    """Return a table of `hook`, `layer`, `rows` and `norm`, the mean length of the rows."""
    lengths = data.select("hook", "layer", norm(col("vector"), dtype).alias("norm"))
    means = lengths.groupby("hook", "layer").agg(col("norm").count().alias("rows"), col("norm").mean())
    return means.sort(["hook", "layer"])


def top_positions(data: daft.DataFrame, dtype: str, probe: Probe, count: int) -> daft.DataFrame:
    """Return the `count` positions with the highest scores on each probe.

    The columns are `probe`, `request`, `position`, `token_id` and `score`.
    """
    here = data.where((col("hook") == probe.site.hook) & (col("layer") == probe.site.layer))
    tops = []
    for name, weight, bias in zip(probe.names, probe.weight.tolist(), probe.bias.tolist(), strict=True):
        scored = here.select(
            "request", "position", "token_id", score(col("vector"), dtype, weight, bias).alias("score")
        )
        top = scored.sort(["score", "request", "position"], desc=[True, False, False]).limit(count)
        tops.append(top.select(lit(name).alias("probe"), "request", "position", "token_id", "score"))
    whole = tops[0]
    for top in tops[1:]:
        whole = whole.concat(top)
    return whole


class Shards(NamedTuple):
    """The sealed shards.

    dtype, hidden_size: of their rows.
    """

    data: daft.DataFrame
    dtype: str
    hidden_size: int


def open_shards(root: str) -> Shards:
    """Find the shards under a root. Raises UsageError when there are none that Daft can read.

    Daft refuses shards of several dtypes: their columns have different types. A column of uint16 is bfloat16.
    """
    place, _, options = root.partition("?") if root.startswith("s3://") else (root, "", "")
    pattern = place if place.endswith(".parquet") else f"{place.rstrip('/')}/*.parquet"
    try:
        data = daft.read_parquet(pattern, io_config=_store(dict(parse_qsl(options))))
    except FileNotFoundError as e:
        do = "name the root of a data set of filesystem:layout=sharded; a shard appears once it is sealed"
        raise UsageError(explain(root, got="no *.parquet", expected="a sharded data set", do=do)) from e
    except DaftCoreException as e:
        # Of float16, Daft says that the metadata is bad.
        if "parse parquet metadata" in str(e):
            do = "Daft does not know float16: capture with dtype=float32, or use DuckDB"
            got = str(e).rpartition(": ")[2]
            raise UsageError(explain(root, got=got, expected="shards of bfloat16 or float32", do=do)) from e
        got = next(line for line in reversed(str(e).splitlines()) if line.strip()).strip()
        raise UsageError(explain(root, got=got, expected="a sharded data set that this machine may read")) from e
    kind = data.schema()["vector"].dtype if "vector" in data.column_names else None
    names = {DataType.uint16(): "bfloat16", DataType.float32(): "float32"}
    if kind is None or not kind.is_fixed_size_list() or kind.dtype not in names:
        got = "no vectors" if kind is None else f"vectors of {kind}"
        raise UsageError(explain(root, got=got, expected="shards of bfloat16 or float32"))
    return Shards(data, names[kind.dtype], kind.size)


def _store(options: dict[str, str]) -> IOConfig:
    """Return how Daft reaches a bucket: keys are those of the environment, as for capflow."""
    if unknown := options.keys() - {"endpoint", "region"}:
        raise UsageError(explain("URL", got=min(unknown), expected="endpoint or region"))
    environment = os.environ.get
    endpoint = options.get("endpoint") or environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
    region = options.get("region") or environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")
    if endpoint is not None:
        region = region or "us-east-1"  # a store of one's own has none, and Daft would ask AWS
    plain = endpoint is not None and endpoint.startswith("http://")
    return IOConfig(s3=S3Config(endpoint_url=endpoint, region_name=region, use_ssl=not plain, num_tries=3))


def load_probe(path: str, shards: Shards) -> Probe:
    """Return the linear probes of a file. Raises UsageError for other probes and for another width than the rows'."""
    probe = Probe.load(path)
    if probe.hidden_size != shards.hidden_size:
        expected = f"{shards.hidden_size}, the width of the rows"
        raise UsageError(explain(f"{path}: weight", got=f"{probe.hidden_size} numbers", expected=expected))
    return probe


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Analyse a sharded data set with Daft, on Ray.")
    parser.add_argument("rows", help="the root of a sharded data set, or its URL")
    parser.add_argument("--probe", help="a probe file")
    parser.add_argument("--top", type=int, default=10, help="how many positions to print (default: 10)")
    parser.add_argument("--ray", help="auto, local, or a cluster's address (default: no Ray)")
    arguments = parser.parse_args()
    if arguments.ray:
        import ray

        ray.init(address=None if arguments.ray == "local" else arguments.ray, log_to_driver=False)
        daft.context.set_runner_ray()
    try:
        shards = open_shards(arguments.rows)
        probe = load_probe(arguments.probe, shards) if arguments.probe else None
    except UsageError as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    mean_norms(shards.data, shards.dtype).show(1000)
    if probe is not None:
        top_positions(shards.data, shards.dtype, probe, arguments.top).show(1000)
    if arguments.ray:
        ray.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Daft's threads may still release Python objects; an interpreter that ends at that time aborts.
    os._exit(0)
