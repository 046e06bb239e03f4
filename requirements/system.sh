#!/usr/bin/env bash
# Check for what pip cannot install, and install it with apt-get where that is possible.
#
#     requirements/system.sh compiler            what the demo needs: torch.compile builds C++ on the CPU
#     requirements/system.sh compiler chromium node   what the tests need: the dashboard is driven in a browser, and its
#                                                     modules are tested in node

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=()
for what in "$@"; do
    case $what in
    compiler)
        command -v g++ >/dev/null || packages+=(g++)
        # The Python that requirements/env.sh takes, which may be making .venv meanwhile.
        python=$(command -v python3.11 || command -v python3)
        header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
        [ -e "$header" ] || packages+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
        ;;
    chromium)
        command -v chromium >/dev/null || packages+=(chromium)
        ;;
    node)
        command -v node >/dev/null || packages+=(nodejs)
        command -v npm >/dev/null || packages+=(npm)
        ;;
    *)
        echo "requirements/system.sh: got $what, expected compiler, chromium or node" >&2
        exit 2
        ;;
    esac
done
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "make system: not found: ${packages[*]}; install them with the system's package manager, as root" >&2
    exit 1
fi
echo "make system: installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && apt-get install --yes --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "make system: apt-get failed; its last lines are above" >&2
    exit 1
fi
