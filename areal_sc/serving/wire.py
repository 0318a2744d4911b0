"""Bodies of the Tinker API, checked, as rows and requests of this engine, and answers as bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pydantic
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from msgspec.structs import replace
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, TopTokens
from areal_sc.serving.journal import ApiAnswer
from areal_sc.serving.losses import (
    FIELDS,
    GAINS,
    HIGH,
    INPUTS,
    LOSS,
    LOSSES,
    LOW,
    SAMPLED,
    SETTINGS,
    by_token,
    token_losses,
)

B = TypeVar("B", bound=pydantic.BaseModel)

PROTOBUF: Final = "application/x-protobuf"
MAX_BODY_BYTES: Final = 64 << 20
_HEAD_BYTES: Final = 1024
_DTYPES: Final = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
}


class RequestRefused(Exception):
    """A request that is not served, in words for its client.

    Args:
        status: of HTTP, where it is known before the request is taken on.
    """

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class RowLimits:
    """What rows and prompts may be.

    Attributes:
        vocab_size: token ids are below it.
        max_tokens: of a row.
    """

    vocab_size: int
    max_tokens: int


def read_json(body: bytes, kind: type[B]) -> B:
    """Raises: RequestRefused: 422: it is no such body."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the body"
        raise RequestRefused(f"{where}: {wrong['msg']}", 422) from error


def read_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises: RequestRefused: 422: it is no such body."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)  # type: ignore[no-any-return]
    except DecodeError as error:
        raise RequestRefused(
            f"the body is no ForwardBackwardRequest of at most {MAX_BODY_BYTES >> 20} MiB", 422
        ) from error


def cut_pass(body: bytearray) -> bytes:
    """What it begins with, which is no pass, wherever it is cut."""
    return bytes(body[:_HEAD_BYTES]) + b"\xff"


def head_of_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """The model and number of a pass whose body is cut short, or wrong behind them.

    Raises: RequestRefused: 422: it does not begin with them.
    """
    for end in range(min(len(body), _HEAD_BYTES), 0, -1):
        try:
            head = pb.ForwardBackwardRequest.FromString(body[:end])
        except DecodeError:
            continue
        if head.model_id and head.seq_id:
            return head  # type: ignore[no-any-return]
    raise RequestRefused("the body is no ForwardBackwardRequest", 422)


def rows_of(asked: pb.ForwardBackwardRequest, limits: RowLimits) -> list[dict[str, Any]]:
    """`input_ids` and `loss_mask`, each [T], [T] each what the client gives for the loss, and the
    loss and its settings; each token is trained that is the client's target.

    Raises: RequestRefused: what it asks for is not served.
    """
    if asked.loss_fn not in LOSSES:
        raise RequestRefused(
            f"loss_fn: expected one of {', '.join(LOSSES)}, got {asked.loss_fn!r:.80}"
        )
    settings = dict(SETTINGS[asked.loss_fn])
    for name, value in asked.loss_fn_config.items():
        if name not in settings or not np.isfinite(value):
            expected = ", ".join(settings) or "nothing"
            raise RequestRefused(
                f"loss_fn_config of {asked.loss_fn}: expected {expected}, got {name!r:.80}={value}"
            )
        settings[name] = value
    if not asked.data:
        raise RequestRefused("data: expected at least one datum")
    low, high = [*settings.values(), 0.0, 0.0][:2]
    own = {LOSS: LOSSES.index(asked.loss_fn), LOW: low, HIGH: high}
    rows = []
    for number, datum in enumerate(asked.data):
        try:
            rows.append(_row_of(datum, asked.loss_fn, limits) | own)
        except RequestRefused as error:
            raise RequestRefused(f"data[{number}]: {error}") from error
    return rows


