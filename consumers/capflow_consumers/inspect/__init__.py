"""`capflow inspect`: what a data set holds, whether it is whole, and a picture of its norms.

The command line imports `command`. It reads, and writes nothing but the picture.
Invariant: damage in one capture does not hide another.
"""
