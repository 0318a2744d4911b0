#!/usr/bin/env bash
# install.sh [FOLDER]
# Writes SmolLM2-135M-Instruct as a Hugging Face folder: FOLDER, or .venv-models/SmolLM2-135M-Instruct
# in the repository. PYTHON (python3) needs pip, torch and transformers.
# A folder that is complete already is left alone, in milliseconds. FOLDER.complete and FOLDER.lock
# stand beside it: what trains the model copies the folder's files.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/../../.venv-models/SmolLM2-135M-Instruct}
python=${PYTHON:-python3}

# The folder is complete when it holds the sum of what it was made from.
state=$(cat "$here"/*requirements.txt "$here/write_model.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
is_complete() { [ "$(cat "$folder.complete" 2>/dev/null)" = "$state" ]; }
if is_complete; then
	exit 0
fi

mkdir -p "$folder"
exec 9>"$folder.lock"
flock 9 # two test runs must not write at once
if is_complete; then
	exit 0
fi
rm -f "$folder.complete"
echo '*' >"$(dirname "$folder")/.gitignore"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
pip=("$python" -m pip --quiet --disable-pip-version-check)

"${pip[@]}" download --no-deps --require-hashes --dest "$parts" -r "$here/requirements.txt"
"${pip[@]}" install --no-deps --no-compile --target "$parts/reader" -r "$here/reader_requirements.txt"
TQDM_DISABLE=1 PYTHONPATH=$parts/reader "$python" "$here/write_model.py" "$parts"/*.whl "$folder"
echo "$state" >"$folder.complete"