def _row_of(datum: Any, loss: str, limits: RowLimits) -> dict[str, Any]:
    tokens = [_tokens_of(chunk) for chunk in datum.model_input]
    given = np.concatenate([np.empty(0, np.int32), *tokens])
    known = {"target_tokens", *INPUTS[loss].values()}
    if others := datum.loss_fn_inputs.keys() - known:
        raise RequestRefused(
            f"loss_fn_inputs: {loss} reads {', '.join(sorted(known))}, got {min(others)!r:.80}"
        )
    targets = _tensor_of(datum, "target_tokens", len(given))
    if not len(given):
        raise RequestRefused("model_input: expected at least one token")
    ids = np.concatenate([given, targets[-1:]]).astype(np.int64)
    check_tokens(ids, limits)
    row: dict[str, Any] = {SAMPLED: [0.0] * len(ids)}
    for field, name in INPUTS[loss].items():
        if loss == "cross_entropy" and name not in datum.loss_fn_inputs:
            values = np.ones(len(given))  # of a loss that the client computes
        else:
            values = _tensor_of(datum, name, len(given))
        if not np.isfinite(values).all():
            raise RequestRefused(
                f"{name}: expected finite numbers, got {values[~np.isfinite(values)][0]}"
            )
        row[field] = [0.0, *values.astype(np.float64).tolist()]
    is_next = targets == ids[1:]
    counts = np.array(row[GAINS][1:]) != 0 if loss != "dro" else True
    if np.any(counts & ~is_next):
        raise RequestRefused(
            "target_tokens: expected the tokens of model_input, each one place earlier, and one "
            "more at the end; other targets are served where weights or advantages are 0"
        )
    return row | {"input_ids": ids.tolist(), "loss_mask": [0, *is_next.astype(int).tolist()]}


def check_tokens(ids: NDArray[Any] | Sequence[int], limits: RowLimits) -> None:
    """Raises: RequestRefused: there are too many, or some are not in the vocabulary."""
    if len(ids) > limits.max_tokens:
        raise RequestRefused(f"expected at most {limits.max_tokens} tokens, got {len(ids)}")
    if len(ids) and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(int(it) for it in ids if not 0 <= it < limits.vocab_size)
        raise RequestRefused(f"expected tokens of 0 to {limits.vocab_size - 1}, got {wrong}")


def _tokens_of(chunk: Any) -> NDArray[Any]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
        raise RequestRefused(f"model_input: expected tokens, got a chunk of {kind}")
    return np.frombuffer(chunk.encoded_text.tokens, np.int32)


def _tensor_of(datum: Any, name: str, length: int) -> NDArray[Any]:
    if name not in datum.loss_fn_inputs:
        raise RequestRefused(f"loss_fn_inputs: expected {name}")
    tensor = datum.loss_fn_inputs[name]
    dtype = np.dtype(_DTYPES.get(tensor.dtype, np.float32))
    if tensor.dtype not in _DTYPES or tensor.HasField("sparse_csr"):
        raise RequestRefused(f"{name}: expected a dense tensor of float32 or int64")
    if len(tensor.dense) != length * dtype.itemsize or list(tensor.shape) not in ([], [length]):
        raise RequestRefused(
            f"{name}: expected {length} numbers, as many as model_input has tokens, got shape "
            f"{list(tensor.shape)}"
        )
    return np.frombuffer(tensor.dense, dtype)


def pass_output(
    rows: Sequence[Mapping[str, Any]], logprobs: Sequence[Sequence[float]]
) -> ApiAnswer:
    """Args: logprobs: [T] of each row, nats; the first one stands for no token."""
    of_rows = [np.asarray(row[1:], np.float32) for row in logprobs]
    losses = 0.0
    for row, known in zip(rows, of_rows, strict=True):
        each = by_token(row)
        fields = {name: torch.tensor(each[name][1:], dtype=torch.float64) for name in FIELDS}
        losses += float(token_losses(torch.from_numpy(known).double(), fields).sum())
    offsets = np.cumsum([0, *(row.nbytes for row in of_rows)], dtype=np.int64)
    tensor = pb.BatchedTensor(
        data=b"".join(row.tobytes() for row in of_rows),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(num_datums=len(of_rows))
    record.fields["logprobs"].CopyFrom(tensor)
    output = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": losses}
    )
    return ApiAnswer("", output.SerializeToString(), PROTOBUF)


_UNSERVED: Final = (
    *("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"),
    "record_stability_info",
)

_MOST_TOP_K: Final = 128
MAX_SAMPLES: Final = 1024


