"""One version of the weights, in a form that paused servers can be given, once or again later.

Each way answers for every server by itself: one that refuses or fails is an error in its place,
and the others go on.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_sc.config.model_folder import check_model_folder, read_model_config
from areal_sc.engines.servers.sglang.abilities import ServerAbilities
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.shared_buckets import FilledBuckets, SharedBuckets
from areal_sc.engines.weight_group import NamedTensor, split_into_buckets
from areal_sc.errors import ArealError, ConfigError, EngineFailed, ModelError

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource

S = TypeVar("S")

_SHAPE_SETTINGS = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class PausedServer:
    """A server that generates nothing at the moment, and is to get weights.

    Attributes:
        is_own: this process has started it, so it runs on this machine and with its rights.
        groups: names of the weight groups that it is in.
    """

    client: SGLangClient
    abilities: ServerAbilities
    is_own: bool
    groups: frozenset[str]


@dataclass
class LoadReport:
    """What became of one load.

    Attributes:
        errors: one for each server, None where it has the weights.
        num_bytes: that were written for the servers; 0 when they read for themselves.
        broken_group: a weight group that cannot be used any more.
    """

    errors: list[ArealError | None]
    num_bytes: int = 0
    broken_group: str | None = None


class LoadableWeights(Protocol):
    """Weights that are at hand, so that a server stands still for their loading alone."""

    def prepared(self) -> AbstractAsyncContextManager[None]:
        """Around one `load`: does beforehand what can be done while servers still generate."""
        ...

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """Gives the servers these weights. `timeout_s` bounds each step."""
        ...


class Weights(Protocol):
    """Weights of one policy version."""

    @property
    def version(self) -> int: ...

    @property
    def again(self) -> Weights:
        """What a server that starts later is given to have the same weights."""
        ...

    def opened(self) -> AbstractAsyncContextManager[LoadableWeights]:
        """Gets them from where they are; raises what that raises."""
        ...


@dataclass(frozen=True)
class DiskWeights:
    """A Hugging Face folder on a path that the servers see.

    It has to stay until the version after it has been published: a server that restarts reads it.
    """

    version: int
    folder: str

    @property
    def again(self) -> Weights:
        return self

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        yield self

    def prepared(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        async def load_one(server: PausedServer) -> None:
            await server.client.load_from_disk(self.folder, timeout_s=timeout_s)

        return LoadReport(await for_each(servers, load_one))


@dataclass(frozen=True)
class WrittenWeights:
    """Tensors that are written to a folder when they are asked for, for servers that see it.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name.
        folder: is made, and removed after the load.
        model_folder: whose config the written folder gets.
    """

    version: int
    source: TensorSource
    folder: Path
    model_folder: Path

    @property
    def again(self) -> Weights:
        return self

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        tensors = await self.source()
        try:
            await asyncio.to_thread(self._write, tensors)
            yield DiskWeights(self.version, str(self.folder))
        finally:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def _write(self, tensors: Iterable[NamedTensor]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.model_folder / "config.json", self.folder / "config.json")
            whole = {name: tensor.detach().contiguous() for name, tensor in tensors}
            save_file(whole, self.folder / "model.safetensors")
        except OSError as error:
            raise EngineFailed(f"weights could not be written to {self.folder}: {error}") from error


@dataclass(frozen=True)
class TensorWeights:
    """Tensors of this process, for servers that it has started; through shared memory.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name; asked at each `opened`.
        bucket_bytes: shared memory that is filled at one time, and as much again meanwhile.
    """

    version: int
    source: TensorSource
    buckets: SharedBuckets
    bucket_bytes: int

    @property
    def again(self) -> Weights:
        return self

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        yield LoadableTensors(list(await self.source()), self.buckets, self.bucket_bytes)


class LoadableTensors:
    """The tensors of `TensorWeights`."""

    def __init__(
        self, named_tensors: Sequence[NamedTensor], buckets: SharedBuckets, bucket_bytes: int
    ) -> None:
        self._cut = list(split_into_buckets(named_tensors, bucket_bytes))
        self._buckets = buckets
        self._filled: FilledBuckets | None = None

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """Fills the first buckets, while the servers still generate."""
        async with self._buckets.turn:
            self._filled = await self._buckets.fill(self._cut)
            try:
                yield
            finally:
                self._filled = None

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """Every bucket is written once, and reused only after every server has loaded it."""
        assert self._filled, "load within `prepared`"

        async def begin(server: PausedServer) -> None:
            if not server.is_own:
                raise ConfigError(
                    f"{server.client.url} was not started by this worker, and tensors go only to "
                    "servers that were: set weight_update.method to disk or collective"
                )
            await begin_update(server)

        num_readers = sum(server.abilities.tp_size for server in servers)
        num_bytes = 0
        errors = await for_each(servers, begin)
        async with aclosing(self._filled.each(num_readers)) as filled:
            async for pickled, size, is_last in filled:

                async def load_bucket(
                    server: PausedServer, pickled: str = pickled, is_last: bool = is_last
                ) -> None:
                    pickles = [pickled] * server.abilities.tp_size
                    await server.client.load_tensors(
                        pickles, drops_cache=is_last, timeout_s=timeout_s
                    )

                errors = await for_each(servers, load_bucket, errors)
                num_bytes += size
        errors = await for_each(servers, lambda s: end_update(s, timeout_s), errors)
        return LoadReport(errors, num_bytes)


async def begin_update(server: PausedServer) -> None:
    """Opens an update session, on a server that has them."""
    if server.abilities.has_update_session:
        await server.client.begin_update()


async def end_update(server: PausedServer, timeout_s: float) -> None:
    if server.abilities.has_update_session:
        await server.client.end_update(timeout_s=timeout_s)


async def for_each(
    servers: Sequence[S],
    action: Callable[[S], Awaitable[None]],
    errors: Sequence[ArealError | None] | None = None,
) -> list[ArealError | None]:
    """Runs an action on all servers at once, leaving out those that have an error already."""

    async def run(server: S, error: ArealError | None) -> ArealError | None:
        if error is not None:
            return error
        try:
            await action(server)
        except ArealError as failure:
            return failure
        return None

    before = errors or [None] * len(servers)
    return list(await asyncio.gather(*map(run, servers, before)))


def check_weights_folder(
    folder: str, model_folder: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Compares a folder that is to be published with the model that is served.

    Args:
        shapes: of what it has to hold at least; when empty, names are not compared.
    Raises: ModelError: it holds no model, another one, or a weight file that was cut off.
    """
    check_model_folder(folder)
    found, expected = read_model_config(Path(folder)), read_model_config(Path(model_folder))
    assert found is not None
    for name in _SHAPE_SETTINGS:
        wanted = expected.get(name) if expected else None
        if wanted is not None and found.get(name) not in (None, wanted):
            raise ModelError(
                f"the weights in {folder} are of another model than {model_folder}: {name} is "
                f"{found[name]!r}, expected {wanted!r}"
            )
    if found_shapes := read_shapes(folder):
        given = {name: shape for name, shape in found_shapes.items() if name in shapes}
        check_shapes(given, shapes, f"the weights in {folder}")


