#!/usr/bin/env bash
# Make .venv hold exactly requirements/cpu.lock and an editable capflow.
#
# The environment is keyed on the hash of the lock: .venv/lock-HASH is written last, so an interrupted run leaves none,
# and the next one begins anew, as it does when the lock changed. .venv/project-HASH does the same for pyproject.toml,
# whose entry points are read at install time.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "make env: $*" >&2; exit 1; }
hash_of() { sha256sum "$1" | cut -c1-16; }

lock_stamp=.venv/lock-$(hash_of requirements/cpu.lock)
project_stamp=.venv/project-$(hash_of pyproject.toml)
[ -e "$lock_stamp" ] && [ -e "$project_stamp" ] && exit 0

python=
for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer: got $(python3 --version 2>/dev/null || echo none); install python3.11"

torch_index="set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
begun=$SECONDS

# Run pip, its output in the log, and show one line that grows or, where nobody watches, one every 30 packages.
pip_install() {
    local terminal=0 status=0 total=$1
    shift
    [ -t 1 ] && terminal=1
    .venv/bin/python -m pip install --disable-pip-version-check --no-deps "$@" 2>&1 | tee "$log" |
        awk -v terminal="$terminal" -v total="$total" '
            /^Collecting / { n++; if (terminal) printf "\r  fetched %d of %d: %-50.50s", n, total, $2
                             else if (n % 30 == 0) printf "  fetched %d of %d\n", n, total; fflush() }
            /^Installing collected/ && total > 1 { printf "%s  installing, a minute or two\n", terminal ? "\r\033[K" : ""; fflush() }
        ' || status=$?
    [ "$status" -eq 0 ] && return
    tail -n 15 "$log" >&2
    # pip suspects that someone changed the file when an index has another build only.
    ! grep -A 5 'DO NOT MATCH THE HASHES' "$log" | grep -q '^ *torch==' ||
        fail "got another build of torch, expected the CPU build; $torch_index"
    fail "pip failed; its last lines are above"
}

if [ ! -e "$lock_stamp" ]; then
    echo "make env: .venv with $(grep -c '==' requirements/cpu.lock) packages, a few minutes ($("$python" --version))"
    rm -rf .venv
    "$python" -m venv .venv || fail "$python has no venv module: install python3-venv"
    pip_install "$(grep -c '==' requirements/cpu.lock)" --no-compile --require-hashes -r requirements/cpu.lock
    # pip would compile one module after another. A few are for other versions of Python and do not compile. The tests of
    # the packages, a sixth of what there is, are not run.
    .venv/bin/python -m compileall -qq -j 0 -x /tests/ .venv/lib || true
    # pip takes the CUDA build of torch where it finds no other, and the lock has not what that needs.
    for library in .venv/lib/python3*/site-packages/torch/lib/libtorch_cuda.so; do
        [ ! -e "$library" ] ||
            fail "got a CUDA build of torch, expected a CPU build; $torch_index"
    done
fi
rm -f .venv/project-*
pip_install 1 --no-build-isolation -e .
.venv/bin/python -c 'import capflow, torch, vllm' 2>"$log" || { tail -n 3 "$log" >&2; fail "what was installed does not import"; }
touch "$lock_stamp" "$project_stamp"
echo "make env: done in $((SECONDS - begun)) s"
