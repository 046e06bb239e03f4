"""What capflow uses of the operating system: descriptors, the heap, the runtime directory, and standard error.

Any package may call it. It imports nothing of capflow but errors and limits.
Invariant: where the platform lacks a facility, the call does nothing or says what is missing.
"""
