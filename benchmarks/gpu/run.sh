#!/usr/bin/env bash
# GPU tests, then every benchmark, on a machine with a CUDA device; under ten minutes.
# Usage: benchmarks/gpu/run.sh [FOLDER FOR JSON]. Python: $PYTHON, or python3, with torch installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${1:-benchmarks/results}

"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"'
# Such a machine may lack the packages that check annotations: leave that to the CPU run.
PYTHONPATH=. "$python" -m pytest tests -m gpu -o addopts="--import-mode=importlib" -o timeout=0 \
  -W "ignore::pytest.PytestConfigWarning"
mkdir -p "$out"
for benchmark in benchmarks/*.py; do
  name=$(basename "$benchmark" .py)
  # parallel, weightsync and kvoffload compare with peers that such a machine lacks; fp8, dsa and
  # async_loop are for a CPU.
  case $name in
    __init__ | harness | peers | parallel | weightsync | kvoffload | fp8 | dsa | async_loop) continue ;;
  esac
  "$python" -m "benchmarks.$name" --json "$out/$name.gpu.json"
done
"$python" -m benchmarks.kvoffload_parts.device --json "$out/kvoffload.gpu.json"
"$python" -m benchmarks.fp8_parts.gpu --json "$out/fp8.gpu.json"
"$python" -m benchmarks.dsa_parts.gpu --json "$out/dsa.gpu.json"
"$python" -m benchmarks.dsa_parts.gpu_peer --json "$out/dsa_attn_gym.gpu.json"
"$python" -m benchmarks.async_loop_parts.logprobs_gpu --json "$out/async_loop.gpu.json"
