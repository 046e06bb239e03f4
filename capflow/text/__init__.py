"""Text from outside and for people: JSON, engine names, short reprs, and names made safe to print.

Any package may call it. It imports nothing of capflow but errors and limits.
Invariant: text that it returns for a terminal or a log moves no cursor and starts no line.
"""
