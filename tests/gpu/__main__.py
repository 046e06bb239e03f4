"""`python -m tests.gpu [--requests N] [MODE ...]`: run each mode in a process and print a Markdown table."""

import argparse
import json
import os
import subprocess
import sys
import time

from tests.gpu.modes import MODES, run

LIMIT_S = 400
TAIL_LINES = 40


def main():
    """Run the modes; return 1 if a row of one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--requests", type=int, default=60, help="the number of random requests of each mode")
    parser.add_argument("--alone", action="store_true", help="run the one mode given in this process")
    parser.add_argument("modes", nargs="*", default=list(MODES), metavar="MODE", help=f"one of {', '.join(MODES)}")
    given = parser.parse_args()
    unknown = [mode for mode in given.modes if mode not in MODES]
    if unknown:
        parser.error(f"mode: got {unknown[0]}, expected one of {', '.join(MODES)}")
    if given.alone:
        print(json.dumps(run(given.modes[0], given.requests)))
        return 0
    lines, failed = [], False
    for mode in given.modes:
        begun = time.monotonic()
        command = [sys.executable, "-m", "tests.gpu", "--alone", "--requests", str(given.requests), mode]
        environment = os.environ | MODES[mode].environment
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as e:
            output = b"".join(part for part in (e.stdout, e.stderr) if part).decode(errors="replace")
            ran = subprocess.CompletedProcess(command, 124, "", output)
        seconds = time.monotonic() - begun
        if ran.returncode:
            failed = True
            print("\n".join((ran.stdout + ran.stderr).splitlines()[-TAIL_LINES:]), flush=True)
            line = f"| {mode} | - | - | failed with {ran.returncode} after {seconds:.0f} s |"
        else:
            seen = json.loads(ran.stdout.splitlines()[-1])
            line = f"| {mode} | {seen['requests']} | {seen['rows']} | {seen['what']} |"
        print(line, flush=True)
        lines.append(line)
    print("\n| mode | requests | rows | what was seen |\n|---|---:|---:|---|")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
