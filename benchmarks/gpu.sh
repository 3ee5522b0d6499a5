#!/usr/bin/env bash
# The GPU benchmarks, in parts of at most ten minutes: `benchmarks/gpu.sh` lists them, `benchmarks/gpu.sh PART ...` runs
# some, `benchmarks/gpu.sh all` all that have not been run on this commit. A part that ends leaves its mark in $MARKS
# (default: benchmarks/.done), so the same command goes on where the last one was stopped. Results go to benchmarks/results/,
# and to $OUT as well if that is set. $WHEELS is a folder of wheels to install what is missing from; without it, pip asks
# its index.
set -euo pipefail
cd "$(dirname "$0")/.."
marks="${MARKS:-benchmarks/.done}/$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"

need() {
    local missing=() package found
    for package in "$@"; do
        found="$(python3 -m pip list --format=freeze 2>/dev/null | grep -i "^${package%%=*}==" || true)"
        [[ -n $found && ( $package != *==* || $found == "$package" ) ]] || missing+=("$package")
    done
    if ((${#missing[@]})); then
        python3 -m pip install -q ${WHEELS:+--no-index --find-links "$WHEELS"} "${missing[@]}"
    fi
}

run() {
    case $1 in
        tests) need pytest psutil safetensors tiktoken regex numpy &&
               python3 -m pytest -q -m gpu ;;
        verify) python3 -m titanlite verify --quick ;;
        throughput) python3 benchmarks/throughput.py --cases gpu ;;
        torchtitan-1b) need torchtitan==0.2.2 && python3 benchmarks/vs_torchtitan.py ;;
        torchtitan-3b) need torchtitan==0.2.2 &&
                       python3 benchmarks/vs_torchtitan.py --config llama3_3b --flavor llama3_3b --batch 1 ;;
        transformers) need transformers && python3 benchmarks/vs_transformers.py --sizes 1B ;;
        checkpoint) python3 benchmarks/checkpoint.py --gb 8 ;;
        *) echo "no part $1; there are: $parts" >&2; return 2 ;;
    esac
}

parts="tests throughput torchtitan-1b torchtitan-3b transformers verify checkpoint"
if (($# == 0)); then
    echo "usage: benchmarks/gpu.sh all | PART ...    parts: $parts"
    exit 0
fi
[[ $1 == all ]] && set -- $parts
mkdir -p "$marks"
failed=()
for part in "$@"; do
    if [[ -e $marks/$part ]]; then echo "== $part: done before"; continue; fi
    echo "== $part"
    if run "$part"; then touch "$marks/$part"; else failed+=("$part"); fi
    if [[ -n ${OUT:-} ]]; then cp -r benchmarks/results "$OUT/"; fi
done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
