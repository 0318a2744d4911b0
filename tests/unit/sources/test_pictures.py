"""Pictures of rows: in which forms they are given, and what is refused before it is opened."""

from __future__ import annotations

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import picture
from PIL import Image

from areal_sc.errors import WorkflowError
from areal_sc.sizing.pictures import MAX_ROW_BYTES
from areal_sc.sources.pictures import decoded, packed, unpacked, with_pictures
from areal_sc.sources.prompts import write_prompts

PNG, JPEG = picture(0), picture(1, 24, 48, "JPEG")
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
WHITE = Image.new("RGB", (8, 4), "white")


def in_parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


@pytest.mark.parametrize(
    "given",
    [
        PNG,
        [PNG],
        "shown.png",
        Path("shown.png"),
        "file://shown.png",
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "shown.png"},
        DATA_URL,
    ],
)
def test_a_picture_in_each_of_its_forms(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shown.png").write_bytes(PNG)
    expected = {"prompt": "see", "images": [PNG]}
    assert with_pictures({"prompt": "see", "images": given}) == expected
    assert with_pictures(expected) == expected
    part = {"type": "image", "image": given[0] if isinstance(given, list) else given}
    row = with_pictures({"messages": in_parts(part)})
    assert row == {"messages": in_parts({"type": "image"}), "images": [PNG]}
    assert with_pictures(row) == row


def test_pictures_of_parts_come_in_their_order() -> None:
    url = {"type": "image_url", "image_url": {"url": DATA_URL}}
    parts = ({"type": "image"}, url, {"type": "image", "image": WHITE})
    row = with_pictures({"prompt": in_parts(*parts), "images": [JPEG]})
    assert row["prompt"] == in_parts(*[{"type": "image"}] * 3)
    first, second, third = row["images"]
    assert (first, second) == (JPEG, PNG)
    assert np.array_equal(np.asarray(decoded(third)), np.asarray(WHITE))
    both = {"chosen": in_parts(url), "rejected": in_parts(url)}  # a pair that begins alike
    assert with_pictures(both)["images"] == [PNG]
    plain = {"prompt": "no pictures", "images": [], "tokens": [1, 2], "none": None}
    assert with_pictures(plain) == {name: it for name, it in plain.items() if name != "images"}


def test_a_copied_row_comes_back_with_its_pictures(tmp_path: Path) -> None:
    copied = write_prompts([{"prompt": "see", "images": [WHITE, JPEG]}], tmp_path)
    first, second = copied[0]["images"]
    assert decoded(first).size == (8, 4)
    assert second == JPEG


def test_pictures_in_one_field() -> None:
    for pictures in ((), (PNG,), (PNG, b"", JPEG)):
        values = packed(pictures)
        assert values.dtype == np.uint8
        assert unpacked(values.tobytes()) == pictures
    with pytest.raises(ValueError, match="were cut"):
        unpacked(packed([PNG]).tobytes()[:-1])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it is large."""
    content = io.BytesIO()
    Image.new("1", (1, 1)).save(content, "PNG")
    png = content.getvalue()
    head = png[12:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + png[24:29]
    return png[:12] + head + zlib.crc32(head).to_bytes(4, "big") + png[33:]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nowhere.png", "there is no such file"),
        ("http://10.0.0.1/a.png", "is an address, and nothing is fetched"),
        ("https://localhost/a.png", "is an address, and nothing is fetched"),
        ("data:text/html;base64,AAAA", "expected data:image/"),
        ("data:image/png;base64,A$", "the data URL of a picture is damaged"),
        (b"\0" * (MAX_ROW_BYTES + 1), "expected one of JPEG, PNG"),
        (PNG + b"\0" * MAX_ROW_BYTES, "expected at most 4194304: make them smaller"),
        (bomb(9000, 9000), "9000 x 9000 pixels, expected at most 33554432"),
        (bomb(200_000, 200_000), "it has too many pixels"),
        (SVG, "an SVG, a program"),
        (b"GIF", "expected one of JPEG, PNG"),
        (7, "a picture is a int: expected a path"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(WorkflowError, match=why):
        with_pictures({"prompt": "see", "images": [given]})
    with pytest.raises(WorkflowError, match=why):
        with_pictures({"messages": in_parts({"type": "image", "image": given})})


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WorkflowError, match="has 1099511627776 bytes, expected at most"):
        with_pictures({"images": str(tmp_path / "large.png")})


def test_a_torn_picture_is_found_when_it_is_decoded() -> None:
    torn = with_pictures({"images": JPEG[: len(JPEG) // 2]})["images"][0]
    with pytest.raises(WorkflowError, match=r"is damaged: .*truncated"):
        decoded(torn)


def test_as_many_pictures_as_parts() -> None:
    part = {"type": "image"}
    with pytest.raises(WorkflowError, match=r"more parts for pictures than 'images' has, 1"):
        with_pictures({"messages": in_parts(part, part), "images": [PNG]})
    with pytest.raises(WorkflowError, match=r"has 2 pictures, and messages have parts for 1"):
        with_pictures({"messages": in_parts(part), "images": [PNG, JPEG]})
    shown = [in_parts({"type": "image", "image": it}) for it in (PNG, JPEG)]
    with pytest.raises(WorkflowError, match="two conversations of the row have different"):
        with_pictures({"chosen": shown[0], "rejected": shown[1]})
