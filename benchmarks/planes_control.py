"""The control plane: no-op calls, fan-out to thousands of workers, heartbeats, bytes a row."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from planes_role import Role
from planes_samples import Samples
from report import Metrics

NUM_HOSTS = 8
FAN_OUTS = (16, 64, 256, 1024, 4096)
QUICK_FAN_OUTS = (16, 64, 256)
PING_BYTES = 64
"""About what a no-op call and its reply take on the wire."""

STEP_LENGTHS = (100, 1_000, 8_000, 128_000)
STEP_ROWS = (64, 4096)
USUAL_LENGTH, USUAL_ROWS = 8_000, 512
NUM_STEPS = 3
MIN_FAN_OUT_ROUNDS = 5
NUM_BUSY_FAN_OUTS = 10

CALL = "No-op call, one at a time: us; bare without authentication"
FAN_OUT = "Fan-out and gather of a no-op, by number of workers: ms of the controller"
BEATS = "Heartbeats of all workers, 8 a node: CPU % of a core, ms that a 2 ms timer is late"
STEP = "A training step's messages without tensors, 2 ranks, 4 minibatches, by tokens x rows"
LABELS = {"rpc": "RPC"}

_SCRIPTS = {"controller": "planes_controller.py", "host": "simulated_workers.py"}


def measure_calls(
    zmq_puller: Role,
    samples: Samples,
    folder: Path,
    rounds: int,
    count: int,
    watch_s: float,
    fan_outs: tuple[int, ...],
) -> None:
    """No-op calls of one worker, then a controller of many of them in a few processes."""
    with ExitStack() as stack:
        controller, host = _role(stack, folder, "controller"), _role(stack, folder, "host")
        controller.call("connect", workers=host.call("start", role="rollout", first=0, count=1))
        for _ in range(rounds):
            for side, latencies in (
                ("zmq", zmq_puller.call("latencies", num_bytes=PING_BYTES, count=count)),
                ("rpc", controller.call("latencies", count=count)),
            ):
                samples.add(CALL, "p50", side, 1e6 * latencies["p50_s"])
                samples.add(CALL, "p99", side, 1e6 * latencies["p99_s"])
    with ExitStack() as stack:
        controller = _role(stack, folder, "controller")
        hosts = [_role(stack, folder, "host") for _ in range(NUM_HOSTS)]
        share = max(fan_outs) // NUM_HOSTS
        for number, host in enumerate(hosts):
            host.begin("start", role="rollout", first=number * share, count=share)
        workers = [worker for host in hosts for worker in host.finish()]
        num_connected = 0
        for num_workers in fan_outs:
            controller.call("connect", workers=workers[num_connected:num_workers])
            num_connected = num_workers
            _fan_outs(controller, samples, rounds, num_workers, str(num_workers))
        some, every = fan_outs[-2:]
        _fan_outs(controller, samples, rounds, some, f"{some}_of_{every}")
        for beside, seconds, num_fan_outs in (
            ("nothing", watch_s, 0),
            ("fan-outs to all", watch_s / 2, NUM_BUSY_FAN_OUTS),
        ):
            watched = controller.call("watch", seconds=seconds, num_fan_outs=num_fan_outs)
            samples.add(BEATS, "CPU %", beside, 100 * watched["cpu_share"])
            for late in ("p50", "p99", "max"):
                samples.add(BEATS, late, beside, 1e3 * watched[f"{late}_s"])


def _fan_outs(controller: Role, samples: Samples, rounds: int, num_workers: int, case: str) -> None:
    for _ in range(max(rounds, MIN_FAN_OUT_ROUNDS)):
        spent = controller.call("fan_out", num_workers=num_workers)
        samples.add(FAN_OUT, case, "CPU", 1e3 * spent["cpu_s"])
        samples.add(FAN_OUT, case, "wall", 1e3 * spent["wall_s"])


def measure_steps(samples: Samples, folder: Path, *, quick: bool) -> None:
    """A controller of its own for each case: memory that one has used says nothing of the next."""
    lengths = (min(STEP_LENGTHS), max(STEP_LENGTHS)) if quick else STEP_LENGTHS
    cases = [(length, USUAL_ROWS) for length in lengths]
    cases += [(USUAL_LENGTH, rows) for rows in STEP_ROWS]
    with ExitStack() as stack:
        host = _role(stack, folder, "host")
        workers = host.call("start", role="rollout", first=0, count=3)
        for length, rows in cases:
            with ExitStack() as alone:
                controller = _role(alone, folder, "controller")
                controller.call("connect", workers=workers)
                spent = controller.call("steps", num_rows=rows, length=length, count=NUM_STEPS)
            for what in ("bytes_per_row", "resident_bytes"):
                samples.add(STEP, _case(length, rows), what, spent[what])


def metrics(samples: Samples) -> Metrics:
    def resident(length: int, rows: int) -> float:
        return samples.median(STEP, _case(length, rows), "resident_bytes")

    fewest, most = STEP_ROWS
    growth = resident(USUAL_LENGTH, most) - resident(USUAL_LENGTH, fewest)
    longest = resident(max(STEP_LENGTHS), USUAL_ROWS) / resident(min(STEP_LENGTHS), USUAL_ROWS)
    bytes_per_row = [samples.median(STEP, case, "bytes_per_row") for case in samples.cases(STEP)]
    *fan_outs, _ = samples.cases(FAN_OUT)
    found: Metrics = {
        "noop_rpc_vs_bare": samples.ratio(CALL, "p50", "rpc", "zmq"),
        "noop_rpc_p99_vs_bare": samples.ratio(CALL, "p99", "rpc", "zmq"),
        "noop_rpc_p50_us": samples.median(CALL, "p50", "rpc"),
        f"heartbeat_{fan_outs[-1]}_cpu_percent": samples.median(BEATS, "CPU %", "nothing"),
        "loop_lag_p99_ms": samples.median(BEATS, "p99", "nothing"),
        "loop_lag_fanout_p99_ms": samples.median(BEATS, "p99", "fan-outs to all"),
        "controller_bytes_per_row": max(bytes_per_row),
        "controller_memory_longest_vs_shortest": longest,
        "controller_resident_bytes_per_row": growth / (most - fewest),
    }
    for case in samples.cases(FAN_OUT):
        found[f"fanout_{case}_cpu_ms"] = samples.median(FAN_OUT, case, "CPU")
    return found


def _case(length: int, rows: int) -> str:
    return f"{length} x {rows}"


def _role(stack: ExitStack, folder: Path, name: str) -> Role:
    script = Path(__file__).with_name(_SCRIPTS[name])
    return stack.enter_context(Role(name, script, [str(folder)]))