def sampling_of(
    asked: types.SampleRequest, limits: RowLimits, own: GenerationConfig
) -> tuple[list[int], GenerationConfig]:
    """The tokens of a prompt, and how completions of it are sampled.

    Args: own: the settings of the server, whose `max_new_tokens` counts where nothing is asked for.
    Raises: RequestRefused: what it asks for is not served.
    """
    for name in _UNSERVED:
        if getattr(asked, name):
            raise RequestRefused(f"{name} is not served")
    if not 1 <= asked.num_samples <= MAX_SAMPLES:
        raise RequestRefused(f"num_samples: expected 1 to {MAX_SAMPLES}, got {asked.num_samples}")
    most = min(_MOST_TOP_K, limits.vocab_size)
    for name in ("topk_sample_logprobs", "topk_prompt_logprobs"):
        if not 0 <= getattr(asked, name) <= most:
            raise RequestRefused(f"{name}: expected at most {most}, got {getattr(asked, name)}")
    try:
        tokens = asked.prompt.to_ints()
    except ValueError as error:
        raise RequestRefused("prompt: expected tokens; pictures are not served") from error
    check_tokens(tokens, limits)
    if not tokens:
        raise RequestRefused("prompt: expected at least one token")
    its = asked.sampling_params
    stop = [its.stop] if isinstance(its.stop, str) else list(its.stop or ())
    if its.stop is not None and not stop:
        raise RequestRefused(
            "stop: expected strings or tokens; to go on behind the end is not served"
        )
    if not (np.isfinite(its.temperature) and its.temperature >= 0 and 0 < its.top_p <= 1):
        raise RequestRefused(
            f"expected temperature >= 0 and 0 < top_p <= 1, got {its.temperature}, {its.top_p}"
        )
    room = limits.max_tokens - len(tokens)
    wanted = own.max_new_tokens if its.max_tokens is None else its.max_tokens
    if room < 1 or wanted < 1:
        raise RequestRefused(f"max_tokens: expected 1 to {room}, got {wanted}")
    sampling = GenerationConfig(
        max_new_tokens=min(wanted, room),
        temperature=its.temperature,
        top_p=its.top_p,
        top_k=max(its.top_k, 0),
        stop=[it for it in stop if isinstance(it, str)],
        stop_token_ids=[it for it in stop if isinstance(it, int)],
    )
    return tokens, sampling


def wants_prompt(asked: types.SampleRequest) -> bool:
    """Whether the log-probabilities of the prompt are asked for, too."""
    return bool(asked.prompt_logprobs) or asked.topk_prompt_logprobs > 0


def sample_output(asked: types.SampleRequest, completions: Sequence[Completion]) -> ApiAnswer:
    """What was sampled; a completion that its context cut has the reason `length`."""
    answer = pb.SampleResponse()
    for it in completions:
        sequence = pb.SampledSequence(
            stop_reason=(
                pb.STOP_REASON_STOP if it.finish_reason == "stop" else pb.STOP_REASON_LENGTH
            ),
            tokens=np.asarray(it.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(it.logprobs, np.float32).tobytes(),
        )
        if asked.topk_sample_logprobs:
            sequence.topk_sampled_logprobs.CopyFrom(_top_of(it.top, asked.topk_sample_logprobs))
        answer.sequences.append(sequence)
    first = completions[0]
    if wants_prompt(asked):
        answer.prompt_logprobs = np.asarray(first.prompt_logprobs, np.float32).tobytes()
    if top_k := asked.topk_prompt_logprobs:
        answer.topk_prompt_logprobs.CopyFrom(_top_of(first.prompt_top, top_k))
    return ApiAnswer("", answer.SerializeToString(), PROTOBUF)


def _top_of(places: Sequence[TopTokens], top_k: int) -> pb.TopkLogprobs:
    """Cells of places without so many tokens have the token 0, and -99999, as the API has it."""
    tokens = np.zeros((len(places), top_k), np.int32)
    logprobs = np.full((len(places), top_k), -99999.0, np.float32)
    for number, place in enumerate(places):
        for rank, (token, logprob) in enumerate(place[:top_k]):
            tokens[number, rank], logprobs[number, rank] = token, logprob
    return pb.TopkLogprobs(
        token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=top_k, length=len(places)
    )


def json_of(body: pydantic.BaseModel) -> ApiAnswer:
    return ApiAnswer("", body.model_dump_json().encode())


def failure_of(why: str, *, is_users: bool) -> ApiAnswer:
    """What a client is told in place of a result; the SDK raises `RequestFailedError`."""
    kinds = types.RequestErrorCategory
    told = types.RequestFailedResponse(error=why, category=kinds.User if is_users else kinds.Server)
    return replace(json_of(told), is_failure=True)
