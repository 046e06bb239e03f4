"""The engine's part of `capflow sites`: `python -m capflow_engine.jobs.sites MODEL [PATTERN …]` lists a model's sites.

The event `sites` has `layers`, one object for each layer:

layer: its class.
available: the hooks that it has.
tapped: the hooks that the patterns name.
missing: by hook that it lacks, the reason.
"""

from __future__ import annotations

import argparse
import functools
import sys

from capflow_engine.compat import engine as compat
from capflow_engine.compat import model as compat_model
from capflow_engine.jobs import demo
from capflow_engine.jobs.child import Tell, work_for_parent
from capflow_engine.settings import SITES_DEFAULT, tapped_sites


def main() -> int:
    """Report the sites; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("patterns", nargs="*", default=SITES_DEFAULT)
    parser.add_argument("--trust-remote-code", action="store_true")
    return work_for_parent(functools.partial(_tell_sites, parser.parse_args()))


def _tell_sites(args: argparse.Namespace, tell: Tell) -> None:
    compat.require()
    compat.prepare_environment({})
    from vllm.engine.arg_utils import EngineArgs

    model = demo.resolved(args.model)
    with compat_model.explaining(model):
        engine_args = EngineArgs(model=model, trust_remote_code=args.trust_remote_code)
    layers = compat_model.structures(engine_args)
    tapped = set(tapped_sites(args.patterns or SITES_DEFAULT, layers))
    described = [
        {
            "layer": layer.layer,
            "available": list(layer.places),
            "tapped": [site.hook for site in sorted(tapped) if site.layer == number],
            "missing": layer.missing,
            "shapes": layer.shapes,
        }
        for number, layer in enumerate(layers)
    ]
    tell("sites", layers=described)


if __name__ == "__main__":
    sys.exit(main())
