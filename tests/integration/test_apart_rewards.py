"""A reward of the user's reaches nothing of its run: each layer, as root and as an ordinary user.

`apart_rewards.py` has the rewards; a process of its own runs them for each layer and user.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.other_users import USERS, told_by
from integration.scripts import episodes
from waiting import wait_until
from zmq.utils import z85

from areal_sc import SingleTurnWorkflow
from areal_sc.system.sandbox.isolation import LAYERS
from areal_sc.transport.security.passes import Caller, Passes, WorkerKeys

REWARDS = Path(__file__).with_name("apart_rewards.py")
CASES = [*((layer, user) for layer in LAYERS for user in USERS), ("none", "itself")]

HIDDEN = ("keys", "memory", "keys from here", "writes into the run", "signal")
KEPT = {
    "own sources": "data",
    "other files": "data",
    "writes elsewhere": "1",
    "own environment": "kept",
    "network": "open",
    "descriptors": "0",
}


@pytest.fixture(scope="module")
def results(folder_of_all: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return told_by(REWARDS, CASES, folder_of_all)


@pytest.fixture(params=CASES, ids="-".join)
def came(
    request: pytest.FixtureRequest, results: dict[tuple[str, str], Any]
) -> tuple[str, dict[str, Any]]:
    layer, user = request.param
    told: dict[str, Any] = results[layer, user]
    if "unavailable" in told:
        pytest.skip(told["unavailable"])
    if layer != "none" and told["layer"] != layer:
        pytest.skip(f"{layer} does not work here for a process of {user}")
    return layer, told


def test_a_reward_sees_nothing_of_its_run_and_keeps_the_rest(
    came: tuple[str, dict[str, Any]],
) -> None:
    layer, told = came
    found = told["looks"]
    if layer == "none":  # so these attempts would be noticed
        assert [found[name] for name in HIDDEN] == ["SECRET", "SECRET", "SECRET", "1", "sent"]
        assert found["environment of the run"] == "seen"
        return
    assert {found[name] for name in HIDDEN} <= {
        *("FileNotFoundError", "PermissionError", "ProcessLookupError", "OSError")
    }, found
    assert found["environment of the run"] != "seen"
    assert {name: found[name] for name in KEPT} == KEPT
    assert told["victim"] is None


def test_a_declaration_takes_the_network_or_files(came: tuple[str, dict[str, Any]]) -> None:
    _, told = came
    if isinstance(told["looks_narrowly"], dict):
        narrow = told["looks_narrowly"]
        assert narrow["own sources"] == "data"
        assert {narrow["other files"], narrow["writes elsewhere"]} == {"PermissionError"}
        assert narrow["network"] == "open"
    else:
        assert "Landlock" in told["looks_narrowly"]
    offline = told["looks_offline"]
    assert (offline["network"], offline["other files"]) == ("PermissionError", "data")


def test_limits_and_deaths_are_told_as_without_isolation(
    came: tuple[str, dict[str, Any]],
) -> None:
    _, told = came
    assert (told["killed"], told["long"], told["daemon"]) == (0.75, 0.25, 1.0)
    assert "took longer than 5 s" in told["hangs"]
    assert "in hangs" in told["hangs"], "no frames of the reward"


def test_no_daemon_outlives_the_run(came: tuple[str, dict[str, Any]]) -> None:
    """The script's own folder is in the command line of all that it has forked."""
    _, told = came
    wait_until(lambda: not any(told["folder"] in line for line in command_lines()))


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return found


def test_no_key_is_in_the_memory_of_a_reward(
    start_rollout: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its worker's, nor that of a worker which the same agent has started before."""
    given: list[WorkerKeys] = []
    secrets: set[bytes] = set()

    def issue(passes: Passes, name: str, caller: Caller) -> WorkerKeys:
        keys = passes._keys
        secrets.update((keys.controller_secret, keys.workers_secret, keys.signing_seed))
        given.append(real_issue(passes, name, caller))
        return given[-1]

    real_issue = Passes.issue
    monkeypatch.setattr(Passes, "issue", issue)
    copy = tmp_path / "copy"
    row = {"prompt": "a=", "answer": "a", "copy": str(copy), "known": "a row's own text"}
    for _ in range(2):
        with start_rollout("rollout.reward_timeout_s=240") as rollout:
            rollout.rollout_batch([row], SingleTurnWorkflow(episodes.copies_its_memory))
    memory = copy.read_bytes()
    assert row["known"].encode() in memory
    assert len(given) == 2
    secrets |= {keys.own.secret for keys in given}
    found = [secret in memory or z85.decode(secret) in memory for secret in secrets]
    assert not any(found)
    assert not any(keys.sessions in memory or keys.shown_pass in memory for keys in given)
