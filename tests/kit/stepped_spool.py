"""A spool whose syncs happen when a test says so."""

from __future__ import annotations

from capflow.buffers.spool import Spool


class SteppedSpool(Spool):
    """Does its thread's work when told to, so that a run can be repeated."""

    def _run(self):
        pass
