"""The tests. Folders mirror the source tree; these are about more than one part:

| folder | holds |
|---|---|
| `kit` | what tests share: builders, engines, hubs, servers; no test file imports another |
| `rows` | rows and steering through real vLLM, against Transformers |
| `project` | the documentation, the packages, the layers, the style |
| `architectures` | every model type against Transformers: `make architectures` |
| `chaos`, `soak`, `simulation`, `fuzz` | long proofs: `make chaos`, and so on |
"""
