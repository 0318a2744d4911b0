#!/usr/bin/env bash
# SLURM for tests/integration/slurm, from Debian's packages; at once where it is there.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
for command in slurmctld slurmd munged sbatch ip nsenter; do
  command -v $command >/dev/null || missing=1
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ]; then
  echo "the tests of SLURM make hosts of their own, and so need root: they will be skipped" >&2
  exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge iproute2 >/dev/null
