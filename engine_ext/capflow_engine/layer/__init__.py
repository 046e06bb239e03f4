"""The inside of a decoder layer: where its hook points lie, and how the stream goes from layer to layer.

`compat` calls it, with what it knows of vLLM's classes. Nothing here imports vLLM, or puts anything into a model.
Invariant: a hook point has a place only where the layer's own forward proves it; all others have a reason.
"""
