"""What a model's own image processor makes of pictures: pixels, and tokens that stand for them.

    text with a marker for each picture ──expand──► text with the tokens of each ──► tokens
    a picture, compressed ──processed──► pixels, as the model's `get_image_features` takes them

A picture is processed by itself, so it gives the same wherever it stands, in the worker that
samples and on the ranks that train. The part of transformers' processors that is about text is done
here: two of them cannot be loaded without packages for videos.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase

from areal_sc.errors import ModelError, WorkflowError
from areal_sc.sizing.model_folder import reads_pictures
from areal_sc.sizing.pictures import KEPT_BYTES
from areal_sc.sources.pictures import decoded

T = TypeVar("T")

PLAIN_MARKER: Final = "<image>"
"""Stands for a picture in plain text, whatever the model's own marker is."""


_TEXTS_AS_PARTS: Final = (
    "{% set read = namespace(messages=[]) %}{% for message in messages %}"
    "{% if message.content is string %}"
    "{% set message = dict(message, content=[{'type': 'text', 'text': message.content}]) %}"
    "{% endif %}{% set read.messages = read.messages + [message] %}"
    "{% endfor %}{% set messages = read.messages %}"
)
"""Stands before a template that loses messages whose content is a text, as those of Idefics3 do."""


class KeptPictures(Generic[T]):
    """What was made of the pictures that came last, up to `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._kept = OrderedDict[bytes, tuple[T, int]]()
        self._num_bytes = 0
        self._lock = threading.Lock()  # a worker's event loop and its generation share one

    def get(self, picture: bytes, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Args: make, size: are called where it is not kept."""
        key = blake2b(picture, digest_size=16).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            made = make()
            self._kept[key] = made, size(made)
            self._num_bytes += size(made)
            while self._num_bytes > KEPT_BYTES and len(self._kept) > 1:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_bytes -= dropped
            return made

    def clear(self) -> None:
        self._kept.clear()
        self._num_bytes = 0


@dataclass(frozen=True)
class ProcessedPicture:
    """A picture as its model reads it.

    Attributes:
        text: what stands for it in a prompt.
        num_tokens: places in that text whose embeddings are those of the picture.
        pixels: by name, what `get_image_features` takes; several pictures are joined along the
            first dimension.
    """

    text: str
    num_tokens: int
    pixels: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(it.nbytes for it in self.pixels.values())


