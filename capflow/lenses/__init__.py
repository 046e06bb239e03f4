"""Lenses: which tokens a row of the residual stream would predict if the model ended at its layer.

A lens translates a row to what the last block would give, and applies the model's own final norm and unembedding. The
logit lens translates nothing (nostalgebraist 2020, "interpreting GPT: the logit lens"). The tuned lens has a trained
affine map for each layer (Belrose et al. 2023, arXiv:2303.08112). The Jacobian lens has the mean derivative of the last
block's output by the row (Gurnee et al. 2026, "Verbalizable Representations Form a Global Workspace in Language
Models", transformer-circuits.pub/2026/workspace).

`lens` is what users open. `file` holds the translators. `model_files`, `forms`, `unembedding`, `readout` and
`vocabulary` read a model's own files. `captured` reads a captured request. The command line and the dashboard call it.
Nothing here imports torch, downloads a file, or unpickles one.
Invariant: memory does not grow with the vocabulary or the number of rows of a request, besides the results.
"""
