"""What the decoder of a model that reads pictures is given at their tokens.

The embedding of a picture's token is what the model's vision tower makes of the picture, its
features. Of a tower that is not trained they are made once, without gradients, and kept; one that
is trained makes them anew in each forward, once for all of its rows that share pictures.
Which tokens are a picture's follows from the row: the first ones of its kind. A token of the same
kind that the model itself has sampled comes behind them, and is text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from areal_sc.engines.picture_processor import KeptPictures, PictureProcessor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.engines.training.streamed_layers import text_part
from areal_sc.errors import WorkflowError
from areal_sc.sizing.model_folder import reads_pictures

DEEP_ARGUMENTS: Final = ("visual_pos_masks", "deepstack_visual_embeds")
"""What a decoder takes that adds features of pictures behind its first layers."""


@dataclass(frozen=True)
class Features:
    """What the tower makes of pictures, one after the other.

    Attributes:
        values: [P, H], at the embeddings.
        deep: [P, H] each, added behind the first decoder layers; of most models there are none.
    """

    values: torch.Tensor
    deep: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(it.nbytes for it in (self.values, *self.deep))

    def take(self, places: Any) -> Features:
        return Features(self.values[places], tuple(it[places] for it in self.deep))

    @classmethod
    def joined(cls, each: Sequence[Features]) -> Features:
        deep = zip(*(it.deep for it in each), strict=True)
        return cls(torch.cat([it.values for it in each]), tuple(map(torch.cat, deep)))


@dataclass(frozen=True)
class RowPictures:
    """Where the pictures of a row of L tokens are.

    Attributes:
        pictures: compressed.
        places: [P] int64, the tokens of all of them.
        positions: [3, L] int64, of each token in time, height and width; None: the model has one
            axis.
    """

    pictures: Sequence[bytes]
    places: torch.Tensor
    positions: torch.Tensor | None

    def positions_of(self, start: int, stop: int) -> torch.Tensor | None:
        """[3, stop - start] those of some tokens; of tokens behind the row they go on."""
        if self.positions is None:
            return None
        length = self.positions.shape[1]
        behind = torch.arange(max(0, stop - length)) + self.positions.max() + 1
        whole = torch.cat([self.positions, behind.expand(3, -1)], dim=1)
        return whole[:, start:stop]


class PictureInputs:
    """The pictures of rows, as a model reads them.

    Args:
        causal_lm: with its vision tower.

    Attributes:
        is_trained: features have gradients.
        see_each_other: all tokens of a picture attend to each other, also to later ones.
    """

    def __init__(
        self, causal_lm: Any, processor: PictureProcessor, *, is_trained: bool = False
    ) -> None:
        self._base: Any = causal_lm.model
        self.processor = processor
        self.is_trained = is_trained
        in_text = {id(it) for it in _text_parameters(causal_lm)}
        named = self._base.named_parameters()
        self._tower = [name for name, it in named if id(it) not in in_text]
        self._kept = KeptPictures[Features]()
        self._has_axes = hasattr(self._base, "get_rope_index")
        arguments = inspect.signature(type(self._base).forward).parameters
        self.see_each_other = "token_type_ids" in arguments

    def of_row(self, token_ids: torch.Tensor, pictures: Sequence[bytes]) -> RowPictures:
        """Where the pictures of a row are; one that has no token of any is text.

        Args: token_ids: [L] int64, on the CPU.
        Raises: WorkflowError: see `PictureProcessor.count_places`; or no token is between two.
        """
        processor = self.processor
        found = (token_ids == processor.token_id).nonzero()[:, 0]
        places, positions = found[: processor.count_places(len(found), pictures)], None
        if self._has_axes and len(places):
            kinds = torch.zeros_like(token_ids, dtype=torch.int32)
            kinds[places] = 1
            if int(torch.unique_consecutive(kinds).sum()) != len(pictures):
                raise WorkflowError("two pictures of a row have no token between them")
            grids = [processor.processed(it).pixels["image_grid_thw"] for it in pictures]
            positions = self._base.get_rope_index(
                token_ids[None], mm_token_type_ids=kinds[None], image_grid_thw=torch.cat(grids)
            )[0][:, 0]
        return RowPictures(pictures, places, positions)

    def features(self, pictures: Sequence[bytes], like: torch.Tensor) -> Features:
        """Those of pictures. Args: like: of the type and on the device that they are to have."""
        if self.is_trained:
            return Features.joined([self._compute(it, like) for it in pictures])
        with torch.no_grad():
            return Features.joined(
                [
                    self._kept.get(
                        it, partial(self._compute, it, like), lambda made: made.num_bytes
                    )
                    for it in pictures
                ]
            )

    def zero(self) -> torch.Tensor:
        """[] 0, with gradients of 0 for all of the tower.

        Ranks that have no pictures, and those that have some, so add gradients of the same tensors.
        """
        parts = [self._base.get_parameter(name).flatten()[0] for name in self._tower]
        return 0 * torch.stack(parts).sum()

    def forget(self) -> None:
        """The tower has other weights now."""
        self._kept.clear()

    def _compute(self, picture: bytes, like: torch.Tensor) -> Features:
        pixels = {
            name: values.to(like.device)
            for name, values in self.processor.processed(picture).pixels.items()
        }
        if "pixel_attention_mask" in pixels:  # of a batch of rows with pictures
            pixels = {name: values[None] for name, values in pixels.items()}
        made = self._base.get_image_features(**pixels, return_dict=True)
        deep = getattr(made, "deepstack_features", None) or ()
        return Features(_flat(made.pooler_output, like), tuple(_flat(it, like) for it in deep))

    def arguments(
        self,
        token_ids: torch.Tensor,
        spans: Sequence[PictureSpan],
        embed: Callable[[torch.Tensor], torch.Tensor],
        position_ids: torch.Tensor,
        spread: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, Any]:
        """What a decoder is given in place of tokens, and positions along the text.

        Args:
            token_ids: [T] int64.
            spans: of the rows with pictures, in the order of the tokens.
            embed: gives the embeddings of tokens.
            position_ids: [T] int64, along the text.
            spread: brings values [T, ...] of tokens into the form [R, L, ...] of a forward.
        """
        device, embeddings = token_ids.device, embed(token_ids[None])[0]
        is_picture = torch.zeros(len(token_ids), dtype=torch.bool)
        parts, positions = list[Features](), position_ids
        known = dict[tuple[bytes, ...], Features]()
        if self._has_axes:
            positions = position_ids.expand(3, -1).clone()
        for first, row, start, stop in spans:
            its = (row.places >= start) & (row.places < stop)
            if its.any():
                is_picture[row.places[its] - start + first] = True
                pictures = tuple(row.pictures)
                if pictures not in known:
                    known[pictures] = self.features(pictures, embeddings)
                parts.append(known[pictures].take(its.to(device)))
            own = row.positions_of(start, stop)
            if own is not None:
                positions[:, first : first + stop - start] = own.to(device)
        given: dict[str, Any] = {"position_ids": spread(positions)}
        if self._has_axes:
            given["position_ids"] = spread(positions.movedim(0, -1)).movedim(-1, 0)
        if parts:
            features, is_picture = Features.joined(parts), is_picture.to(device)
            embeddings = embeddings.masked_scatter(is_picture[:, None], features.values)
            if features.deep:
                given |= zip(DEEP_ARGUMENTS, (spread(is_picture), list(features.deep)), strict=True)
            if self.see_each_other:
                given["token_type_ids"] = spread(is_picture.long())
        return {**given, "inputs_embeds": spread(embeddings)}


class PictureRun(NamedTuple):
    """Tokens of a row with pictures in a forward, before these are looked for.

    Attributes:
        first, start, stop: see `PictureSpan`.
        token_ids: [L] int64, of the whole row, on the CPU.
        pictures: of the row, compressed.
    """

    first: int
    token_ids: torch.Tensor
    pictures: tuple[bytes, ...]
    start: int
    stop: int


class PictureSpan(NamedTuple):
    """Tokens of a row with pictures in a forward.

    Attributes:
        first: index of the first of them among all tokens of the forward.
        start, stop: of the tokens, in the row.
    """

    first: int
    row: RowPictures
    start: int
    stop: int


def _flat(values: Any, like: torch.Tensor) -> torch.Tensor:
    """[P, H] of features that a tower gives as one tensor, or as one of each picture."""
    parts = values if isinstance(values, list | tuple) else [values]
    return torch.cat([it.reshape(-1, it.shape[-1]) for it in parts]).to(like)


def pictures_of_folder(
    causal_lm: Any, folder: str | Path, is_trained: bool
) -> PictureInputs | None:
    """Those of a model of this folder; None: it reads none.

    Args: is_trained: with its vision tower.
    Raises: ModelError: see `PictureProcessor`.
    """
    if not reads_pictures(folder):
        return None
    processor = PictureProcessor(Path(folder), load_tokenizer(folder))
    return PictureInputs(causal_lm, processor, is_trained=is_trained)


def freeze_tower(causal_lm: Any) -> None:
    """What makes features of pictures is not trained; all else stays as it is."""
    own = {id(it) for it in _text_parameters(causal_lm)}
    for parameter in causal_lm.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def _text_parameters(causal_lm: Any) -> Iterator[torch.nn.Parameter]:
    """All but those of a vision tower."""
    yield from text_part(causal_lm).parameters()
    if (head := causal_lm.get_output_embeddings()) is not None:
        yield from head.parameters()
