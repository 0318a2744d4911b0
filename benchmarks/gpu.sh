#!/bin/sh
# Everything that is tested and measured on a GPU, one after the other, in 20 minutes at most.
#
#     benchmarks/gpu.sh FOLDER [--quick]
#
# FOLDER gets the output and the JSON of each, and the run folder of the main job. What needs SGLang
# is left out without SGLANG_PYTHON, the interpreter of an environment that has it. PYTHON is the
# interpreter of areal_sc (default: .venv/bin/python). Each part has a time limit of its own, and
# what remains of LIMIT_S (default: 1140); one that is stopped has a minute to end. The exit code is
# the number of failures.
set -u
folder=${1:?usage: benchmarks/gpu.sh FOLDER [--quick]}
quick=${2:-}
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
failures=0
deadline=$(($(date +%s) + ${LIMIT_S:-1140}))

# measure NAME SECONDS COMMAND...
measure() {
    name=$1 limit_s=$2
    shift 2
    left_s=$((deadline - $(date +%s)))
    if [ "$left_s" -lt "$limit_s" ]; then
        limit_s=$left_s
    fi
    if [ "$limit_s" -le 0 ]; then
        echo "== $name: no time is left"
        failures=$((failures + 1))
        return
    fi
    echo "== $name: at most $limit_s s"
    timeout --signal=INT --kill-after=60 "$limit_s" "$@" >"$folder/$name.txt" 2>&1
    status=$?
    cat "$folder/$name.txt"
    if [ $status -ne 0 ]; then
        echo "== $name: exit code $status"
        failures=$((failures + 1))
    fi
}

# benchmark NAME SECONDS PROGRAM [ARGUMENTS...]
benchmark() {
    name=$1 limit_s=$2 program=$3
    shift 3
    measure "$name" "$limit_s" "$python" "benchmarks/$program.py" --device cuda \
        --json "$folder/$name.json" $quick "$@"
}

measure tests 400 "$python" -m pytest -q tests/gpu
benchmark train_throughput 400 train_throughput
benchmark generate_throughput 300 generate_throughput
benchmark publication 300 weight_update --engine local
measure letter_sort 900 "$python" examples/letter_sort.py --config configs/letter_sort_gpu.yaml \
    "run_dir=$folder/letter_sort" --overwrite
if [ -n "${SGLANG_PYTHON:-}" ]; then
    benchmark engines 600 generate_throughput --against sglang --slots 64 \
        --sglang-python "$SGLANG_PYTHON"
    benchmark weight_update 600 weight_update --servers 1 --sglang-python "$SGLANG_PYTHON"
fi
exit $failures
