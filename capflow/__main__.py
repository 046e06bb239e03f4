"""`python -m capflow`."""

from __future__ import annotations

from capflow.cli import main

if __name__ == "__main__":
    main()
