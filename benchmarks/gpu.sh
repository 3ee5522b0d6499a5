#!/usr/bin/env bash
# The GPU benchmarks, in parts. `benchmarks/gpu.sh` lists them in the order in which to run them, `benchmarks/gpu.sh PART ...`
# runs some, `benchmarks/gpu.sh all` all that have not been finished with these sources: a finished part is recorded in $MARKS
# (default: benchmarks/.done), so the same command continues where the last one was stopped. The measurement of a part is
# ended after $PART_SECONDS (default: 540); installing packages is not counted.
# Results go to benchmarks/results/; if $OUT is set, those of this call are also in $OUT/results.tgz, with the marks, a few
# seconds old at most: unpacked here, they let the next machine continue.
# A part that was cut off leaves the results it had, and an output, <date>-gpu_PART.txt, without the last line "ended: ...".
# Missing packages are installed from the folder of wheels $WHEELS if that is set, otherwise from pip's index.
set -euo pipefail
cd "$(dirname "$0")/.."
sources="$(find titanlite benchmarks tests train_configs train.py -type f \( -name '*.py' -o -name '*.toml' -o -name '*.sh' \) |
    sort | xargs cat)"
marks="${MARKS:-benchmarks/.done}/$(sha256sum <<< "$sources" | cut -c1-12)"
limit="${PART_SECONDS:-540}"

need() {    # [pip option] package ...
    local options=() missing=() package found
    while [[ $1 == -* ]]; do options+=("$1"); shift; done
    for package in "$@"; do
        found="$(python3 -m pip list --format=freeze 2>/dev/null | grep -i "^${package%%=*}==" || true)"
        [[ -n $found && ( $package != *==* || $found == "$package" ) ]] || missing+=("$package")
    done
    if ((${#missing[@]})); then
        timeout 240 python3 -m pip install -q ${WHEELS:+--no-index --find-links "$WHEELS"} "${options[@]}" "${missing[@]}"
    fi
}

python() { timeout --kill-after=10 "$limit" python3 "$@"; }

run() {
    local size pair
    case $1 in
        first) python benchmarks/first_checks.py ;;
        tests) need pytest pytest-xdist psutil &&
               python -m pytest -v -m gpu -n 6 --durations=0 --deselect tests/e2e/test_gpu.py::test_verify_on_one_gpu \
                   --ignore tests/tools/plan ;;
        plan) need pytest psutil && python -m pytest -v -m gpu --durations=0 tests/tools/plan ;;
        1b|loss|fsdp|recompute|3b|8b|8b-bfloat16) python benchmarks/throughput.py --steps 20 --cases "$1" ;;
        profile) python benchmarks/throughput.py --steps 5 --cases "1b; 1b, bfloat16 states" --profile --name throughput_profiled ;;
        torchtitan-*) IFS=- read -r _ size pair <<< "$1"
                      need --no-deps torchtitan==0.2.2 tyro torchdata docstring-parser shtab typeguard && need tokenizers fsspec einops pillow tensorboard &&
                      python benchmarks/vs_torchtitan.py --pairs "$pair" --config "llama3_$size" --flavor "llama3_$size" \
                          --batch "$([[ $size == 1b ]] && echo 2 || echo 1)" --steps 20 ;;
        8b-fixed-segments) PYTORCH_ALLOC_CONF=expandable_segments:False \
                               python benchmarks/throughput.py --steps 20 --cases 8b --name throughput_8b_fixed_segments ;;
        transformers) need transformers && python benchmarks/vs_transformers.py --sizes 1B ;;
        verify) python -m titanlite verify --quick ;;
        checkpoint) python benchmarks/checkpoint.py --gb 2 ;;
    esac
}

collect() {    # the results that are newer than this call, as one file
    [[ -n ${OUT:-} ]] || return 0
    local archive="$OUT/.results.$BASHPID.tgz"    # of this process: the loop below also collects
    find benchmarks/results "$marks" -type f -newer "$started" -print0 | tar -czf "$archive" --null -T - 2> /dev/null || true
    mv "$archive" "$OUT/results.tgz" || true
}

# Parts of one model stand together: they share what the compiler has in its cache
parts="first 1b profile loss 8b tests torchtitan-1b-fsdp verify plan fsdp recompute 3b torchtitan-3b-fsdp 8b-bfloat16
    8b-fixed-segments torchtitan-1b-autocast torchtitan-3b-autocast transformers checkpoint"
if (($# == 0)); then
    echo "usage: benchmarks/gpu.sh all | PART ...    parts:" $parts
    exit 0
fi
[[ $1 == all ]] && set -- $parts
for part in "$@"; do
    if [[ " "$(echo $parts)" " != *" $part "* ]]; then echo "no part $part; there are:" $parts >&2; exit 2; fi
done
if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: torch finds no CUDA device" >&2; exit 2
fi
mkdir -p "$marks" benchmarks/results
started="$(mktemp)"
(while sleep 5; do collect; done) > /dev/null 2>&1 &
trap 'kill %1 2> /dev/null || true; rm -f "$started"' EXIT
need safetensors tiktoken regex numpy
failed=()
for part in "$@"; do
    if [[ -e $marks/$part ]]; then echo "== $part: done before"; continue; fi
    output="benchmarks/results/$(date +%F)-gpu_$part.txt"
    echo "== $part" | tee "$output"
    code=0 SECONDS=0
    run "$part" 2>&1 | tee -a "$output" || code=$?
    echo "ended: exit code $code after $SECONDS s" | tee -a "$output"
    if ((code == 0)); then touch "$marks/$part"; else failed+=("$part"); fi
    collect
done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
