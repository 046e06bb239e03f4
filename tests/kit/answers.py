"""Actions that a hub answers, as consumers see them."""

from __future__ import annotations

import threading

from tests.kit.waiting import eventually


def answering(link, outcomes):
    """Answer the next actions that a scheduler gets."""

    def run():
        for outcome in outcomes:
            acts = []
            eventually(lambda acts=acts: acts.extend(link.actions()) or acts)
            link.outcome(outcome(acts[0]))

    thread = threading.Thread(target=run)
    thread.start()
    return thread
