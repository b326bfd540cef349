#!/usr/bin/env bash
# Run all checks and benchmarks that need a GPU, on the first machine with one; no network needed.
#
#   tools/first_gpu.sh [--piece FILE] [--rehearse] [--only NAME] [--budget-s N] [--trl-python PYTHON] [FOLDER]
#
# A machine with torch, transformers, pyarrow and pytest is enough: --piece has the other packages, as
# tools/first_gpu/pack.py packs them. Parts that need Ray or vLLM come last, and are skipped without.
# The parts run in sequence for at most 25 minutes together. A failed part does not stop the others.
# FOLDER (default: first-gpu) gets logs and runs. FOLDER/results has first-gpu.json and report.md,
# small enough for benchmarks/results. The exit code is 0 if no part failed. --rehearse runs small
# versions on a CPU, and names the parts that need a GPU.
cd "$(dirname "$0")/.." || exit
if [ "${1-}" = --piece ]; then
  site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
  python3 -m tarfile --filter data -e "$2" "$site" || exit
  # Ray gives its agents seconds to start, and all of them would compile the same modules
  PYTHONWARNINGS=ignore python3 -m compileall -q -j 0 "$site"
  shift 2
fi
export PYTHONPATH="$PWD:$PWD/benchmarks${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
python3 tools/first_gpu/runner.py "$@"
