"""The logit lens: which tokens a row of the residual stream would predict if the model ended at its layer.

The model's own final norm and unembedding are applied to the stream after each block (nostalgebraist 2020,
"interpreting GPT: the logit lens"). No layer has a trained translator, as the tuned lens has (Belrose et al. 2023,
arXiv:2303.08112), so early layers of some models say little. The lens of the last layer is the model's own prediction.

`rows` keeps the newest rows, `desk` answers pages, and `job` is the process that computes. `files`, `forms`,
`unembedding` and `vocabulary` read a model's files and are used in that process only. The page's server calls `desk`.
Nothing here downloads a file, or imports a library of models.
Invariant: at most one process computes, within limits of memory and time, and it ends when the page's process does.
"""
