"""The scheduler's part: admission, prefix-cache keys, actions, stop strings, and each step's orders.

vLLM makes `mixin.CaptureScheduler`. It knows no worker.
Invariant: workers hear of a request's end before its id is used again.
"""
