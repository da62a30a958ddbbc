#!/usr/bin/env bash
# The GPU suite: parts A (correctness), B (kernels), C (composition), D (memory and transfer), each
# of at most eight minutes, and a JSON file of each.
# Usage: benchmarks/gpu/run.sh [--part A|B|C|D] [--dry-run] [--only CASE] [FOLDER FOR JSON]
# Without a part, all of them. --dry-run runs every case at small sizes on a CPU.
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

if [[ " $* " == *" --part "* ]]; then
  "$python" -m benchmarks.gpu "$@"
  exit
fi
failed=0
for part in A B C D; do
  echo "== part $part"
  "$python" -m benchmarks.gpu --part "$part" "$@" || failed=1
done
exit "$failed"
