"""Every architecture against Transformers; `make architectures` writes the matrix of docs/compatibility.md."""
