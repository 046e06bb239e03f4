"""`capflow steer`, `unsteer`, `abort`, `gain`, `freeze`, `unfreeze` and `act`: act on running requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow.cli.features import read_features
from capflow.cli.hub.address import engine_option, hub_options
from capflow.errors import UsageError, explain
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.steering.action import Action
    from capflow.steering.vector import SteeringVector


_engine = engine_option("The engine that runs the request, if several engines have a request with this id.")


def _leased(command: Any) -> Any:
    """Add the options of an action that may end by itself."""
    for option in (
        click.option("--lease-s", type=float, help="End it after so many seconds."),
        click.option("--lease-positions", type=int, help="End it after so many positions."),
        click.option("--label", default="", help="A name for it in events and logs."),
    ):
        command = option(command)
    return command


@click.command(
    epilog=examples(
        "capflow steer REQUEST --vector mood.safetensors --site post_block:9 --scale 2",
        """capflow steer REQUEST --sae mood=my-sae --features '{"sae": "mood", "features": {"123": 4.0}}'""",
    )
)
@click.argument("request")
@_engine
@click.option("--vector", metavar="FILE.safetensors[:KEY]", help="The vector, [hidden_size].")
@click.option("--site", metavar="HOOK:LAYER", help="The site at which to add the vector, e.g. post_block:12.")
@click.option("--sae", "saes", multiple=True, metavar="[NAME=]PATH[@SITE]", help="An autoencoder; repeatable.")
@click.option("--features", metavar="JSON", help="Its features to add, as in a request's steering_features.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="The factor that multiplies the vector.")
@_leased
@hub_options
def steer(
    request: str,
    engine: str,
    vector: str | None,
    site: str | None,
    saes: tuple[str, ...],
    features: str | None,
    scale: float,
    **options: Any,
) -> None:
    """Add a vector, or features of autoencoders, to the running REQUEST, from its next generated token on.

    Give --vector and --site, or --features and --sae. Another `steer` of yours for the same request replaces it.
    """
    from capflow.capture.site import Site
    from capflow.steering.action import Steer
    from capflow.steering.vector import SteeringVector

    given = {"--vector": vector, "--site": site, "--features": features, "--sae": saes}
    names = [name for name, value in given.items() if value]
    if features is not None and names == ["--features", "--sae"]:
        vectors = feature_vectors(features, saes, scale)
    elif vector is not None and site is not None and names == ["--vector", "--site"]:
        where = Site.parse(site)
        vectors = (SteeringVector.make(where, read_vector(vector), scale, where=f"--vector {vector}"),)
    else:
        expected = "--vector with --site, or --features with --sae"
        raise UsageError(explain("steer", got=" and ".join(names) or "neither", expected=expected))
    lease, hub = _split(options)
    _act(Steer(request, vectors, engine=engine, **lease), hub)


def feature_vectors(text: str, saes: Sequence[str], scale: float) -> tuple[SteeringVector, ...]:
    """Return the vectors that features add, one for each site.

    text: JSON, in the words of a request's `steering_features`.
    saes: the autoencoders, each `[NAME=]PATH[@SITE]`.
    scale: multiplies the coefficients.

    Raises UsageError, as for a request, for features that there are not; and for one that is set: a running request
    has no place for its encoder.
    """
    from capflow.saes.named import load_saes
    from capflow.saes.resolve import resolved
    from capflow.steering.feature import parse_features
    from capflow.steering.request import Steering

    uses = parse_features(read_features(text, "--features"), where="--features")
    for use in uses:
        if use.sets:
            do = "set it in the request's own steering_features"
            raise UsageError(explain(use.where, got="set", expected="a coefficient to add", do=do))
    steering = Steering(features=tuple(use.scaled(scale) for use in uses))
    steering.check_gates()
    return resolved(steering, load_saes(saes, "--sae")).base.vectors


@click.command(epilog=examples("capflow unsteer REQUEST"))
@click.argument("request")
@_engine
@hub_options
def unsteer(request: str, engine: str, **hub: Any) -> None:
    """Remove the vectors that `steer` added to the running REQUEST."""
    from capflow.steering.action import Unsteer

    _act(Unsteer(request, engine=engine), hub)


@click.command(epilog=examples("capflow abort REQUEST"))
@click.argument("request")
@_engine
@hub_options
def abort(request: str, engine: str, **hub: Any) -> None:
    """Stop the running REQUEST; the tokens so far are its answer."""
    from capflow.steering.action import Abort

    _act(Abort(request, engine=engine), hub)


@click.command(epilog=examples("capflow gain global 0.5", "capflow gain request 0 --request REQUEST"))
@click.argument("owner")
@click.argument("scale", type=float)
@click.option("--request", default="", metavar="ID", help="The running request; by default all, running and later.")
@_engine
@_leased
@hub_options
def gain(owner: str, scale: float, request: str, engine: str, **options: Any) -> None:
    """Multiply by SCALE what OWNER contributes, from the next position on. 1 is as it came, 0 is none.

    OWNER is `request`, `global`, `module NAME`, `controller NAME`, a consumer's name, or `client`.
    """
    from capflow.steering.action import Gain

    lease, hub = _split(options)
    _act(Gain(request, owner, scale, engine=engine, **lease), hub)


_all_engines = engine_option("The engine to act on; by default all engines of the hub.")


@click.command(epilog=examples("capflow freeze", "capflow freeze --engine NAME"))
@_all_engines
@hub_options
def freeze(engine: str, **hub: Any) -> None:
    """Take back everything that steers requests beside their own steering, and reject actions until `unfreeze`."""
    from capflow.steering.action import Freeze

    _act(Freeze(engine=engine), hub)


@click.command(epilog=examples("capflow unfreeze"))
@_all_engines
@hub_options
def unfreeze(engine: str, **hub: Any) -> None:
    """End `freeze`. Modules and the global state contribute again; actions that were taken back do not come back."""
    from capflow.steering.action import Unfreeze

    _act(Unfreeze(engine=engine), hub)


@click.command(epilog=examples("capflow act - < actions.jsonl"))
@click.argument("file", type=click.File("rb"))
@hub_options
def act(file: Any, **hub: Any) -> None:
    """Send the actions in FILE (- for standard input): one a line, as JSON, in the fields of docs/wire.md.

    Prints the outcome of each, as JSON lines in the same order. Exits with 1 if one was not applied by every engine
    that it was for.
    """
    import msgspec

    from capflow.errors import UsageError, explain
    from capflow.steering.action import Action, ActionApplied
    from capflow.transport.client import Client

    actions = []
    for number, line in enumerate(file.read().splitlines(), 1):
        if line.strip():
            try:
                actions.append(msgspec.json.decode(line, type=Action))
            except msgspec.MsgspecError as e:
                expected = 'an action such as {"type": "abort", "request": "ID"}'
                raise UsageError(explain(f"{file.name}, line {number}", got=str(e), expected=expected)) from None
    if not actions:
        return
    with Client(**hub) as client:
        outcomes = client.act(actions)
    for outcome in outcomes:
        click.echo(msgspec.json.encode(outcome).decode())
    if not all(isinstance(outcome, ActionApplied) and not outcome.reason for outcome in outcomes):
        raise SystemExit(1)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `_leased`, and the others."""
    lease = {name: options.pop(name) for name in ("lease_s", "lease_positions", "label")}
    return lease, options


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
    position = "" if outcome.position is None else f", from position {outcome.position} on"
    click.echo(f"applied in step {outcome.step}{position}")
    if outcome.reason:
        raise CapflowError(f"not applied by every engine: {outcome.reason}")
