"""Pictures for servers: one marker in the prompt, and the picture beside it.

A server has an image processor of its own. It puts the tokens of a picture in place of its marker,
and tells the tokens that it has read then, which have to be the trainer's.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_sc.engines.picture_processor import KeptPictures, PictureProcessor
from areal_sc.errors import NeverWorks, WorkflowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SentPictures(NamedTuple):
    """The pictures of a request, as a server takes them.

    Attributes:
        prompt: tokens, with a marker for each picture.
        marker: the token of one.
        urls: data URLs, in the order of the markers.
    """

    prompt: list[int]
    marker: int
    urls: list[str]

    def behind(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt and what was sampled behind it.

        Raises: WorkflowError: another token would be taken for a picture.
        """
        sent = [*self.prompt, *token_ids]
        if num_others := sent.count(self.marker) - len(self.urls):
            raise WorkflowError(
                f"{num_others} tokens behind the pictures of a prompt are as those of pictures, "
                "which a server would take them for: rollout.engine=local does not"
            )
        return sent


class PictureSender:
    """Makes what servers are sent of pictures; of those that came last, once."""

    def __init__(self, processor: PictureProcessor, tokenizer: PreTrainedTokenizerBase) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._urls = KeptPictures[str]()

    def sent(self, prompt: Sequence[int], pictures: Sequence[bytes]) -> SentPictures:
        """Args: prompt: tokens, with those of the pictures.

        Raises: WorkflowError: it has not the tokens of these pictures, or others like them; or a
            picture is damaged.
        """
        marker, found, place = self._processor.token_id, list[int](), 0
        for number, picture in enumerate(pictures):
            text = self._processor.processed(picture).text
            own: Any = self._tokenizer.encode(text, add_special_tokens=False)
            starts = range(place, len(prompt) - len(own) + 1)
            begins = (n for n in starts if prompt[n] == own[0])
            start = next((n for n in begins if list(prompt[n : n + len(own)]) == own), None)
            if start is None:
                raise WorkflowError(
                    f"a prompt has not the {len(own)} tokens of its picture {number}: make them by "
                    "engine.encode_pictures"
                )
            found += [*prompt[place:start], marker]
            place = start + len(own)
        urls = [self._urls.get(it, partial(self._data_url, it), len) for it in pictures]
        return SentPictures([*found, *prompt[place:]], marker, urls)

    def _data_url(self, picture: bytes) -> str:
        """A PNG of the pixels that the trainer sees: programs decode JPEG, turn and resize
        pictures, and drop transparency, each in its own way."""
        content = io.BytesIO()
        self._processor.resized(picture).save(content, format="PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def check_read(told: Any, expected: Sequence[int]) -> None:
    """Compares the prompt that a server has read with the trainer's.

    Raises: NeverWorks: it is another one, or is not told.
    """
    if told != expected:
        read = f"has read {len(told)} others" if isinstance(told, list) else "does not tell its own"
        raise NeverWorks(
            f"the trainer's tokens of a prompt with pictures are {len(expected)}, and the server "
            f"{read}: expected the image processor of the model's folder, and a newer server; or "
            "set rollout.engine=local"
        )
