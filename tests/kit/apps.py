"""API servers with capflow's routes, made as vLLM makes them, without an engine behind them."""

import asyncio
from argparse import Namespace
from types import SimpleNamespace

from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from capflow.capture.site import Site
from capflow_engine.hubs import HubAt
from capflow_engine.serve.api_keys import Keys
from capflow_engine.serve.plugin import Plugin
from capflow_engine.serve.serving import Serving
from capflow_engine.settings import Settings

WIDTH = 8
SITES = tuple(Site(layer, "post_block") for layer in range(3))
LIMIT = 100_000


def server(directory, keys=Keys(open=True), hubs=("ipc:///nowhere",), spares=0, **serving):  # noqa: B008 - it is frozen
    """An app with capflow's routes, as vLLM makes it.

    hubs: the addresses of the engine's; the last ones are spare.
    serving: further parts of `Serving`.
    """
    app = FastAPI()
    app.state.args = Namespace(log_error_stack=False, api_key=None, ssl_certfile=None)
    plugin = Plugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    model = SimpleNamespace(
        served_model_name="tiny",
        dtype="torch.float32",
        max_model_len=128,
        get_total_num_hidden_layers=lambda: 4,
        get_hidden_size=lambda: WIDTH,
    )
    settings = Settings("engine-1", tuple(map(HubAt, hubs)), SITES, spares=spares, steering_bank_bytes=3 * 4 * WIDTH)
    config = SimpleNamespace(
        additional_config=settings,
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    given = _Generate()
    app.state.engine_client = engine = SimpleNamespace(vllm_config=config, generate=given, check_health=_well)
    args = Namespace(capflow=Serving(directory, keys, LIMIT, **serving))
    asyncio.run(plugin.init_state(engine, app.state, args))
    client = TestClient(app)
    client.engine = engine
    client.given = given
    return client


class _Generate:
    """The engine's `generate`: keeps the parameters that it is given, and answers nothing."""

    def __init__(self):
        # The latest that came.
        self.params = None

    def __call__(self, prompt, params):
        self.params = params
        return _nothing()


async def _nothing():
    """Yield no output."""
    for output in ():
        yield output


async def _well():
    """Return: the engine is well."""
