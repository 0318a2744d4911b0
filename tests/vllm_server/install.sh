#!/usr/bin/env bash
# install.sh [FOLDER]
# Makes, or completes, a virtual environment in which a real vLLM server runs on a CPU.
# FOLDER is .venv-vllm in the repository unless given; PYTHON (python3) is what it is made with.
# An environment that is complete already is left alone, in milliseconds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/../../.venv-vllm}
requirements=$here/requirements.txt

# The environment is complete when it holds the sum of what it was made from.
state=$(cat "$requirements" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$folder/complete" 2>/dev/null)" = "$state" ] && [ -x "$folder/bin/python" ]; then
	exit 0
fi

mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9 # two test runs must not install at once
if [ "$(cat "$folder/complete" 2>/dev/null)" = "$state" ]; then
	exit 0
fi
rm -f "$folder/complete"
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
echo '*' >"$folder/.gitignore"
python=$folder/bin/python

# torch brings its own dependencies. The rest is complete as it stands: vLLM itself declares dozens
# of packages for kernels, images, sound and other interfaces, which serving text does not import.
torch=$(grep '^torch==' "$requirements")
"$python" -m pip install --quiet --disable-pip-version-check -c "$requirements" "$torch"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"

if ! errors=$("$python" -W ignore -c '
import vllm.entrypoints.launchers.api_server.entry
import vllm.v1.worker.cpu_worker
import vllm.model_executor.models.qwen2
' 2>&1); then
	printf '%s\n' "$errors" >&2
	echo "install.sh: vLLM in $folder cannot be imported" >&2
	exit 1
fi
echo "$state" >"$folder/complete"
