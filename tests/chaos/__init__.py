"""Chaos: kills the hub and the engine side under load, fills the disk, and checks every row; `make chaos`."""
