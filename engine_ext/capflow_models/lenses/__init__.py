"""Lens files from models: the Jacobian lens is fitted, and published lenses are converted.

`jacobian` fits with Transformers, and `published` reads the files of other tools. The jobs of `capflow lens` call both.
Invariant: a file that is read here is never unpickled: torch loads plain tensors only.
"""
