#!/usr/bin/env bash
# install.sh [FOLDER]
# Makes, or completes, a virtual environment in which a real SGLang server runs on a CPU.
# FOLDER is .venv-sglang in the repository unless given; PYTHON (python3) is what it is made with.
# An environment that is complete already is left alone, in milliseconds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/../../.venv-sglang}
requirements=$here/requirements.txt
stand_ins=$here/sglang_cpu_stand_ins.py

# The environment is complete when it holds the sum of what it was made from.
state=$(cat "$requirements" "$stand_ins" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
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

# torch brings its own dependencies. The rest is complete as it stands: SGLang itself declares
# dozens of packages for GPUs, which the stand-ins answer for.
torch=$(grep '^torch==' "$requirements")
"$python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$requirements" "$torch"
"$python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r "$requirements"

packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$stand_ins" "$packages/"
echo 'import sglang_cpu_stand_ins' >"$packages/sglang_cpu_stand_ins.pth"

if ! errors=$(SGLANG_USE_CPU_ENGINE=1 "$python" -W ignore -c '
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import sglang.srt.models.llama
import sglang.srt.models.qwen2
' 2>&1); then
	printf '%s\n' "$errors" >&2
	echo "install.sh: SGLang in $folder cannot be imported" >&2
	exit 1
fi
echo "$state" >"$folder/complete"
