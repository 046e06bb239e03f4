"""Probes: directions, small networks and autoencoder features, and the safetensors files that hold them.

Consumers, controllers and the command line load them and apply them with numpy.
Invariant: a file that is damaged or of another model is an error of one line, never a wrong score.
"""
