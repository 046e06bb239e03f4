"""The service of capture results: `GET /v1/capture/{id}`, called with messages."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from capflow.errors import CapflowError, UsageError
from capflow_engine.serve.front import Front
from capflow_engine.serve.later import Question, UnknownCaptureError, later
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import CaptureServicer
from capflow_engine.serve.rpc.generation import results_of
from capflow_engine.serve.rpc.refusals import RefusedError, refusing
from capflow_engine.serve.rpc.values import fields_of, parsed


class CaptureService(CaptureServicer):
    """The service `CaptureService`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Get(self, request: pb.GetCaptureRequest, context: Any) -> pb.CaptureState:  # noqa: N802 - gRPC's
        """Return the results of a request, while it runs and afterwards."""
        async with refusing(context):
            fields = fields_of(request)
            samples, prompts, wait_s = fields.get("n", 1), fields.get("prompts", 1), fields.get("wait", 0.0)
            question = Question.make(request.id, samples=samples, prompts=prompts, wait_s=wait_s)
            try:
                members = await later(self._front, question)
            except UnknownCaptureError as e:
                raise RefusedError(HTTPStatus.NOT_FOUND, str(e), "id") from e
            except UsageError:
                raise
            except CapflowError as e:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(e)) from e
            return parsed({"id": members["id"], "done": members["done"], **results_of(members)}, pb.CaptureState())
        raise AssertionError  # `refusing` has ended the call
