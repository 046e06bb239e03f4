"""A backend that makes Triton believe in a device on a machine without one, for its interpreter; for tests only.

Put this folder on `sys.path` of a process with `TRITON_INTERPRET=1`. It compiles nothing: a kernel that reaches it
instead of the interpreter fails.
"""
