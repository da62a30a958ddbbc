#!/usr/bin/env bash
# The GPU suite: tests side by side, then figures in turn, in at most eight minutes; one JSON file,
# written after every case, with all rows that a killed case had measured.
# Usage: benchmarks/gpu/run.sh [--dry-run] [--only PART ...] [FOLDER FOR JSON]
# --only runs the tests and figures of a block, or one case, in at most three minutes; say it again
# for more. --dry-run runs every case at small sizes on a CPU.
# Python: $PYTHON, or python3, with torch. Wheels that `benchmarks/gpu/bundle` fetched are beside it
# for as long as this runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

bundle=benchmarks/gpu/wheels
if compgen -G "$bundle/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  for wheel in "$bundle"/*.whl; do  # Unpacked: not every environment has pip.
    "$python" -m zipfile -e "$wheel" "$site"
  done
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

"$python" -m benchmarks.gpu "$@"
