"""Keys are written so that nobody else reads them, and never shown."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import MAX_FILE_BYTES, KeyPair, RunKeys


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.create()


def secrets_of(keys: RunKeys) -> list[str]:
    secrets = keys.controller_secret, keys.workers_secret, keys.signing_seed
    return [secret.decode() for secret in secrets]


def test_keys_of_two_runs_share_nothing(keys: RunKeys) -> None:
    assert len(set(secrets_of(keys)) | set(secrets_of(RunKeys.create()))) == 6
    assert keys.run_id != RunKeys.create().run_id


def test_what_is_written_is_read(keys: RunKeys, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys.write(path)
    assert RunKeys.read(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"


def test_keys_of_an_earlier_start_are_replaced(keys: RunKeys, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create().write(path)
    path.chmod(0o644)  # whatever became of the file
    keys.write(path)
    assert RunKeys.read(path) == keys


def test_a_permissive_umask_opens_nothing(keys: RunKeys, tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib; os.umask(0)\n"
        "from areal_sc.transport.security.keys import RunKeys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(args))\n"
        "RunKeys.create().write(pathlib.Path(sys.argv[1]))\n"
        "assert any(isinstance(a[0], str) and 'keys.json' in a[0] and a[2] & os.O_EXCL "
        "for a in opened), opened\n"
    )
    path = tmp_path / "keys.json"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_its_place_is_replaced_and_not_followed(keys: RunKeys, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    path = tmp_path / "keys.json"
    path.symlink_to(elsewhere)
    with pytest.raises(TransportError, match="cannot be read"):
        RunKeys.read(path)
    keys.write(path)
    assert elsewhere.read_text() == "mine"
    assert RunKeys.read(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_may_touch_is_refused(keys: RunKeys, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    keys.write(path)
    path.chmod(mode)
    with pytest.raises(TransportError, match=rf"expected mode 0600, got {mode:04o}"):
        RunKeys.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(keys: RunKeys, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys.write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(TransportError, match=r"expected the owner 0, got 12345"):
        RunKeys.read(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="No such file"):
        RunKeys.read(tmp_path / "keys.json")
    with pytest.raises(TransportError, match=r"Is a directory|regular file"):
        RunKeys.read(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(TransportError, match="regular file"):
        RunKeys.read(tmp_path / "fifo")


def test_a_folder_that_is_not_there_is_named(keys: RunKeys, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"missing/keys\.json"):
        keys.write(tmp_path / "missing" / "keys.json")


MALFORMATIONS: dict[str, Callable[[dict[str, str]], str]] = {
    "empty": lambda content: "",
    "truncated": lambda content: json.dumps(content)[:-10],
    "another shape": lambda content: json.dumps(list(content.values())),
    "nested": lambda content: "[" * MAX_FILE_BYTES,
    "one is missing": lambda content: json.dumps(dict(list(content.items())[:2])),
    "one too many": lambda content: json.dumps(content | {"more": content["workers_secret"]}),
    "a number": lambda content: json.dumps(content | {"workers_secret": 1}),
    "not ASCII": lambda content: json.dumps(content | {"workers_secret": "ä" * 40}),
    "not Z85": lambda content: json.dumps(content | {"workers_secret": "~" * 40}),
    "too short": lambda content: json.dumps(
        content | {"workers_secret": content["workers_secret"][:35]}
    ),
    "too long": lambda content: json.dumps(content) + " " * MAX_FILE_BYTES,
}


@pytest.mark.parametrize("name", MALFORMATIONS)
def test_a_malformed_file_is_refused_without_a_word_of_it(
    keys: RunKeys, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "keys.json"
    keys.write(path)
    content = json.loads(path.read_text())
    path.write_text(MALFORMATIONS[name](content), encoding="utf-8")
    with pytest.raises(TransportError, match="does not hold the keys of a run") as caught:
        RunKeys.read(path)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    for secret in secrets_of(keys):
        assert secret[:30] not in shown


def test_no_text_shows_a_secret(keys: RunKeys) -> None:
    shown = f"{keys} {keys!r} {[keys]} {keys.controller} {keys.workers!r}"
    assert keys.controller.public.decode() in shown
    for secret in secrets_of(keys):
        assert secret not in shown


def test_two_halves_of_different_pairs_are_refused() -> None:
    one, other = KeyPair.create(), KeyPair.create()
    for public, secret in ((one.public, other.secret), (one.public, b"short"), (b"", one.secret)):
        with pytest.raises(TransportError, match="not a CURVE pair"):
            KeyPair(public, secret)
