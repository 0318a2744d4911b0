"""Which values of which Hugging Face tensor a Megatron-core parameter holds, on every rank.

    q_proj, k_proj, v_proj   one parameter, linear_qkv: of each key-value head its queries, itself,
                             its values, and then the next head's; of each rank its share of the
                             rows, which is less than one head's where there are more ranks than
                             key-value heads
    gate_proj, up_proj       one parameter, linear_fc1: one after the other, of each rank its part
    experts' gate_up_proj    one parameter an expert
    embed_tokens, lm_head    padded with rows that nothing reads, to come out even on the ranks;
                             tied ones are there twice in a pipeline: first and last stage

Nothing here knows Megatron-core: it is names, boxes and shapes. Ranks are numbered as Megatron-core
does by default: tensor ranks follow each other, then shares of rows, then stages; experts are
spread over the ranks of one stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.engines.megatron.family import LayerKind, ModelSizes
from areal_sc.engines.training.parts import Box, Parts
from areal_sc.errors import ModelError


class MeshPlace(NamedTuple):
    """Where a rank stands in each dimension of the mesh."""

    tensor: int
    data: int
    stage: int
    expert: int

    @classmethod
    def of(cls, rank: int, parallel: ParallelConfig) -> MeshPlace:
        stage, in_stage = divmod(rank, parallel.data * parallel.tensor)
        data, tensor = divmod(in_stage, parallel.tensor)
        return cls(tensor, data, stage, in_stage % parallel.expert)


class Slot(NamedTuple):
    """A parameter of a rank: which of its stages of a pipeline, and the name within."""

    chunk: int
    parameter: str


@dataclass(frozen=True)
class Piece:
    """A box of a Hugging Face tensor, and the rows of a parameter that hold it.

    The parameter's rows are `num_groups` runs of the same length; rows `start` to `stop` of each
    run, one run after the other, are the values of the box.
    """

    name: str
    box: Box
    slot: Slot
    start: int
    stop: int
    num_groups: int = 1

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """[num_groups, stop - start, ...] of a tensor with the parameter's shape."""
        grouped = parameter.view(self.num_groups, -1, *parameter.shape[1:])
        return grouped[:, self.start : self.stop]

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values of the box, with its shape; a copy where they are no run."""
        return self.view(parameter).reshape(self.box.sizes)

    def write(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Sets the values of the box."""
        view = self.view(parameter)
        view.copy_(values.reshape(view.shape))


