"""Steering vectors: fitted from contrastive pairs of prompts, and written to files.

Research commands and `capflow_models` import it.
Invariant: it reads rows and writes files; it steers nothing.
"""
