"""What changes a model: vectors, clamps, patches and actions, and the program that a request's steering compiles to.

Clients, the hub and the engine share these values; nothing here needs torch.
Invariant: what one party accepts, every other party accepts, because all parse with this package.
"""
