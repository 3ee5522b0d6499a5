#!/usr/bin/env bash
# The GPU benchmarks, in parts of minutes each. `benchmarks/gpu.sh` lists the parts, `benchmarks/gpu.sh PART ...` runs some of
# them, `benchmarks/gpu.sh all` runs all that have not been run with these sources. A finished part is recorded in $MARKS
# (default: benchmarks/.done), so the same command continues where the last one was stopped. Results go to
# benchmarks/results/, and also to $OUT if that is set. Missing packages are installed from the folder of wheels $WHEELS if
# that is set, otherwise from pip's index.
set -euo pipefail
cd "$(dirname "$0")/.."
sources="$(find titanlite benchmarks tests train_configs train.py -type f -name '*.py' -o -name '*.toml' | sort | xargs cat)"
marks="${MARKS:-benchmarks/.done}/$(sha256sum <<< "$sources" | cut -c1-12)"

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
    local size pair
    case $1 in
        tests) need pytest psutil && python3 -m pytest -q -m gpu ;;
        verify) python3 -m titanlite verify --quick ;;
        levers) python3 benchmarks/levers.py ;;
        throughput-*) python3 benchmarks/throughput.py --steps 100 --cases "${1#throughput-}" ;;
        torchtitan-*) IFS=- read -r _ size pair <<< "$1"
                      need torchtitan==0.2.2 &&
                      python3 benchmarks/vs_torchtitan.py --pairs "$pair" --config "llama3_$size" --flavor "llama3_$size" \
                          --batch "$([[ $size == 1b ]] && echo 2 || echo 1)" ;;
        transformers) need transformers && python3 benchmarks/vs_transformers.py --sizes 1B ;;
        checkpoint) python3 benchmarks/checkpoint.py --gb 2 ;;
    esac
}

parts="tests throughput-1b throughput-levers throughput-3b throughput-8b levers torchtitan-1b-autocast torchtitan-1b-fsdp
    torchtitan-3b-autocast torchtitan-3b-fsdp transformers verify checkpoint"
if (($# == 0)); then
    echo "usage: benchmarks/gpu.sh all | PART ...    parts:" $parts
    exit 0
fi
[[ $1 == all ]] && set -- $parts
for part in "$@"; do
    if [[ " "$(echo $parts)" " != *" $part "* ]]; then echo "no part $part; there are:" $parts >&2; exit 2; fi
done
if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: torch finds no CUDA device; benchmarks/cpu.sh has what a CPU can run" >&2; exit 2
fi
mkdir -p "$marks"
need safetensors tiktoken regex numpy
failed=()
for part in "$@"; do
    if [[ -e $marks/$part ]]; then echo "== $part: done before"; continue; fi
    echo "== $part"
    if run "$part"; then touch "$marks/$part"; else failed+=("$part"); fi
    if [[ -n ${OUT:-} ]]; then cp -r benchmarks/results "$OUT/"; fi
done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
