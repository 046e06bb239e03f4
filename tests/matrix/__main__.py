"""`python -m tests.matrix [--only CHECK,…] [VERSION…]`: run the checks of versions and write their outcomes."""

import argparse
import sys

from capflow_engine.compat.versions import record
from tests.matrix.checks import TESTS
from tests.matrix.run import run, write


def main():
    """Run the checks; return 1 if a test of one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--only", metavar="CHECK,…", default=",".join(TESTS), help=f"of {', '.join(TESTS)}")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="by default, all in the record")
    given = parser.parse_args()
    checks = given.only.split(",")
    if unknown := [check for check in checks if check not in TESTS]:
        parser.error(f"--only: got {unknown[0]}, expected some of {', '.join(TESTS)}")
    right = [run(version, checks) for version in given.versions or reversed(record.tested())]
    write(record.read())
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
