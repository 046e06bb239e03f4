"""Part of capflow."""
