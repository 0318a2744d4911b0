#!/usr/bin/env bash
# A SLURM cluster whose nodes are hosts of their own on this machine: each has its own network
# (veth on a bridge, IPv4 and IPv6), host name, boot id, /dev/shm and processes. Needs root.
#   hosts.sh start            prints the path of slurm.conf; this machine is the login node
#   hosts.sh on node3 COMMAND runs a command on a node
#   hosts.sh ssh 10.77.1.13 TEXT   a shell command, unless the host is off, or its cable is pulled
#   hosts.sh kill node3       power loss; boot node3 starts the host again
#   hosts.sh cut node3        pulls its network cable; heal node3 puts it back
#   hosts.sh ctld STOP        a signal for slurmctld: STOP, CONT or KILL; `start` after KILL
#   hosts.sh stop
# SLURM_CLUSTER_ID (1 to 99) tells clusters apart; SLURM_CLUSTER_ROOT is an empty folder of its own.
# With RAY, a Python interpreter that has Ray, it is a Ray cluster: each host is a node with one CPU,
# and this machine its head, with none.
set -euo pipefail
SELF=$(readlink -f "$0")
ID=$SLURM_CLUSTER_ID ROOT=$SLURM_CLUSTER_ROOT
NODES=3 CPUS=8 GPUS=8
NET=10.77.$ID NET6=fd77:$ID: BRIDGE=slbr$ID PORT=$((27600 + 10 * ID))
RAY_START=("${RAY:-}" -m ray.scripts.scripts start --block --object-store-memory=80000000
  --disable-usage-stats --include-log-monitor=false)
export SLURM_CONF=$ROOT/slurm.conf PATH=$PATH:/usr/sbin:/sbin

is_gone() { # PID: under a container's first process the dead stay zombies for a while
  case "$(ps -o stat= -p "$1" 2>/dev/null || true)" in
  Z*l*) return 1 ;; # other threads of it are still there, and what they have open
  '' | Z*) return 0 ;;
  esac
  return 1
}

wait_until_gone() { # PID
  for _ in $(seq 600); do
    ! is_gone "$1" || break
    sleep 0.1
  done
}

init() { # NODE: runs as the first process of a host, in its namespaces
  hostname "$1"
  mount --make-rprivate /
  mount -t proc proc /proc
  mount --bind "$ROOT/boot-$1" /proc/sys/kernel/random/boot_id
  # torch looks up the names of addresses, and waits for seconds where nobody answers
  mount --bind "$ROOT/hosts" /etc/hosts
  mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
  cd /
  if [ -n "${RAY:-}" ]; then
    mount --bind "$ROOT/ray-$1" "$ROOT/ray"
    "${RAY_START[@]}" --address="$NET.1:$PORT" --node-ip-address="$NET.$((10 + ${1#node}))" \
      --num-cpus=1
    return
  fi
  slurmd -D -c -N "$1" -f "$SLURM_CONF" # no exec: bash reaps what its parents leave behind
}

