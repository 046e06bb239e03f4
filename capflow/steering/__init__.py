"""Changes to a model's computation: vectors, clamps, patches and actions, and the program that steering compiles to.

Clients, the hub and the engine share these values; nothing here needs torch.
Invariant: all parties parse with this package, so a value that one party accepts is accepted by every other.
"""
