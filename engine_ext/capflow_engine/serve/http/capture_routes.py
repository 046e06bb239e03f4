"""The route of results later: `GET /v1/capture/{id}`."""

# No postponed annotations: FastAPI reads those of the routes.

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from capflow.errors import CapflowError, UsageError, explain
from capflow_engine.compat.protocol import ErrorResponse
from capflow_engine.serve.front import Front
from capflow_engine.serve.later import Question, UnknownCaptureError, later
from capflow_engine.serve.refusals import refused

_ERRORS: dict[int | str, dict[str, Any]] = {
    code.value: {"model": ErrorResponse}
    for code in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE)
}
_PARAMETERS = [
    {"name": "n", "in": "query", "schema": {"type": "integer"}, "description": "How many samples the request had."},
    {"name": "prompts", "in": "query", "schema": {"type": "integer"}, "description": "How many prompts it had."},
    {"name": "wait", "in": "query", "schema": {"type": "number"}, "description": "How many seconds to wait at most."},
]
router = APIRouter(tags=["capture"], responses=_ERRORS)


@router.get("/v1/capture/{capture_id:path}", openapi_extra={"parameters": _PARAMETERS})
@with_cancellation  # type: ignore[untyped-decorator]
async def capture(capture_id: str, raw_request: Request) -> Any:
    """Return the capture results of a request by its id, while it runs and afterwards."""
    front: Front | None = raw_request.app.state.capflow
    if front is None:
        do = "start the server with `capflow serve`"
        raise HTTPException(HTTPStatus.NOT_FOUND, explain("capture: this engine is not capflow's", do=do))
    try:
        members = await later(front, Question.parse(capture_id, raw_request.query_params))
    except UnknownCaptureError as e:
        return refused(str(e), HTTPStatus.NOT_FOUND)
    except UsageError as e:
        return refused(e)
    except CapflowError as e:
        return refused(str(e), HTTPStatus.SERVICE_UNAVAILABLE)
    return Response(msgspec.json.encode(members), media_type="application/json")
