"""The pictures of rows, compressed as they came. No torch.

    what a row of the user's has                      what workers get
    "images": paths, bytes, data URLs, PIL images,    "images": a list of bytes
        columns of the hub
    parts of messages: {"type": "image", "image":     {"type": "image"} at the same places,
        ...}, {"type": "image_url", ...}                  the pictures in "images"

A picture is looked at before it is decoded, so that neither a huge one nor one of a kind that can
hold code or addresses is ever opened. Nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from areal_sc.errors import WorkflowError
from areal_sc.sizing.pictures import MAX_ROW_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES: Final = "images"
"""The key of a row that has its pictures."""

PART: Final[Mapping[str, str]] = {"type": "image"}
"""What stands for a picture in the content of a message."""

MAX_PIXELS: Final = 1 << 25
"""Of a picture: 100 MB once it is decoded."""

CONTENT_TYPES: Final[Mapping[str, str]] = {
    kind: f"image/{kind.lower()}" for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
}
"""By the name of each kind that is read, what a server calls it. None of them holds a program."""

_KINDS: Final = "a path, bytes, a data URL, a PIL image, or a dict with `bytes` or `path`"
_HEAD_BYTES: Final = 4


def with_pictures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as workers get it; one without pictures as it is.

    Raises: WorkflowError: a picture cannot be had or is none, there are too many bytes of them, or
        not as many as parts of messages; names it.
    """
    inner = list[list[bytes]]()
    replaced = {}
    for key, value in row.items():
        if (its := _without_pictures(value, row.get(IMAGES))) is not None:
            replaced[key], pictures = its
            inner.append(pictures)
    if not inner and row.get(IMAGES) is None:
        return dict(row)
    pictures = inner[0] if inner else [compressed(it) for it in _listed(row[IMAGES])]
    if any(its != pictures for its in inner):  # a pair may begin both conversations with its prompt
        raise WorkflowError("two conversations of the row have different pictures")
    check_pictures(pictures)
    found = {**row, **replaced}
    if pictures:
        found[IMAGES] = pictures
    else:
        found.pop(IMAGES, None)
    return found


def check_pictures(pictures: Sequence[bytes]) -> None:
    """Looks at the pictures of a row. Raises: WorkflowError: one cannot be read, or is too large;
    or they are, together."""
    for number, picture in enumerate(pictures):
        try:
            looked_at(picture)
        except WorkflowError as error:
            raise WorkflowError(f"picture {number} of the row: {error}") from None
    if (size := packed(pictures).nbytes) > MAX_ROW_BYTES:
        raise WorkflowError(
            f"the pictures of the row have {size} bytes, expected at most {MAX_ROW_BYTES}: make "
            "them smaller"
        )


def _without_pictures(messages: Any, given: Any) -> tuple[list[Any], list[bytes]] | None:
    """Messages with `PART` in place of each picture, and the pictures; None: there are none.

    Args: given: pictures of the row, for parts that have none of their own.
    """
    if not isinstance(messages, list) or not any(map(_image_parts, messages)):
        return None
    others = [] if given is None else list(_listed(given))
    num_others, pictures, replaced = len(others), list[bytes](), []
    for message in messages:
        if not _image_parts(message):
            replaced.append(message)
            continue
        content = []
        for part in message["content"]:
            if not _is_image(part):
                content.append(part)
                continue
            picture = _picture_in(part)
            if picture is None and not others:
                raise WorkflowError(
                    f"messages have more parts for pictures than {IMAGES!r} has, {num_others}"
                )
            pictures.append(compressed(others.pop(0) if picture is None else picture))
            content.append(dict(PART))
        replaced.append({**message, "content": content})
    if others:
        raise WorkflowError(
            f"{IMAGES!r} has {num_others} pictures, and messages have parts for "
            f"{num_others - len(others)} of them"
        )
    return replaced, pictures