def read_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter in the folder's safetensors files; {} when there are none.

    Raises: ModelError: a file is damaged, or shorter than it says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a complete safetensors file: {error}") from error
    return shapes


def check_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], whose: str
) -> None:
    """Compares parameters by name and number of elements; a server would load what it knows.

    Args:
        expected: of the model; when empty, nothing is known or compared.
        whose: for the message.
    Raises: ModelError: a parameter is missing, unknown, or of another size.
    """
    if not expected:
        return
    if given.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - given), sorted(given.keys() - expected)
        raise ModelError(
            f"{whose} do not fit the model: {len(missing)} parameters are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} unknown ({', '.join(unknown[:3])})"
        )
    for name, shape in given.items():
        if prod(shape) != prod(expected[name]):
            raise ModelError(
                f"{whose} do not fit the model: {name} has {prod(shape)} elements, expected shape "
                f"{expected[name]}"
            )


def as_shaped(
    named_tensors: Iterable[NamedTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[NamedTensor]:
    """Views of tensors that may be flat, in the shapes of the model.

    Raises: ModelError: a parameter is missing, unknown, or of another size.
    """
    given = dict(named_tensors)
    check_shapes({name: tuple(t.shape) for name, t in given.items()}, shapes, "the weights")
    return [
        (name, tensor.reshape(shapes.get(name, tensor.shape))) for name, tensor in given.items()
    ]
