"""The engine's part of `capflow sites`: `python -m capflow_engine.sites MODEL [PATTERN …]` prints a model's sites as JSON.

One object for each layer: `layer`, its class; `available`, the hooks that it has; `tapped`, those that the patterns name;
`missing`, for the other hooks, why.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from capflow.errors import CapflowError, UsageError
from capflow_engine import compat, compat_model
from capflow_engine.settings import SITES_DEFAULT, tapped_sites


def main() -> int:
    """Print the sites; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("patterns", nargs="*", default=SITES_DEFAULT)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    try:
        compat.require()
        compat.prepare_environment({})
        from vllm.engine.arg_utils import EngineArgs

        model = args.model
        if model == "demo":
            from capflow_engine.demo import prepare

            model = str(prepare())
        layers = compat_model.structures(EngineArgs(model=model, trust_remote_code=args.trust_remote_code))
        tapped = set(tapped_sites(args.patterns or SITES_DEFAULT, layers))
    except UsageError as e:
        print(f"capflow: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except CapflowError as e:
        print(f"capflow: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    found = [
        {
            "layer": layer.layer,
            "available": list(layer.places),
            "tapped": [site.hook for site in sorted(tapped) if site.layer == number],
            "missing": layer.missing,
        }
        for number, layer in enumerate(layers)
    ]
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
