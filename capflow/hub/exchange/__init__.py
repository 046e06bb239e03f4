"""The exchange: the state between a hub's peers and its consumers, split into sessions, frames, results and actions.

Each message goes into `Exchange` with the time; effects come out, which say what to do (`capflow.hub.effects`).
Only `capflow.hub.dispatch` and tests call it. It imports no lane, socket or clock.
Invariant: the same calls in the same order return the same effects.
"""
