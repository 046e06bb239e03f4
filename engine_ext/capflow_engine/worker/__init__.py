"""The worker's part: taps in the model, a plan for each step, controllers, and the links that rows are sent by.

vLLM makes `worker.CaptureWorker`; the scheduler's orders reach it with each step.
Invariant: the step thread never waits for a hub, a disk or a consumer, except where `block` says so.
"""
