"""A client that sends random actions until it is killed; run as `acting_client ADDRESS SEED PART DIRECTORY`.

It acts on the requests that the file DIRECTORY/running names and whose number is PART modulo `PARTS`; the first part
also acts on the whole engine. Its log has a line for each action before it is sent, `sent NUMBER`, and one for each
answer, `applied NUMBER STEP POSITION`, `rejected NUMBER` or `unknown NUMBER`. Some actions are sent once more; `differs
NUMBER` says that the second answer was another one. The first line of the log is the name of the sender.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from capflow.protocol.message import Act
from capflow.steering.action import NO_ENGINE, ActionApplied, Rejected, Unknown
from capflow.transport.client import Client
from tests.kit.oracle_actions import FAULTS, SITES, action_of

PARTS = 3
BATCH_MAX = 8
# Changes of the whole engine that one step may take; their order matters.
TOGETHER = (
    {"kind": "unfreeze"},
    {"kind": "gain", "everywhere": True, "owner": "request", "scale": 0.0},
    {"kind": "freeze"},
)
LEASES = ({}, {}, {"lease_positions": 2}, {"lease_positions": 7}, {"lease_s": 0.05}, {"lease_s": 0.4})


def drawn(choose, part):
    """Return the values of a random action, as `oracle_actions.action_of` takes them."""
    kind = choose.choices(
        ("steer", "unsteer", "gain", "set_gate", "wrong", "abort", "freeze", "unfreeze"),
        (50, 10, 20, 15, 10, 0.3, *((0.5, 10) if part == 0 else (0, 0))),
    )[0]
    return {
        "kind": kind,
        "site": choose.choice(SITES),
        "clamped": choose.choice([None, None, *SITES]),
        "seed": choose.randrange(20, 24),
        "gain": choose.choice((1.0, 0.5, -1.0)),
        "owner": choose.choice(("request", "request", "client", "client", "client", "nobody")),
        "scale": choose.choice((0.0, 0.5, 2.0, 1.0)),
        "everywhere": part == 0 and choose.random() < 0.1,
        "change": choose.choice(({"threshold": 0.1}, {"sharpness": 2.0}, {"enabled": False}, {"enabled": True})),
        "as": choose.choice(("abort", "stop")),
        "fault": choose.choice(FAULTS),
        "lease": choose.choice(LEASES),
    }


class Acting:
    """One client and its log."""

    def __init__(self, address, seed, part, directory):
        self.choose, self.part, self.directory = random.Random(seed), part, Path(directory)
        self.client = Client(address, 60)
        self.log = os.open(self.directory / f"{self.client._sender}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.say(self.client._sender)
        self.answered = []

    def say(self, *words):
        os.write(self.log, (" ".join(map(str, words)) + "\n").encode())

    def turn(self):
        """Send some actions, and some of the earlier ones again."""
        names = [name for name in self.running() if int(name[1:]) % PARTS == self.part]
        if not names:
            # Another client's answers, or a hub's start, bring requests again.
            time.sleep(0.01)
            return
        acts = {}
        together = TOGETHER if self.part == 0 and self.choose.random() < 0.1 else ()
        count = self.choose.randrange(1, BATCH_MAX)
        for values in (*together, *(drawn(self.choose, self.part) for _ in range(count))):
            number = next(self.client._numbers)
            label = f"{self.client._sender}-{number}"
            action = action_of(values, self.choose.choice(names), label)
            acts[label] = Act(label, action, sender=self.client._sender, number=number)
            self.say("sent", number)
        again = self.choose.sample(self.answered, min(len(self.answered), self.choose.choice((0, 0, 2))))
        outcomes = self.client._outcomes_of(acts | {act.id: act for act, _ in again}, time.monotonic() + 120)
        for each, outcome in outcomes.items():
            if each in acts:
                self.answer(acts[each], outcome)
        for act, outcome in again:
            second = outcomes[act.id]
            if second != outcome and not isinstance(second, Unknown) and second.reason != NO_ENGINE:
                self.say("differs", act.number, outcome, second)
        self.answered = self.answered[-50:]

    def answer(self, act, outcome):
        match outcome:
            case ActionApplied():
                self.say("applied", act.number, outcome.step, outcome.position)
            case Rejected():
                self.say("rejected", act.number, outcome.reason.replace("\n", " "))
            case _:
                self.say("unknown", act.number)
        if isinstance(outcome, ActionApplied):  # a hub looks again at what it rejected by itself
            self.answered.append((act, outcome))

    def running(self):
        try:
            return (self.directory / "running").read_text().split()
        except OSError:
            return []


def main():
    address, seed, part, directory = sys.argv[1:]
    acting = Acting(address, int(seed), int(part), directory)
    while True:
        acting.turn()


if __name__ == "__main__":
    main()
