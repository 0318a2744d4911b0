#!/usr/bin/env bash
# Installs the peer of benchmarks/against_trl.py into .venv-trl beside the repository's .venv: TRL from
# PyPI, with the versions of torch and transformers that the project was measured with. About two
# minutes and 1.5 GB with a torch for CPUs, which PyPI has for some platforms only.
#
#     benchmarks/peers/install_trl.sh [PYTHON]
set -euo pipefail

environment=$(cd "$(dirname "$0")/../.." && pwd)/.venv-trl
"${1:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
	torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0
"$environment/bin/python" -c 'import trl; print(f"TRL {trl.__version__}")'
