"""The soak: an hour of frames beside hostile peers, in bounded memory; `make soak`."""
