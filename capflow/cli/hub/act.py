"""`capflow steer`, `unsteer` and `abort`: act on a running request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow.cli.hub.address import engine_option, hub_options

if TYPE_CHECKING:
    from capflow.steering.action import Action


_engine = engine_option("The engine that runs the request, if several engines have a request with this id.")


@click.command()
@click.argument("request")
@_engine
@click.option("--vector", required=True, metavar="FILE.safetensors[:KEY]", help="The vector, [hidden_size].")
@click.option(
    "--site", required=True, metavar="HOOK:LAYER", help="The site at which to add the vector, e.g. post_block:12."
)
@click.option("--scale", type=float, default=1.0, show_default=True, help="The factor that multiplies the vector.")
@hub_options
def steer(request: str, engine: str, vector: str, site: str, scale: float, **hub: Any) -> None:
    """Add a vector to the running REQUEST, from its next generated token on."""
    from capflow.capture.site import Site
    from capflow.steering.action import Steer
    from capflow.steering.vector import SteeringVector

    where = Site.parse(site)
    made = SteeringVector.make(where, read_vector(vector), scale, where=f"--vector {vector}")
    _act(Steer(request, (made,), engine=engine), hub)


@click.command()
@click.argument("request")
@_engine
@hub_options
def unsteer(request: str, engine: str, **hub: Any) -> None:
    """Remove the vectors that `steer` added to the running REQUEST."""
    from capflow.steering.action import Unsteer

    _act(Unsteer(request, engine=engine), hub)


@click.command()
@click.argument("request")
@_engine
@hub_options
def abort(request: str, engine: str, **hub: Any) -> None:
    """Stop the running REQUEST; the tokens so far are its answer."""
    from capflow.steering.action import Abort

    _act(Abort(request, engine=engine), hub)


def read_vector(text: str) -> Any:
    """Return the tensor that `FILE[:KEY]` names, as a float32 array of the tensor's shape.

    Raises UsageError if the file or the tensor does not exist, or if the file has several tensors and KEY is missing.
    """
    from capflow.errors import UsageError, explain
    from capflow.probes.file import ProbeFile

    path, separator, key = text, "", ""
    if not Path(text).exists():
        path, separator, key = text.rpartition(":")
    where = f"--vector {text}"
    if not Path(path).is_file():
        raise UsageError(explain(where, got="no such file", expected="FILE.safetensors[:KEY]"))
    file = ProbeFile(path)
    names = ", ".join(sorted(file.tensors))
    if separator and key not in file.tensors:
        raise UsageError(explain(where, got=f"no tensor {key}", expected=f"one of {names}"))
    if not separator and len(file.tensors) != 1:
        raise UsageError(explain(where, got=f"{len(file.tensors)} tensors", expected=f":KEY, one of {names}"))
    (name,) = [key] if separator else file.tensors
    return file.expect([name], unread=file.tensors)[name]


def _act(action: Action, hub: dict[str, Any]) -> None:
    from capflow.errors import CapflowError
    from capflow.steering.action import ActionApplied
    from capflow.transport.client import Client

    with Client(**hub) as client:
        outcome = client.act(action)
    if not isinstance(outcome, ActionApplied):
        raise CapflowError(outcome.reason)
    click.echo(f"applied in step {outcome.step}")