class MegatronParts(Parts):
    """The parts of all parameters, on all ranks.

    Args:
        shapes: of the whole Hugging Face parameters; tied ones once.
        has_fused_norms: norms before linear layers are parameters of these layers, as
            TransformerEngine's are.
    Raises: ModelError: the model has other parameters than its family.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        sizes: ModelSizes,
        parallel: ParallelConfig,
        rank: int,
        *,
        has_fused_norms: bool,
    ) -> None:
        super().__init__(shapes, rank, parallel.num_ranks)
        places = [MeshPlace.of(other, parallel) for other in range(self.num_ranks)]
        try:
            found = {
                place: _pieces(shapes, sizes, parallel, place, has_fused_norms)
                for place in set(places)
            }
        except KeyError as error:
            raise _refusal(str(error.args[0])) from error
        known = {piece.name for pieces in found.values() for piece in pieces}
        if unknown := sorted(shapes.keys() - known):
            raise _refusal(unknown[0])
        self.pieces = found[places[rank]]
        hulls = {place: _hulls(pieces) for place, pieces in found.items()}
        self._boxes = [hulls[place] for place in places]
        self._givers = {name: self._choose_givers(name) for name in shapes}

    def box(self, name: str, rank: int | None = None) -> Box:
        boxes = self._boxes[self.rank if rank is None else rank]
        return boxes.get(name) or Box.empty(len(self.shapes[name]))

    def given_by(self, name: str, rank: int) -> Box | None:
        return self.box(name, rank) if rank in self._givers[name] else None

    def _choose_givers(self, name: str) -> set[int]:
        """One rank for each box, so that the work is spread over those that have it."""
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(self._boxes):
            if name in boxes:
                holders.setdefault(boxes[name], []).append(rank)
        number = zlib.crc32(name.encode())
        return {ranks[number % len(ranks)] for ranks in holders.values()}


def _refusal(name: str) -> ModelError:
    return ModelError(
        "the parameters of the model are not those of its family "
        f"(actor.engine=megatron), e.g. {name}; set actor.engine=fsdp"
    )


def padded_vocabulary(sizes: ModelSizes, parallel: ParallelConfig) -> int:
    """Rows of embeddings and output layer, of all tensor ranks together."""
    return -(-sizes.vocabulary // parallel.tensor) * parallel.tensor


def own_vocabulary(sizes: ModelSizes, parallel: ParallelConfig, tensor_rank: int) -> range:
    """The tokens whose rows a tensor rank has, without padding; at least one: `check_mesh`."""
    share = padded_vocabulary(sizes, parallel) // parallel.tensor
    first = tensor_rank * share
    return range(first, min(sizes.vocabulary, first + share))


def _hulls(pieces: list[Piece]) -> dict[str, Box]:
    """What a rank has of each tensor: its pieces of one follow each other along the rows."""
    boxes: dict[str, Box] = {}
    for piece in pieces:
        box = boxes.get(piece.name)
        if box is None:
            boxes[piece.name] = piece.box
        else:
            sizes = (piece.box.stops[0] - box.starts[0], *box.sizes[1:])
            boxes[piece.name] = Box(box.starts, sizes)
    return boxes


def _pieces(
    shapes: Mapping[str, torch.Size],
    sizes: ModelSizes,
    parallel: ParallelConfig,
    place: MeshPlace,
    has_fused_norms: bool,
) -> list[Piece]:
    """The pieces of one rank, in the order of the model."""
    last = (parallel.pipeline - 1, parallel.virtual_pipeline - 1)
    vocabulary = own_vocabulary(sizes, parallel, place.tensor)

    def of_vocabulary(name: str, slot: Slot) -> Piece:
        box = Box.whole(shapes[name]).narrowed(0, vocabulary.start, len(vocabulary))
        return Piece(name, box, slot, 0, len(vocabulary))

    found: list[Piece] = []
    embeddings = "model.embed_tokens.weight"
    if place.stage == 0:
        found.append(of_vocabulary(embeddings, Slot(0, "embedding.word_embeddings.weight")))
    num_stages = parallel.pipeline * parallel.virtual_pipeline
    num_layers = sizes.num_layers // num_stages  # of each stage
    for chunk in range(parallel.virtual_pipeline):
        first = (chunk * parallel.pipeline + place.stage) * num_layers
        for index in range(num_layers):
            kind = sizes.layers[first + index]
            layer = _Layer(shapes, sizes, parallel, place, has_fused_norms, kind, chunk, index)
            found += layer.pieces(f"model.layers.{first + index}.")
    if place.stage == last[0]:
        norm = "model.norm.weight"
        slot = Slot(last[1], "decoder.final_layernorm.weight")
        found.append(Piece(norm, Box.whole(shapes[norm]), slot, 0, shapes[norm][0]))
        slot = Slot(last[1], "output_layer.weight")
        if not sizes.is_tied:
            found.append(of_vocabulary("lm_head.weight", slot))
        elif num_stages > 1:
            found.append(of_vocabulary(embeddings, slot))
    return found


@dataclass(frozen=True)
class _Layer:
    """The pieces of one layer, on one rank."""

    shapes: Mapping[str, torch.Size]
    sizes: ModelSizes
    parallel: ParallelConfig
    place: MeshPlace
    has_fused_norms: bool
    kind: LayerKind
    chunk: int
    index: int

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """All of the layer, in the order of the model.

        Args:
            prefix: of its names in the Hugging Face model.
        """
        fused, has_experts = self.has_fused_norms, self.kind.has_experts
        attention_norm = "self_attention.linear_qkv.layer_norm_weight"
        mlp_norm = "mlp.linear_fc1.layer_norm_weight"
        yield self._whole(
            prefix + "input_layernorm.weight",
            attention_norm if fused else "input_layernorm.weight",
        )
        yield from self._attention(prefix + "self_attn.")
        yield self._whole(
            prefix + "post_attention_layernorm.weight",
            mlp_norm if fused and not has_experts else "pre_mlp_layernorm.weight",
        )
        if has_experts:
            yield self._whole(prefix + "mlp.gate.weight", "mlp.router.weight")
            yield from self._experts(prefix + "mlp.experts.")
        else:
            yield from self._feed_forward(prefix + "mlp.")

    def _attention(self, prefix: str) -> Iterator[Piece]:
        sizes = self.sizes
        queries = sizes.heads // sizes.kv_heads * sizes.head_dim  # rows of a key-value head
        bounds = {"q": (0, queries)}
        bounds |= {"k": (queries, queries + sizes.head_dim)}
        bounds |= {"v": (queries + sizes.head_dim, queries + 2 * sizes.head_dim)}
        kinds = ("weight", "bias") if sizes.family.has_qkv_bias else ("weight",)
        for kind in kinds:
            for letter, (start, stop) in bounds.items():
                name = f"{prefix}{letter}_proj.{kind}"
                yield from self._of_heads(name, f"self_attention.linear_qkv.{kind}", start, stop)
        name = prefix + "o_proj.weight"
        slot = self._slot("self_attention.linear_proj.weight")
        yield Piece(name, self._cut(name, 1), slot, 0, sizes.hidden)
        if sizes.family.normalizes_heads:
            for letter in ("q", "k"):
                yield self._whole(
                    f"{prefix}{letter}_norm.weight", f"self_attention.{letter}_layernorm.weight"
                )

    def _of_heads(self, name: str, parameter: str, start: int, stop: int) -> Iterator[Piece]:
        """What this rank has of queries, keys or values: rows `start` to `stop` of each head's."""
        sizes, count, slot = self.sizes, self.parallel.tensor, self._slot(parameter)
        if count <= sizes.kv_heads:
            yield Piece(name, self._cut(name, 0), slot, start, stop, sizes.kv_heads // count)
            return
        share = sizes.rows_of_heads // count
        head, number = divmod(self.place.tensor, count // sizes.kv_heads)
        first, last = max(start, number * share), min(stop, (number + 1) * share)
        if first < last:
            begin = head * (stop - start) + first - start
            box = Box.whole(self.shapes[name]).narrowed(0, begin, last - first)
            yield Piece(name, box, slot, first - number * share, last - number * share)

    def _feed_forward(self, prefix: str) -> Iterator[Piece]:
        own = self.sizes.feed_forward // self.parallel.tensor
        for number, part in enumerate(("gate", "up")):
            name, slot = f"{prefix}{part}_proj.weight", self._slot("mlp.linear_fc1.weight")
            yield Piece(name, self._cut(name, 0), slot, number * own, (number + 1) * own)
        name, slot = prefix + "down_proj.weight", self._slot("mlp.linear_fc2.weight")
        yield Piece(name, self._cut(name, 1), slot, 0, self.sizes.hidden)

    def _experts(self, prefix: str) -> Iterator[Piece]:
        count = self.sizes.num_experts // self.parallel.expert
        for part, layer in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            whole = Box.whole(self.shapes[prefix + part])
            for number in range(count):
                box = whole.narrowed(0, self.place.expert * count + number, 1)
                slot = self._slot(f"mlp.experts.local_experts.{number}.{layer}.weight")
                yield Piece(prefix + part, box, slot, 0, whole.sizes[1])

    def _whole(self, name: str, parameter: str) -> Piece:
        shape = self.shapes[name]
        return Piece(name, Box.whole(shape), self._slot(parameter), 0, shape[0])

    def _cut(self, name: str, dim: int) -> Box:
        """This tensor rank's range along a dimension."""
        whole = Box.whole(self.shapes[name])
        share = whole.sizes[dim] // self.parallel.tensor
        return whole.narrowed(dim, self.place.tensor * share, share)

    def _slot(self, parameter: str) -> Slot:
        return Slot(self.chunk, f"decoder.layers.{self.index}.{parameter}")
