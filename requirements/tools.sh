#!/usr/bin/env bash
# Programs for releases and audits, in .tools, which holds exactly requirements/tools.lock.
#
#     requirements/tools.sh sbom     write dist/capflow-VERSION-LOCK.cdx.json, a CycloneDX bill of materials of each lock
#     requirements/tools.sh audit    look up known vulnerabilities of every package in the locks; needs the network
#                                    exit code: 0 none, 1 some, 2 when a package was not audited
#                                    AUDIT_LOCKS names other files than requirements/*.lock

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "make $1: $2" >&2; exit 2; }

stamp=.tools/lock-$(sha256sum requirements/tools.lock | cut -c1-16)
if [ ! -e "$stamp" ]; then
    rm -rf .tools
    .venv/bin/python -m venv .tools
    .tools/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/tools.lock
    touch "$stamp"
fi

case ${1:-} in
sbom)
    version=$(.venv/bin/python -c 'import capflow; print(capflow.__version__)')
    mkdir -p dist
    for lock in core cpu; do
        file=dist/capflow-$version-$lock.cdx.json
        PYTHONWARNINGS=ignore .tools/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
            --output-format JSON --output-file "$file" "requirements/$lock.lock"
        # The version is not in pyproject.toml.
        .venv/bin/python - "$file" "$version" <<'END'
import json
import sys
from pathlib import Path

path, version = Path(sys.argv[1]), sys.argv[2]
bill = json.loads(path.read_text(encoding="utf-8"))
bill["metadata"]["component"]["version"] = version
path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
END
        echo "make sbom: $file, $(grep -c '==' "requirements/$lock.lock") packages"
    done
    ;;
audit)
    report=.tools/audit.json log=.tools/audit.log
    for lock in ${AUDIT_LOCKS:-requirements/*.lock}; do
        rm -f "$report"
        .tools/bin/pip-audit --disable-pip --require-hashes --progress-spinner off -r "$lock" \
            --format json --output "$report" >"$log" 2>&1 || true
        # pip-audit calls what nobody answers for free of vulnerabilities: only its report says what was looked up.
        [ -s "$report" ] || { tail -n 1 "$log" >&2; fail audit "$lock was not audited: the database of vulnerabilities must be reachable"; }
        .venv/bin/python - "$report" "$lock" <<'END'
import json
import sys
from pathlib import Path

packages = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["dependencies"]
found = [(p, v) for p in packages for v in p.get("vulns", ())]
skipped = [p["name"] for p in packages if "skip_reason" in p]
for package, vulnerability in found:
    fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
    print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
print(f"make audit: {sys.argv[2]}: {len(packages) - len(skipped)} packages audited, {len(found)} vulnerabilities")
if skipped:
    print(f"make audit: {len(skipped)} packages were not audited, the database does not answer for them: {', '.join(skipped)}")
sys.exit(1 if found else 2 if skipped else 0)
END
    done
    ;;
*) fail tools "got ${1:-nothing}, expected sbom or audit" ;;
esac
