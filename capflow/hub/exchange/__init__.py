"""The exchange: the state between a hub's peers and its consumers, split into sessions, frames, results and actions.

What arrives goes into `Exchange` with the time; what is to be done comes out as effects (`capflow.hub.effects`).
Only `capflow.hub.dispatch` and tests call it. It imports no lane, socket or clock.
Invariant: the same calls in the same order return the same effects.
"""
