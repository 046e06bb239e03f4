"""Running a request again: its prompt twice at a server, once plain and once steered, both streamed to the page.

The server of pages calls it.
Invariant: it reaches no address but the one that the operator gave, and sends it no numbers of a page but bounded ones.
"""
