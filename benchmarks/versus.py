"""capflow against its peers: the same model, prompts, lengths and rows, in turns of one run, every result checked.

    make versus          (or: python benchmarks/versus.py [--only plain,idle,disk,hooks] [--rounds 3] [--write])

Each contender runs in a process and an environment of its own (`versus/programs`, `versus/requirements`,
`build/versus`). Plain vLLM lives for the whole run. The others come in groups of `--alive`, whose turns interleave:
plain A B in the first half of the rounds, plain B A in the second. Each turn follows one of the same contender that
does not count. A ratio is the median of the ratios to plain's turn of the same round; beside it are the lowest and the
highest. Below a table is over whom the lead is certain, by the ranks of these ratios. Six rounds show that of a
contender that wins 33 of the 36 pairs of rounds, five only one without overlap, four none; a smaller lead is said not
to be certain.

A round before those that count warms up; memory is sampled in it. After every turn, off the clock, rows, scores and
answers are compared with Transformers in float32. A contender whose rows differ has no ratio. One that does not start,
crashes or takes longer than `--limit` seconds is named in the table with its error; the others go on.

* The clock of a turn stops when the contender has delivered: rows in synced files, scores in the database, or arrays.
* CPU time is that of all its processes. Peak memory is their PSS, with the files that it keeps in memory.
* `--model llama` has the shape of the demo model and random weights, for contenders that cannot run Gemma 3.
* `--write` puts the tables and the plot into the documentation. A run that is ended prints the turns that it has.
"""

from __future__ import annotations

import signal
import sys

from versus.run import main

if __name__ == "__main__":
    # Contenders lead sessions of their own: only this process can end them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
