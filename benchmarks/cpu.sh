#!/usr/bin/env bash
# Every benchmark that a CPU can run, one after the other; results go to benchmarks/results/. An hour on two cores, on a
# machine that does nothing else. Needs the environment of ./run_tests.sh (transformers is a development dependency).
set -euo pipefail
cd "$(dirname "$0")/.."
for part in startup data overhead vs_transformers throughput levers scaling checkpoint convert verify first_run; do
    echo "== $part"
    python3 "benchmarks/$part.py"
done
