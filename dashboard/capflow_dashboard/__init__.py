"""The live page: what a model computes, token by token, while it serves."""
