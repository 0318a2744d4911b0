"""Where the models of a run are, on the disk: a script that was killed goes on from there.

    histories/<role>.json    lineage and version of the model; whether it publishes its versions

The journal counts the versions that are published, one in each step. So the file of a model that
publishes changes with its lineages alone. That of another one changes with each version.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.errors import RunFolderError
from areal_sc.system.disk import Disk

logger = logging.getLogger(__name__)


class ModelPlace(Struct, frozen=True):
    """Where a model is.

    Attributes:
        lineage, version: its history of weights, and its place there.
        is_published: its versions are published; `version` is that at which this began.
    """

    lineage: int
    version: int
    is_published: bool = False

    @property
    def is_initial(self) -> bool:
        """Whether it is as it was built, with any number of starts."""
        return self.version == 0 and not self.is_published

    def newest_version(self, ledger: Ledger | None) -> int | None:
        """Its version; None: it had gone to another lineage, and the journal had not."""
        if not self.is_published:
            return self.version
        is_same = ledger is not None and ledger.lineage == self.lineage
        return ledger.version if ledger is not None and is_same else None


class PlaceFile:
    """Keeps the place of one model. Methods that write raise RunFolderError.

    Attributes:
        left: what the start before has left; None: nothing.
    """

    left: ModelPlace | None = None

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._place = ModelPlace(0, 0)

    def read(self) -> ModelPlace | None:
        """What the start before has left, which it goes on from; a damaged file is logged."""
        if self._path.name in self._disk.names(self._path.parent):
            try:
                self.left = msgspec.json.decode(self._disk.read(self._path), type=ModelPlace)
                self._place = self.left
            except (OSError, msgspec.MsgspecError) as error:
                what = "%s cannot be read, so its model does not go on: %s"
                logger.warning(what, self._path, error)
        return self.left

    async def begin(self, lineage: int, version: int) -> None:
        """The model goes to another lineage."""
        await self._write(replace(self._place, lineage=lineage, version=version))

    async def advance(self, version: int) -> None:
        """It has a version that is not published."""
        await self._write(replace(self._place, version=version))

    async def begin_to_publish(self) -> None:
        """From now on the journal counts the versions."""
        if not self._place.is_published:
            await self._write(replace(self._place, is_published=True))

    async def _write(self, place: ModelPlace) -> None:
        content = msgspec.json.encode(place)
        try:
            await self._disk.run(lambda: self._disk.create(self._path, content))
        except OSError as error:
            raise RunFolderError(f"cannot write {self._path}: {error}") from error
        self._place = place
