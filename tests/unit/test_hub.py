"""Models by name: downloaded once, found without a network, and refused with what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import TOKEN, HubServer, serve_hub

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.handle_base import with_local_model
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import ModelError
from areal_sc.hub import cached_model, fetch_model, is_hub_name, local_model

FETCH = """
import sys
from areal_sc.errors import ModelError
from areal_sc.hub import cached_model, fetch_model

if (folder := cached_model(*sys.argv[1:])) is not None:
    print("cached", folder)
try:
    print("folder", fetch_model(*sys.argv[1:]))
except ModelError as error:
    print("refused", error)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    for name in ("tiny", "gated", "private"):
        model = folder / "models" / "acme" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "model.safetensors").write_bytes(bytes(3_000_000))
        (model / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    with serve_hub(folder) as server:
        yield server


def fetched(hub: HubServer, home: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """What a process of its own prints: the library reads its environment once."""
    hub.asked.clear()
    process = subprocess.run(
        [sys.executable, "-c", FETCH, *arguments],
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


def test_the_first_start_downloads_with_a_bar_and_the_second_does_not(
    hub: HubServer, tmp_path: Path
) -> None:
    first, shown = fetched(hub, tmp_path, "acme/tiny")
    assert hub.num_downloads == 2
    assert "100%" in shown
    folder = Path(first.removeprefix("folder ").strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").stat().st_size == 3_000_000
    again, _ = fetched(hub, tmp_path, "acme/tiny")
    assert again == f"cached {folder}\nfolder {folder}\n"
    assert hub.num_downloads == 0
    offline, _ = fetched(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert offline == again
    assert not hub.asked
    gone, _ = fetched(hub, tmp_path, "acme/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert gone == again


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["acme/tyni"], {}, "no such folder, and no such model"),
        (["acme/tiny@v9"], {}, "no such revision"),
        (["acme/gated"], {}, "grants access on request"),
        (["acme/private"], {}, "hf auth login"),
        (["acme/tiny"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (["acme/tiny"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(
    hub: HubServer,
    tmp_path: Path,
    arguments: list[str],
    environment: dict[str, str],
    told: str,
) -> None:
    shown, _ = fetched(hub, tmp_path, *arguments, **environment)
    assert shown.startswith("refused ")
    assert arguments[0] in shown
    assert told in shown


@pytest.mark.parametrize("name", ["gated", "private"])
def test_a_token_opens_what_is_not_public(hub: HubServer, tmp_path: Path, name: str) -> None:
    shown, _ = fetched(hub, tmp_path, f"acme/{name}", HF_TOKEN=TOKEN)
    assert shown.startswith("folder ")


def test_a_download_that_broke_off_is_ended_by_the_next_start(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.max_bytes = 1_000_000
    broken, _ = fetched(hub, tmp_path, "acme/tiny", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert broken.startswith("refused model acme/tiny")
    hub.max_bytes = None
    whole, _ = fetched(hub, tmp_path, "acme/tiny")
    assert whole.startswith("folder ")


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", write)
    with pytest.raises(ModelError, match=r"no space is left in .*set HF_HOME"):
        fetch_model("acme/tiny")


def test_paths_of_this_machine_are_no_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-0.5B")
    assert is_hub_name("Qwen/Qwen2.5-0.5B@refs/pr/1")
    for path in ("runs/model", "./Qwen/model", "/models/qwen", "model", "a/b/c", "../a/b", "~/m"):
        assert not is_hub_name(path), path


def test_a_model_below_a_home_folder_is_found(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by who builds an engine, or an argument, in Python, where no settings are read."""
    monkeypatch.setenv("HOME", str(tiny_model_folder.parent))
    path = f"~/{tiny_model_folder.name}"
    assert cached_model(path) == local_model(path) == tiny_model_folder
    assert with_local_model(ActorConfig(path=path)).path == str(tiny_model_folder)
    assert load_tokenizer(path).eos_token == "$"
    assert cached_model("~nobody_of_this_name/x") == Path("~nobody_of_this_name/x")
