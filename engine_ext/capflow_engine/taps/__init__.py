"""The taps and what they do in one step: custom op, kernel, tables, plan, and the bank of steering programs.

The worker calls them. Nothing here knows sessions, hubs or HTTP.
Invariant: with nothing to do, a tap changes no value and copies no row.
"""
