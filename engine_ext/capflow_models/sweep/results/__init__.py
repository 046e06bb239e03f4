"""The results of sweeps: tables, means with intervals, heatmaps and the report.

Invariant: nothing here needs an engine or torch, so a finished sweep is read on any machine.
"""
