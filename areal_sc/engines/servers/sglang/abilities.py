"""What a server can do, found by asking it, and whether that is enough."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sc.config.model_folder import read_model_config
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.errors import ConfigError, EngineFailed, ModelError, ProtocolError

logger = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 11)
"""The first that holds running requests while its weights are replaced (pause mode `retract`)."""

_PROBE_TOKEN = 0
_NO_TOKEN = 1 << 31  # outside every vocabulary
_VOCABULARY_RANGE = re.compile(r"in \[0, (\d+)\]")


@dataclass(frozen=True)
class ServerAbilities:
    """What one server is and can.

    Attributes:
        version: of SGLang.
        model_type: and `architectures`, as in the model's config.json; empty when not told.
        vocab_size: None when the server does not tell.
        max_context_tokens: longest prompt and completion that it takes.
        tp_size: ranks that hold the weights.
        max_support: tokens that a truncated distribution may have; 0: the server gives no
            log-probabilities under truncated distributions.
        has_version_spans: it tells the version of every token, so that weights may be replaced
            under running requests.
        has_update_session: a weight update stands between a begin and an end.
    """

    version: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int | None
    max_context_tokens: int
    tp_size: int
    max_support: int
    has_version_spans: bool
    has_update_session: bool


async def ask_abilities(client: SGLangClient, *, timeout_s: float) -> ServerAbilities:
    """Asks a server that is not paused; generates two tokens.

    Raises: ConfigError: it is too old. Else as `SGLangClient`.
    """
    info = await client.server_info()
    version = str(info.get("version", ""))
    check_version(version, client.url)
    model = await client.model_info()
    plain = await client.generate(_probe(), timeout_s=timeout_s)
    try:
        return ServerAbilities(
            version=version,
            model_type=str(model.get("model_type") or ""),
            architectures=tuple(model.get("architectures") or ()),
            vocab_size=await _ask_vocab_size(client, timeout_s),
            max_context_tokens=int(info["max_req_input_len"]),
            tp_size=int(info["tp_size"]),
            max_support=await _ask_max_support(client, info, timeout_s),
            has_version_spans="weight_versions" in plain["meta_info"],
            has_update_session=await client.has_route("/begin_weight_update"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{client.url} does not tell what it can do: {error!r}") from error


def check_version(version: str, whose: str) -> None:
    """Raises ConfigError when this SGLang is too old to be driven."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise ConfigError(
            f"{whose} is SGLang {version or 'of an unknown version'}: {oldest} or newer is needed"
        )


def check_abilities(
    abilities: ServerAbilities, url: str, model_folder: str, max_context_tokens: int
) -> None:
    """Compares a server with the model that is trained.

    Raises: ModelError: it serves another model. ConfigError: its context is too short.
    """
    expected = read_model_config(Path(model_folder))
    if expected is None:
        raise ModelError(f"model folder {model_folder}: it has no config.json")
    for name, found in (
        ("model_type", abilities.model_type),
        ("architectures", list(abilities.architectures)),
        ("vocab_size", abilities.vocab_size),
    ):
        wanted = expected.get(name)
        if found and wanted and found != wanted:
            raise ModelError(
                f"the server at {url} serves another model than {model_folder}: {name} is "
                f"{found!r}, expected {wanted!r}; start it with --model-path {model_folder}"
            )
    if abilities.max_context_tokens < max_context_tokens:
        raise ConfigError(
            f"the server at {url} takes {abilities.max_context_tokens} tokens, but "
            f"rollout.max_context_tokens is {max_context_tokens}: lower it, or start the server "
            f"with a longer --context-length and room for it in --max-total-tokens"
        )


def _probe(**more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 1.0, **more.pop("sampling_params", {})}
    return {
        "input_ids": [_PROBE_TOKEN],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        **more,
    }


async def _ask_vocab_size(client: SGLangClient, timeout_s: float) -> int | None:
    """From the refusal of a token that no vocabulary has; it never reaches the model."""
    try:
        body = _probe(sampling_params={"logit_bias": {str(_NO_TOKEN): 0.0}})
        await client.generate(body, timeout_s=timeout_s)
    except EngineFailed as refusal:
        found = _VOCABULARY_RANGE.search(str(refusal))
        if found:
            return int(found[1]) + 1
    logger.warning("server=%s does not tell its vocabulary: it is not checked", client.url)
    return None


async def _ask_max_support(client: SGLangClient, info: dict[str, Any], timeout_s: float) -> int:
    body = _probe(
        sampling_params={"top_k": 2},
        return_sampling_mask=True,
        sampling_logprobs_mode="selected",
    )
    try:
        answer = await client.generate(body, timeout_s=timeout_s)
    except EngineFailed as refusal:
        logger.info("server=%s no truncated log-probabilities: %s", client.url, refusal)
        return 0
    if "output_token_sampling_logprobs" not in answer["meta_info"]:
        return 0
    return int(info["sampling_mask_max_tokens"])
