"""The pictures of a session's messages: each once, by a name that stands in the messages. No torch.

    client's part -- dialect --> {"type": "image", "image": "data:..."}
                  -- SessionPictures.named --> {"type": "image", "image": NAME}

Equal pictures have equal names, so a conversation that comes back is known by its messages alone.
Nothing is fetched, and no file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol

from areal_sc.agents.journal import SessionJournal, WrittenPicture
from areal_sc.errors import NeverWorks, WorkflowError
from areal_sc.sources.pictures import PART, check_pictures, compressed
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.chat_turn import TokenEngine

if TYPE_CHECKING:
    from areal_sc.engines.picture_processor import PictureProcessor

MAX_SESSION_BYTES: Final = 32 << 20
"""Of the pictures of a session: more than its rows may have, and half of its journal."""


class PictureEngine(TokenEngine, Protocol):
    """An engine of a model that may read pictures."""

    @property
    def processor(self) -> PictureProcessor | None:
        """None: it reads none."""


class SessionPictures:
    """See above.

    Args:
        engine: its processor is asked for once there are pictures.
        journal: where each picture is written down when it comes first.
    """

    def __init__(self, engine: PictureEngine, journal: SessionJournal) -> None:
        self._engine = engine
        self._journal = journal
        self._by_name = dict[str, bytes]()

    def restore(self, written: WrittenPicture) -> None:
        """Takes one that an earlier life of the worker has written down."""
        self._by_name[written.name] = written.picture

    def named(self, message: Message) -> Message:
        """The message with names in place of its pictures, which are kept from now on.

        Raises: WorkflowError: a picture is no data URL, or cannot be read. NeverWorks: the model
            reads none.
        """
        if not _pictures_in(message):
            return message
        parts = [
            {**PART, "image": self._name(it["image"])} if _is_picture(it) else it
            for it in message["content"]
        ]
        return {**message, "content": parts}

    def _name(self, url: str) -> str:
        if url in self._by_name:
            return url
        if self._engine.processor is None:
            raise NeverWorks("the messages have pictures (images), and the model reads none")
        if not url.startswith("data:"):
            raise WorkflowError(
                f"the picture {url:.100} is no data URL, and nothing is fetched: expected "
                "data:image/...;base64 with the picture itself"
            )
        picture = compressed(url)
        check_pictures([picture])
        name = blake2b(picture, digest_size=16).hexdigest()
        if name not in self._by_name:
            num_bytes = sum(map(len, self._by_name.values())) + len(picture)
            if num_bytes > MAX_SESSION_BYTES:
                raise WorkflowError(
                    f"the pictures of the episode have {num_bytes} bytes, expected at most "
                    f"{MAX_SESSION_BYTES}"
                )
            self._by_name[name] = picture
            self._journal.add(WrittenPicture(name, picture))
        return name

    def of(self, messages: Sequence[Message]) -> list[bytes]:
        """The pictures of named messages, in their order."""
        return [self._by_name[it["image"]] for message in messages for it in _pictures_in(message)]

    def expanded(self, text: str, messages: Sequence[Message]) -> str:
        """What a template makes of named messages, with the tokens of their pictures in it.

        Raises: WorkflowError: it has other markers than the messages have pictures; or one is
            damaged.
        """
        if not (pictures := self.of(messages)):
            return text
        return self._reading().expand(text, pictures)

    def check_row(self, token_ids: Sequence[int], pictures: Sequence[bytes]) -> None:
        """Raises: WorkflowError: tokens would be taken for those of pictures, or they are too large
        together."""
        if not pictures:
            return
        check_pictures(pictures)
        processor = self._reading()
        num_tokens = list(token_ids).count(processor.token_id)
        num_others = num_tokens - processor.count_places(num_tokens, pictures)
        if num_others:
            raise WorkflowError(
                f"{num_others} tokens of the conversation are as those of its pictures, and are "
                "none: they were sampled, or stand in a text"
            )

    def _reading(self) -> PictureProcessor:
        assert self._engine.processor is not None, "its pictures are refused"
        return self._engine.processor


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == PART["type"] and "image" in part


def _pictures_in(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [it for it in content if _is_picture(it)] if isinstance(content, list) else []
