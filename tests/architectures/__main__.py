"""`python -m tests.architectures`."""

import sys

from tests.architectures.run import main

sys.exit(main())
