#!/usr/bin/env bash
# Runs every benchmark that can run on a CPU; results go to benchmarks/results/. Takes more than an hour on two cores of an otherwise
# idle machine. Needs the environment of ./run_tests.sh (transformers is a development dependency).
set -euo pipefail
cd "$(dirname "$0")/.."
for part in startup data prepare overhead vs_transformers throughput levers optimizers scaling checkpoint many_ranks verify first_run four_layouts duplicates busy freed_memory; do
    echo "== $part"
    python3 "benchmarks/$part.py"
done
