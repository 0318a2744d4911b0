#!/usr/bin/env bash
# Installs the peers of benchmarks/planes.py into .venv-peers beside the repository's .venv:
# TransferQueue, AReaL and Ray from PyPI. About a minute and 1.3 GB; no CUDA is pulled.
#
#     benchmarks/peers/install.sh [PYTHON]
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
environment=$here/../../.venv-peers
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)

"${1:-python3}" -m venv "$environment"
"${pip[@]}" --requirement "$here/requirements.txt"
"${pip[@]}" --no-deps ray==2.60.0 tensordict==0.15.3 TransferQueue==0.1.11 areal==1.0.4
"$environment/bin/python" - <<'CHECK'
import ray, tensordict, torch, transfer_queue
print(f"ray {ray.__version__}, TransferQueue {transfer_queue.__version__}, torch {torch.__version__}")
CHECK