connect() { # NODE
  local number=${1#node} space=sl$ID-$1
  ip netns add "$space"
  ip link add "$space" type veth peer name eth0 netns "$space"
  ip link set "$space" master "$BRIDGE" up
  ip -n "$space" addr add "$NET.$((10 + number))/24" dev eth0
  ip -n "$space" addr add "$NET6:$((10 + number))/64" dev eth0 nodad
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
}

boot() { # NODE
  local node=$1 outside space=sl$ID-$1 first=
  cat /proc/sys/kernel/random/uuid >"$ROOT/boot-$node"
  setsid nsenter --net="/run/netns/$space" \
    unshare --uts --ipc --mount --pid --fork --kill-child bash "$SELF" init "$node" \
    >"$ROOT/log/slurmd-$node.out" 2>&1 </dev/null &
  outside=$!
  for _ in $(seq 3000); do
    first=$(pgrep -P $outside || true)
    [ -z "$first" ] || break
    sleep 0.02
  done
  echo "$first" >"$ROOT/pids/$node"
}

write_config() {
  {
    echo "127.0.0.1 localhost"
    echo "$NET.1 $(hostname -s)"
    for i in $(seq $NODES); do
      echo "$NET.$((10 + i)) node$i"
      echo "$NET6:$((10 + i)) node$i"
    done
  } >"$ROOT/hosts"
  for gpu in $(seq 0 $((GPUS - 1))); do ln -s /dev/null "$ROOT/dev/gpu$gpu"; done
  echo "NodeName=node[1-$NODES] Name=gpu File=$ROOT/dev/gpu[0-$((GPUS - 1))]" >"$ROOT/gres.conf"
  cat >"$SLURM_CONF" <<CONF
ClusterName=cluster$ID
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$ROOT/munge/socket,cred_expire=10
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/state/slurmctld.pid
SlurmdPidFile=$ROOT/spool/slurmd-%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobSubmitPlugins=lua
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
SlurmdTimeout=10
KillWait=20
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=10 State=UP PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=40 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP PreemptMode=OFF
CONF
  cat >"$ROOT/job_submit.lua" <<LUA
function slurm_job_submit(job, partitions, uid)
  if job.account == "broke" then
    slurm.log_user("project broke has used up its hours; ask accounts@cluster")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
LUA
  for i in $(seq $NODES); do
    echo "NodeName=node$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=4000 Gres=gpu:$GPUS"
  done >>"$SLURM_CONF"
}

start() {
  trap 'tail -n 20 "$ROOT"/log/* >&2; "$SELF" stop' ERR
  mkdir -p "$ROOT"/{munge,state,spool,log,pids,dev,ray{,-node1,-node2,-node3}}
  chmod 755 "$ROOT" "$ROOT/munge"
  write_config
  connect_hosts
  if [ -n "${RAY:-}" ]; then start_ray; else start_slurm; fi
}

connect_hosts() {
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.1/24" dev "$BRIDGE"
  ip addr add "$NET6:1/64" dev "$BRIDGE" nodad
  ip link set "$BRIDGE" up
  for i in $(seq $NODES); do connect "node$i"; done
}

start_ray() {
  # a node that is gone is noticed in ten seconds, and one on a busy machine is not
  export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=1000
  export RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=10
  setsid "${RAY_START[@]}" --head --node-ip-address="$NET.1" --port="$PORT" --num-cpus=0 \
    --temp-dir="$ROOT/ray" --include-dashboard=false --no-monitor \
    >"$ROOT/log/head.out" 2>&1 </dev/null &
  echo $! >"$ROOT/pids/head"
  for i in $(seq $NODES); do boot "node$i"; done
  for _ in $(seq 1500); do
    started=$(grep -l "Ray runtime started" "$ROOT"/log/*.out | wc -l || true)
    [ "$started" != $((NODES + 1)) ] || break
    sleep 0.1
  done
  [ "$started" = $((NODES + 1)) ]
}

start_slurm() {
  (umask 077 && head -c 1024 /dev/urandom >"$ROOT/munge/key")
  munged --force --foreground --num-threads=2 --key-file="$ROOT/munge/key" \
    --socket="$ROOT/munge/socket" --pid-file="$ROOT/munge/pid" --seed-file="$ROOT/munge/seed" \
    --log-file="$ROOT/log/munged.log" >"$ROOT/log/munged.out" 2>&1 </dev/null &
  echo $! >"$ROOT/pids/munged"
  setsid slurmctld -D -c -f "$SLURM_CONF" >"$ROOT/log/slurmctld.out" 2>&1 </dev/null &
  echo $! >"$ROOT/pids/slurmctld"
  for i in $(seq $NODES); do boot "node$i"; done
  for _ in $(seq 1500); do
    idle=$(sinfo -h -p debug -N -o %t 2>/dev/null | grep -cx idle || true)
    [ "$idle" != $NODES ] || break
    sleep 0.1
  done
  [ "$idle" = $NODES ]
  echo "$SLURM_CONF"
}

stop() {
  for file in "$ROOT"/pids/{node*,slurmctld,munged,head}; do
    pid=$(cat "$file" 2>/dev/null || true)
    [ -n "$pid" ] || continue
    kill -KILL "$pid" 2>/dev/null || true # a host dies with all of its processes
    wait_until_gone "$pid"
  done
  for i in $(seq $NODES); do ip netns del "sl$ID-node$i" 2>/dev/null || true; done
  ip link del "$BRIDGE" 2>/dev/null || true
}

case ${1:-} in
init) init "$2" ;;
start) start ;;
stop) stop ;;
ctld)
  if [ "$2" = start ]; then
    setsid slurmctld -D -f "$SLURM_CONF" >>"$ROOT/log/slurmctld.out" 2>&1 </dev/null &
    echo $! >"$ROOT/pids/slurmctld"
  else
    pid=$(cat "$ROOT/pids/slurmctld")
    kill "-$2" "$pid"
    [ "$2" != KILL ] || wait_until_gone "$pid" # the next one listens at its port
  fi
  ;;
kill) kill -KILL "$(cat "$ROOT/pids/$2")" ;;
boot) boot "$2" ;;
cut) ip link set "sl$ID-$2" down ;;
heal) ip link set "sl$ID-$2" up ;;
ssh)
  node=node$((${2##*.} - 10))
  first=$(cat "$ROOT/pids/$node")
  if is_gone "$first" || ! ip link show "sl$ID-$node" | grep -q LOWER_UP; then exit 255; fi
  exec nsenter -t "$first" -n -m -u -i -p -- sh -c "$3"
  ;;
on)
  first=$(cat "$ROOT/pids/$2")
  shift 2
  exec nsenter -t "$first" -n -m -u -i -p -- "$@"
  ;;
*) sed -n 2,13p "$SELF" >&2 && exit 2 ;;
esac
