"""What a decoder layer is made of: where its hook points lie, and what becomes of the stream between layers.

`compat` calls it, with what it knows of vLLM's classes. Nothing here imports vLLM, or puts anything into a model.
"""
