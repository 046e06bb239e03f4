"""The parts of the operating system that capflow uses: descriptors, the heap, the runtime directory, standard error.

Any package may call it. It imports nothing of capflow but errors and limits.
Invariant: if the platform lacks a facility, the call does nothing or raises an error that names it.
"""
