"""Folders that clients have saved, which other models and samplers begin with.

RUN_DIR/serving/models/<model>/state-NAME     weights, with the state of the optimizer
                               sampler-NAME   weights alone
                               loaded-N       what request N of the model has loaded
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from areal_sc.serving.journal import Source
from areal_sc.serving.trained_model import file_name_of
from areal_sc.serving.wire import RequestRefused
from areal_sc.sizing.adapter_folder import stored_rank
from areal_sc.system.durable import partial_of

STATE: Final = "state-"
SAMPLER: Final = "sampler-"
LOADED: Final = "loaded"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PATH: Final = re.compile(
    r"tinker://([0-9a-f]{16}-[0-9a-f]{16}:train:\d+)/(weights|sampler_weights)/([^/]+)"
)


def check_name(name: str) -> str:
    """Raises: RequestRefused: it is no plain name."""
    if _NAME.fullmatch(name) is None:
        raise RequestRefused(
            f"path: expected a name of letters, digits, '.', '_', '-', got {name!r:.120}"
        )
    return name


class SavedFolders:
    """Finds folders by the paths of the Tinker API; the caller has checked whose they are.

    Args: lora_rank: 0: whole models, which are not loaded.

    Attributes:
        folder: of all models.
    """

    def __init__(self, folder: Path, lora_rank: int) -> None:
        self.folder = folder
        self._lora_rank = lora_rank

    def find(self, path: str) -> str:
        """The folder, below that of all models. Raises: RequestRefused: there is none."""
        parts = _PATH.fullmatch(path)
        if parts is not None:
            prefix = STATE if parts[2] == "weights" else SAMPLER
            folder = f"{file_name_of(parts[1])}/{prefix}{check_name(parts[3])}"
            if (self.folder / folder).is_dir():
                return folder
        raise RequestRefused(f"path: there are no weights {path!r:.200}", 404)

    def source(self, path: str, *, has_optimizer: bool) -> Source:
        """What a model that begins with saved weights does.

        Raises: RequestRefused: there are no such weights here.
        """
        folder = self.find(path)
        if not self._lora_rank:
            raise RequestRefused("load_weights: a server of whole models loads none")
        if has_optimizer and "/weights/" not in path:
            raise RequestRefused(f"optimizer: {path:.200} has no state of an optimizer")
        return Source(folder, has_optimizer, rank=stored_rank(self.folder / folder))

    def kept_source(self, model_id: str, number: int, path: str, *, has_optimizer: bool) -> Source:
        """Saved weights as they are when a model asks for them: a later server repeats that.

        Args: number: of the model's request.
        Raises: RequestRefused: see `source`.
        """
        kept = f"{file_name_of(model_id)}/{LOADED}-{number}"
        whole = self.folder / kept
        if not whole.is_dir():
            stored = self.folder / self.source(path, has_optimizer=has_optimizer).folder
            part = partial_of(whole)
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(stored, part, copy_function=os.link)
            part.rename(whole)
        return Source(kept, has_optimizer, rank=stored_rank(whole))
