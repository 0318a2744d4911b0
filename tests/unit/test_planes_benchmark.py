"""The processes that benchmarks/planes.py measures start, move the right bytes, and end."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMITS, WORKERS, CONTROLLER = (
    BENCHMARKS / f"planes_{name}.py" for name in ("limits", "workers", "controller")
)
SIMULATED = BENCHMARKS / "simulated_workers.py"
SHARD_BYTES = 3 << 20


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The benchmark's own modules, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planes_ours
    import planes_role

    return SimpleNamespace(ours=planes_ours, role=planes_role)


def test_role_answers_passes_errors_on_and_ends(bench: SimpleNamespace, tmp_path: Path) -> None:
    script = tmp_path / "role.py"
    script.write_text(
        "import time\n"
        "from planes_role import serve\n"
        "print('goes to the log')\n"
        "serve({'add': lambda a, b: a + b, 'wait': lambda: time.sleep(60)})\n"
    )
    role = bench.role.Role("adder", script)
    assert role.call("add", a=2, b=3) == 5
    with pytest.raises(bench.role.RoleFailed, match="unsupported operand"):
        role.call("add", a=1, b="x")
    assert role.cpu_s() > 0
    role.close()
    with (
        bench.role.Role("adder", tmp_path / "missing.py") as missing,
        pytest.raises(bench.role.RoleFailed, match="adder has ended"),
    ):
        missing.call("add", a=1, b=2)


def test_role_that_does_not_answer_is_ended(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "role.py"
    script.write_text(
        "import time\nfrom planes_role import serve\nserve({'wait': lambda: time.sleep(60)})\n"
    )
    monkeypatch.setattr(bench.role, "CLOSE_TIMEOUT_S", 0.1)
    role = bench.role.Role("sleeper", script)
    with pytest.raises(bench.role.RoleFailed, match=r"no answer within 0\.5 s"):
        role.call("wait", timeout_s=0.5)
    start = time.monotonic()
    role.close()
    assert time.monotonic() - start < 30  # not the sixty seconds that it would sleep


def test_limits_move_the_bytes(bench: SimpleNamespace) -> None:
    for name in ("socket", "zmq"):
        with (
            bench.role.Role("owner", LIMITS, [f"{name}-owner"]) as owner,
            bench.role.Role("puller", LIMITS, [f"{name}-puller"]) as puller,
        ):
            puller.call("connect", address=owner.call("address"))
            assert puller.call("pull", num_bytes=SHARD_BYTES, count=2) > 0
            puller.call("check", num_bytes=SHARD_BYTES)
            with pytest.raises(bench.role.RoleFailed, match="arrived changed"):
                puller.call("check", num_bytes=2 * SHARD_BYTES)
            assert puller.call("tcp_bytes")[1] >= 2 * SHARD_BYTES


@pytest.mark.parametrize("name", ["tcp", "map"])
def test_our_pullers_move_the_bytes(bench: SimpleNamespace, name: str) -> None:
    with (
        bench.ours.run() as folder,
        bench.role.Role("owner", WORKERS, ["owner", str(folder)]) as owner,
        bench.role.Role(name, WORKERS, [name, str(folder)]) as puller,
    ):
        (wire,) = owner.call("seal_shards", num_bytes=SHARD_BYTES, count=1)
        puller.call("know", name="shard", wire=wire)
        before = puller.call("tcp_bytes")[1]
        assert puller.call("pull", name="shard", count=1) > 0
        received = puller.call("tcp_bytes")[1] - before
        assert received > SHARD_BYTES if name == "tcp" else received < SHARD_BYTES // 100
    assert not folder.exists()


def test_controller_steers_simulated_workers(bench: SimpleNamespace) -> None:
    with (
        bench.ours.run() as folder,
        bench.role.Role("host", SIMULATED, [str(folder)]) as host,
        bench.role.Role("controller", CONTROLLER, [str(folder)]) as controller,
    ):
        controller.call("connect", workers=host.call("start", role="rollout", first=0, count=16))
        assert controller.call("fan_out", num_workers=16)["cpu_s"] > 0
        short, long = (
            controller.call("steps", num_rows=16, length=length, count=1)["bytes_per_row"]
            for length in (100, 128_000)
        )
        assert 0 < short < long < 1000