def _image_parts(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(map(_is_image, content))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _picture_in(part: Mapping[str, Any]) -> Any:
    """What a part says of its picture; None: nothing."""
    named = (part.get(key) for key in ("image", "image_url", "url", "path", "bytes"))
    found = next((it for it in named if it is not None), None)
    return found["url"] if isinstance(found, Mapping) and "url" in found else found


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def compressed(given: Any) -> bytes:
    """The bytes of a picture that is given in one of the forms; a PIL image becomes a PNG.

    Raises: WorkflowError: it is none, or cannot be read.
    """
    if isinstance(given, Mapping):
        named = (given.get(key) for key in ("bytes", "path"))
        given = next((it for it in named if it is not None), given)
    if isinstance(given, bytes):
        return given
    if isinstance(given, str):
        kind, _, encoded = given.partition(",")
        if kind.startswith("data:"):
            return _of_data_url(kind, encoded)
        if "://" in given and not given.startswith("file://"):
            raise WorkflowError(
                f"the picture {given:.100} is an address, and nothing is fetched: download it, "
                "and give its path"
            )
        given = Path(given.removeprefix("file://"))
    if isinstance(given, Path):
        return _read(given.expanduser())
    if hasattr(given, "getbands") and hasattr(given, "save"):
        content = io.BytesIO()
        given.save(content, format="PNG")
        return content.getvalue()
    raise WorkflowError(f"a picture is a {type(given).__name__}: expected {_KINDS}")


def _of_data_url(kind: str, encoded: str) -> bytes:
    if not (kind.startswith("data:image/") and kind.endswith(";base64")):
        raise WorkflowError(f"a picture is {kind!r:.60}: expected data:image/...;base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WorkflowError(f"the data URL of a picture is damaged: {error}") from None


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise WorkflowError(f"the picture {path}: there is no such file")
        if (size := path.stat().st_size) > MAX_ROW_BYTES:
            raise WorkflowError(
                f"the picture {path} has {size} bytes, expected at most {MAX_ROW_BYTES}"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise WorkflowError(f"the picture {path} cannot be read: {error}") from error


def looked_at(picture: bytes) -> Image:
    """The picture, not decoded yet.

    Raises: WorkflowError: it is of no known kind, or has too many pixels.
    """
    from PIL import Image as images

    try:
        image = images.open(io.BytesIO(picture), formats=[*CONTENT_TYPES])
    except (images.DecompressionBombError, images.DecompressionBombWarning) as error:
        raise WorkflowError(f"it has too many pixels: {error}") from None
    except (OSError, ValueError, SyntaxError) as error:
        is_svg = b"<svg" in picture[:1000]
        what = "it is an SVG, a program" if is_svg else "it is of no known kind, or damaged"
        raise WorkflowError(f"{what}; expected one of {', '.join(CONTENT_TYPES)}") from error
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise WorkflowError(
            f"it has {width} x {height} pixels, expected at most {MAX_PIXELS}: make it smaller"
        )
    return image


def data_url(picture: bytes) -> str:
    """The picture as clients of chat models send it. Raises: WorkflowError: it is none."""
    kind = CONTENT_TYPES[str(looked_at(picture).format)]
    return f"data:{kind};base64,{base64.b64encode(picture).decode()}"


def decoded(picture: bytes) -> Image:
    """The picture in RGB, turned as its camera says; as transformers loads one.

    Raises: WorkflowError: it is damaged.
    """
    from PIL import ImageOps

    image = looked_at(picture)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise WorkflowError(f"a picture of {len(picture)} bytes is damaged: {error}") from error


def packed(pictures: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    """[n] of several pictures, for the field `PICTURES`: before each stands its size, in 4 bytes.

    Without pictures n is 0.
    """
    framed = (len(it).to_bytes(_HEAD_BYTES, "little") + it for it in pictures)
    return np.frombuffer(b"".join(framed), dtype=np.uint8)


def unpacked(values: bytes) -> tuple[bytes, ...]:
    """Inverse of `packed`. Raises: ValueError: it is not what that has made."""
    found, place = list[bytes](), 0
    while place < len(values):
        start = place + _HEAD_BYTES
        place = start + int.from_bytes(values[place:start], "little")
        found.append(values[start:place])
    if place != len(values):
        raise ValueError(f"pictures of {place} bytes were cut to {len(values)}")
    return tuple(found)