class PictureProcessor:
    """The image processor of a model folder.

    Args:
        tokenizer: of the same folder; its chat template also reads messages of text from now on.

    Attributes:
        token_id: of the token at each place of a picture.
        marker: stands for a picture in a prompt, as the model's chat template writes it.
        model_type: of the model's config.
    Raises: ModelError: the folder has none that can be used.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            load: Any = AutoImageProcessor.from_pretrained
            self._images = load(folder, local_files_only=True, backend="pil")
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"model folder {folder}: no usable image processor: {error}"
            ) from error
        if not tokenizer.chat_template and (folder / "chat_template.json").is_file():
            content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
            tokenizer.chat_template = content["chat_template"]
        if isinstance(tokenizer.chat_template, str) and not _reads_texts(tokenizer):
            tokenizer.chat_template = _TEXTS_AS_PARTS + tokenizer.chat_template
        self._config = config
        self.model_type = str(config.model_type)
        self._kept = KeptPictures[ProcessedPicture]()
        self.token_id: int = config.image_token_id
        self._token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self.marker = self._plain = self._token

        def named(*ids: int) -> list[str]:
            return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]

        make: Callable[[Any], tuple[str, dict[str, Any]]] = self._idefics
        if config.model_type == "gemma3":
            self.marker, self._end = named(config.boi_token_index, config.eoi_token_index)
            self._plain, make = self.marker, self._gemma
            if self._images.do_pan_and_scan:
                raise ModelError(
                    f"model folder {folder}: do_pan_and_scan: expected false, got true"
                )
        elif config.model_type in ("qwen2_5_vl", "qwen3_vl"):
            begin, end = named(config.vision_start_token_id, config.vision_end_token_id)
            self._plain, make = f"{begin}{self.marker}{end}", self._qwen
        self._make = make

    def processed(self, picture: bytes) -> ProcessedPicture:
        """Raises: WorkflowError: the picture is damaged, or of a shape that the model refuses."""
        return self._kept.get(picture, partial(self._process, picture), lambda made: made.num_bytes)

    def resized(self, picture: bytes) -> Any:
        """The picture, decoded; of Qwen's families in the size that the model sees.

        Processed again, also by another program, it is not resized once more.
        """
        image = decoded(picture)
        grid = self.processed(picture).pixels.get("image_grid_thw")
        if grid is None:
            return image
        height, width = (int(size) * self._images.patch_size for size in grid[0, 1:])
        return image.resize((width, height), resample=self._images.resample)

    def count_places(self, num_tokens: int, pictures: Sequence[bytes]) -> int:
        """How many of the tokens of this kind that a row has are those of its pictures.

        Raises: WorkflowError: there are too few.
        """
        needed = sum(self.processed(it).num_tokens for it in pictures)
        if num_tokens and num_tokens < needed:
            raise WorkflowError(
                f"a row has {num_tokens} tokens of pictures, and its {len(pictures)} pictures "
                f"need {needed}: make the tokens of its prompt by engine.encode_pictures"
            )
        return min(num_tokens, needed)

    def expand(self, text: str, pictures: Sequence[bytes]) -> str:
        """The text with what stands for each picture in place of its marker.

        Raises: WorkflowError: it has another number of markers; or see `processed`.
        """
        if self.marker not in text:
            text = text.replace(PLAIN_MARKER, self._plain)
        parts = text.split(self.marker)
        if len(parts) != len(pictures) + 1:
            raise WorkflowError(
                f"the prompt has {len(parts) - 1} markers of pictures ({self.marker}), and there "
                f"are {len(pictures)} pictures"
            )
        texts = [self.processed(it).text for it in pictures]
        return parts[0] + "".join(a + b for a, b in zip(texts, parts[1:], strict=True))

    def _process(self, picture: bytes) -> ProcessedPicture:
        image = decoded(picture)
        try:
            text, pixels = self._make(image)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise WorkflowError(
                f"the model's image processor refuses a picture of {image.size[0]} x "
                f"{image.size[1]} pixels: {error}"
            ) from error
        return ProcessedPicture(text, text.count(self._token), pixels)

    def _qwen(self, image: Any) -> tuple[str, dict[str, Any]]:
        made = self._images(images=[image], return_tensors="pt")
        num_tokens = int(made["image_grid_thw"].prod()) // self._images.merge_size**2
        return self._token * num_tokens, dict(made)

    def _gemma(self, image: Any) -> tuple[str, dict[str, Any]]:
        made = self._images(images=[image], return_tensors="pt")
        tokens = self._token * self._config.mm_tokens_per_image
        text = f"\n\n{self.marker}{tokens}{self._end}\n\n"
        return text, {"pixel_values": made["pixel_values"]}

    def _idefics(self, image: Any) -> tuple[str, dict[str, Any]]:
        """A picture and, where it is split, its parts row by row before it."""
        made = self._images(images=[[image]], return_row_col_info=True, return_tensors="pt")
        vision = self._config.vision_config
        side = vision.image_size // vision.patch_size
        tokens = self._token * int(side**2 / self._config.scale_factor**2)
        fake = "<fake_token_around_image>"
        rows, columns = (int(made[name][0][0]) for name in ("rows", "cols"))
        text = "".join(
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns))
            + "\n"
            for row in range(rows)
        )
        text += "\n" if rows else ""
        pixels = {
            name: made[name][0] for name in ("pixel_values", "pixel_attention_mask")
        }  # of the parts
        return f"{text}{fake}<global-img>{tokens}{fake}", pixels


def _reads_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes a message whose content is a text."""
    try:
        message = {"role": "user", "content": "zq0qz"}
        text: Any = tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # the model's own code, which jinja runs
        return False
    return "zq0qz" in text


def picture_processor(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase
) -> PictureProcessor | None:
    """That of a folder; None: its model reads no pictures.

    Raises: ModelError: see `PictureProcessor`.
    """
    folder = Path(folder).expanduser()
    return PictureProcessor(folder, tokenizer) if reads_pictures(folder) else None
