#!/usr/bin/env bash
# Run all checks and benchmarks that need a GPU, on the first machine with one; no network needed.
#
#   tools/first_gpu.sh [--rehearse] [--only NAME] [--trl-python PYTHON] [FOLDER]
#
# The parts run in sequence for at most 25 minutes together. A failed part does not stop the others.
# FOLDER (default: first-gpu) gets logs and runs. FOLDER/results has first-gpu.json and report.md,
# small enough for benchmarks/results. The exit code is 0 if no part failed. --rehearse runs small
# versions on a CPU, and names the parts that need a GPU.
cd "$(dirname "$0")/.." && exec python tools/first_gpu/runner.py "$@"
