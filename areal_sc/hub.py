"""Models by their name on the Hugging Face hub: where they are on this machine.

The hub's own library downloads, keeps and finds them: once a machine, in `HF_HOME`, with the token
of `HF_TOKEN` or `hf auth login`, and without any request where `HF_HUB_OFFLINE=1`.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from areal_sc.errors import ModelError

MODEL_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What engines read of a model; a repository may also hold the same weights in other formats."""

_HUB_NAME: Final = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
"""Owner and model; behind an @ may stand a branch, a tag or a commit."""


def is_hub_name(path: str) -> bool:
    """Whether a model is named as the hub does, `owner/model` or `owner/model@revision`, and is no
    path on this machine."""
    folder = Path(path)
    return bool(_HUB_NAME.fullmatch(path)) and not folder.exists() and not folder.parent.is_dir()


def cached_model(path: str) -> Path | None:
    """The folder of a model; None: it is one of the hub that was not downloaded yet.

    Args:
        path: a folder, or a name of the hub; without a revision, the newest of the main branch.
    """
    if not is_hub_name(path):
        return Path(os.path.expanduser(path))
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(path, is_offline=True)
    except LocalEntryNotFoundError:
        return None


def fetch_model(path: str) -> Path:
    """The folder of a model, which is downloaded if it is not there; shows how far it is.

    The path is that of `cached_model`. Several processes of a machine download it once.

    Raises: ModelError: there is no such model, or it cannot be had; says what to do.
    """
    if not is_hub_name(path):
        return Path(os.path.expanduser(path))
    from huggingface_hub import errors

    try:
        return _snapshot(path)
    except Exception as error:  # those of whichever HTTP library the hub's library is built on
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        raise ModelError(f"model {path}: {why_not_had(cause, path)}") from None


def why_not_had(cause: BaseException | None, path: str, kind: str = "model") -> str:
    """Why the hub's library could not get a model or a data set, and what to do.

    Args:
        cause: what it raised.
        kind: `model` or `dataset`.
    """
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, path.partition("@")[0]
    page = f"{hub}/{name}" if kind == "model" else f"{hub}/{kind}s/{name}"
    match cause:
        case errors.GatedRepoError():
            return (
                f"its owner grants access on request: ask for it at {page}, then call "
                "`hf auth login` or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"{hub} has the {kind}, but no such revision"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no such folder, and no such {kind} at {hub}; if it is a private one, "
                "call `hf auth login` or set HF_TOKEN"
            )
        case _ if constants.HF_HUB_OFFLINE:
            return (
                "there is no such folder, it was not downloaded before, and HF_HUB_OFFLINE is "
                "set, so nothing is asked for"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"no space is left in {constants.HF_HOME}; free some, or set HF_HOME to "
                "a folder on another disk"
            )
    return f"there is no such folder, and {hub} gives no answer that helps: {cause!r:.300}"


def local_model(path: str) -> Path:
    """The folder of a model: an earlier download, without asking for a newer one, or else
    `fetch_model`'s."""
    return cached_model(path) or fetch_model(path)


def _snapshot(path: str, *, is_offline: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = path.partition("@")
    folder = snapshot_download(
        name,
        revision=revision or None,
        allow_patterns=list(MODEL_FILES),
        local_files_only=is_offline,
    )
    return Path(folder)
