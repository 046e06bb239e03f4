"""Sparse autoencoders and transcoders: what they compute, and the files of the tools that train them.

Consumers and the command line read features with them; front ends steer by their features. The weights are NumPy
arrays.
Invariant: a file that is damaged, or whose activations would be computed wrongly, is an error of one line.
"""
