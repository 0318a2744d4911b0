"""Pictures in agents' messages: the exact tokens, the tree of calls, rows, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from builders import picture
from picture_models import own_logprobs, save_picture_model
from PIL import Image
from scripted_engine import ScriptedEngine, answer_to, check_trained
from transformers import AutoModelForImageTextToText

from areal_sc.agents.calls import CallRefused, Dialect, ModelCall
from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.dialects.messages import AnthropicMessages
from areal_sc.agents.dialects.responses import Responses
from areal_sc.agents.journal import SessionJournal
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.agents.workflow import AgentWorkflow
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.controller.ledger.group import check_fields
from areal_sc.engines.base import Completion
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.picture_processor import PictureProcessor, picture_processor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import NeverWorks, WorkflowError
from areal_sc.rejection import Rejection
from areal_sc.rewards.pool import RewardPool
from areal_sc.sizing.pictures import MAX_ROW_BYTES, engine_fields, fields_of_rows
from areal_sc.sources.pictures import data_url, unpacked
from areal_sc.token_fields import PICTURES
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.pictures import encode_chat_with
from areal_sc.workflows.single_turn import SingleTurnWorkflow
from areal_sc.workflows.trajectory import Trajectory

A, B, C = picture(0), picture(1, 24, 48), picture(2, 60, 31)
SAMPLING = GenerationConfig(max_new_tokens=16)
MAX_CONTEXT = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_picture_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


class SeeingEngine(ScriptedEngine):
    """Keeps the pictures of each request, too."""

    processor: PictureProcessor
    seen: list[list[bytes]]

    async def generate(self, *asked: Any, pictures: Sequence[bytes] = (), **how: Any) -> Completion:
        self.seen.append(list(pictures))
        return await super().generate(*asked, **how)


@pytest.fixture
def engine(folder: Path) -> SeeingEngine:
    tokenizer = load_tokenizer(folder)
    found = SeeingEngine(tokenizer)
    processor = picture_processor(folder, tokenizer)
    assert processor is not None
    found.processor, found.seen, found.end_token_ids = processor, [], (tokenizer.eos_token_id,)
    found.will_say(*[f"answer {n}<eos>" for n in range(8)])
    return found


def image(content: bytes) -> dict[str, str]:
    return {"type": "image", "image": data_url(content)}


def said(*parts: str | bytes) -> dict[str, Any]:
    content = [image(it) if isinstance(it, bytes) else {"type": "text", "text": it} for it in parts]
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def session_of(engine: Any, journal: SessionJournal | None = None, **settings: Any) -> Session:
    return Session(engine, SAMPLING, SessionSettings(**settings), journal)


def pictures_of(rows: Sequence[Trajectory]) -> list[tuple[bytes, ...]]:
    return [tuple(row.pictures or ()) for row in rows]


def rendered(engine: SeeingEngine, messages: list[Any], pictures: Sequence[bytes]) -> list[int]:
    """The whole conversation in one piece, as for a row of data."""
    bare = [
        {**it, "content": [{"type": "image"} if p["type"] == "image" else p for p in it["content"]]}
        if isinstance(it["content"], list)
        else it
        for it in messages
    ]
    return encode_chat_with(pictures, engine.processor, engine.tokenizer, bare)


async def test_a_conversation_whose_turns_bring_pictures_is_one_exact_row(
    engine: SeeingEngine,
) -> None:
    session = session_of(engine)
    messages = [said("see ", A, "and ", B), answer("answer 0"), said(C, "?"), answer("answer 1")]
    for number in (1, 3):
        told = await answer_to(session, ModelCall(tuple(messages[:number])))
        assert told.turn.content == messages[number]["content"]
    told = await answer_to(session, ModelCall((*messages, said("no more"))))
    assert engine.seen == [[A, B], [A, B, C], [A, B, C]]
    assert engine.sent[0] == rendered(engine, messages[:1], [A, B])
    assert engine.sent[2] == rendered(engine, [*messages, said("no more")], [A, B, C])
    (row,) = session.trajectories(1.0)
    assert list(row.input_ids) == engine.sent[2] + engine.sampled[2]
    assert pictures_of([row]) == [(A, B, C)]
    check_trained(engine, [row])
    assert told.num_prompt_tokens == len(engine.sent[2])


async def test_branches_have_their_own_pictures_and_equal_ones_are_known_again(
    engine: SeeingEngine,
) -> None:
    session = session_of(engine)
    first = said(A, "which?")
    await answer_to(session, ModelCall((first,)))
    for added in (B, C):
        await answer_to(session, ModelCall((first, answer("answer 0"), said(added))))
    # another first picture with the same size: another conversation, though its tokens are equal
    await answer_to(session, ModelCall((said(picture(7), "which?"), answer("answer 0"), said("!"))))
    rows = session.trajectories(1.0)
    assert sorted(pictures_of(rows)) == sorted([(A, B), (A, C), (picture(7),)])
    assert session.counts["rewritten_history"] == 0
    check_trained(engine, rows)


async def test_a_session_goes_on_from_its_journal(engine: SeeingEngine, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.touch()
    journal = SessionJournal(path=file)
    session = session_of(engine, journal)
    messages = [said(A, "which?"), answer("answer 0"), said(B, A), answer("answer 1")]
    for number in (1, 3):
        await answer_to(session, ModelCall(tuple(messages[:number])))
    assert file.read_bytes().count(base64.b64encode(A)) == 1
    again = session_of(engine, SessionJournal(path=file))
    await again.restore(again.journal.read())
    for its in (session, again):
        await answer_to(its, ModelCall((*messages, said("go on"))))
    assert engine.sent[-1] == engine.sent[-2]
    assert engine.seen[-1] == engine.seen[-2] == [A, B, A]
    assert pictures_of(again.trajectories(1.0)) == [(A, B, A)]


def bodies(picture: str) -> list[tuple[Dialect, Mapping[str, Any]]]:
    data = picture.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    part = {"type": "image_url", "image_url": {"url": picture, "detail": "low"}}
    text, system = {"type": "text", "text": "which?"}, {"role": "system", "content": "short"}
    item = {"type": "input_image", "image_url": picture, "detail": "auto"}
    return [
        (ChatCompletions(), {"messages": [system, {"role": "user", "content": [part, text]}]}),
        (
            Responses(),
            {
                "instructions": "short",
                "input": [
                    {"role": "user", "content": [item, {"type": "input_text", "text": "which?"}]}
                ],
            },
        ),
        (
            AnthropicMessages(),
            {
                "system": "short",
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": source}, text]}
                ],
            },
        ),
    ]


async def test_the_dialects_read_the_same(engine: SeeingEngine) -> None:
    session = session_of(engine)
    for dialect, body in bodies(data_url(A)):
        await answer_to(session, dialect.read(body))
    assert engine.sent[0] == engine.sent[1] == engine.sent[2]
    assert engine.seen == [[A]] * 3
    (block, _) = bodies(data_url(A))[2][1]["messages"][0]["content"]
    result = {"type": "tool_result", "tool_use_id": "call0", "is_error": True, "content": [block]}
    call = AnthropicMessages().read({"messages": [{"role": "user", "content": [result]}]})
    content = [{"type": "text", "text": "Error: "}, image(A)]
    assert call.messages == ({"role": "tool", "tool_call_id": "call0", "content": content},)


def bomb() -> bytes:
    content = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(content, "PNG")
    return content.getvalue()


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1/a.png", "no data URL, and nothing is fetched"),
        ("https://example.com/a.png", "no data URL, and nothing is fetched"),
        ("file:///etc/hostname", "no data URL, and nothing is fetched"),
        (__file__, "no data URL, and nothing is fetched"),
        ("data:text/html;base64,PGE+", "expected data:image/"),
        ("data:image/png;base64,%%%", "is damaged"),
        (url_of(b"<svg xmlns='a'/>"), "it is an SVG, a program"),
        (url_of(picture(0, 300, 300)[:5000]), "is damaged"),
        (url_of(bomb()), "pixels"),
        (url_of(picture(0, 1300, 1300)), f"expected at most {MAX_ROW_BYTES}"),
    ],
    ids=["http", "https", "file", "path", "type", "base64", "svg", "torn", "bomb", "large"],
)
async def test_a_picture_that_cannot_be_is_refused(
    engine: SeeingEngine, url: str, why: str
) -> None:
    session = session_of(engine)
    message = {"role": "user", "content": [{"type": "image", "image": url}]}
    with pytest.raises(CallRefused, match=why) as refused:
        await answer_to(session, ModelCall((message,)))
    assert refused.value.status == 400
    assert engine.sent == []


async def test_markers_and_other_models_are_refused(
    engine: SeeingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr("areal_sc.agents.pictures.MAX_SESSION_BYTES", len(A) + len(B))
        with pytest.raises(CallRefused, match="the pictures of the episode have"):
            await answer_to(session_of(engine), ModelCall((said(A, B, A, C),)))
    with pytest.raises(CallRefused, match=r"2 markers of pictures .* 1 pictures"):
        await answer_to(session, ModelCall((said(A, "<|image_pad|>"),)))
    engine.answers[0] = engine.tokenizer.encode("<|image_pad|><eos>")  # the model itself says it
    await answer_to(session, ModelCall((said("hello"),)))
    told = engine.tokenizer.decode(engine.sampled[0][:1])
    with pytest.raises(CallRefused, match="tokens of the conversation are as those of its pict"):
        await answer_to(session, ModelCall((said("hello"), answer(told), said(A))))
    engine.processor = None  # type: ignore[assignment]
    with pytest.raises(CallRefused, match="and the model reads none"):
        await answer_to(session_of(engine), ModelCall((said(A),)))


def episode_of(engine: Any, group: str = "g", **how: Any) -> WorkerEpisodeEngine:
    pool = cast("RewardPool", None)
    return WorkerEpisodeEngine(engine, pool, group, SAMPLING, pictures=(), **how)


async def test_rows_keep_the_pictures_of_their_way(engine: SeeingEngine, folder: Path) -> None:
    episode = episode_of(engine, pictures_of_rows=True)
    session = session_of(episode)
    await answer_to(session, ModelCall((said(A),)))
    for added in (B, "text"):
        await answer_to(session, ModelCall((said(A), answer("answer 0"), said(added))))
    rows = episode.with_own_fields(session.trajectories(1.0))
    assert not isinstance(rows, Rejection)
    assert [unpacked(row.fields[PICTURES].tobytes()) for row in rows] == [(A, B), (A,)]
    config = RolloutConfig(path=str(folder))
    own, agents = engine_fields(config), AgentWorkflow(lambda row: 1.0)
    declared = fields_of_rows({}, own, pictures_of_rows=agents.pictures_of_rows)
    assert declared[PICTURES].type_name == "row:uint8[?]"
    room = MAX_ROW_BYTES
    assert check_fields(agents, own)[1:] == (room, 0)
    assert check_fields(SingleTurnWorkflow(lambda *_: 1.0), own)[1:] == (0, room)
    many = [Trajectory([], [], [], [], [], 1.0, pictures=[bytes(MAX_ROW_BYTES // 2)])] * 3
    engine.processor = None  # type: ignore[assignment]
    rejected = episode.with_own_fields(many)
    assert isinstance(rejected, Rejection)
    assert "the pictures of the episode's 3 rows" in rejected.message
    with pytest.raises(NeverWorks, match="set pictures_of_rows = True"):
        await episode_of(engine).generate([1], pictures=[A])


async def test_the_embedded_engine_sees_what_is_trained(folder: Path) -> None:
    """Episodes of a group whose tokens are equal and whose pictures are not, and two turns."""
    config = RolloutConfig(
        path=str(folder), max_context_tokens=MAX_CONTEXT, max_running_sequences=4, seed=0
    )
    engine = LocalEngine(config)
    await engine.start()
    try:
        rows = list[Trajectory]()
        for first in (A, picture(9)):
            session = session_of(episode_of(engine, pictures_of_rows=True))
            told = await answer_to(session, ModelCall((said("a ", first),)))
            behind = answer(told.turn.content), said(B, "?")
            with suppress(CallRefused):  # a random model may have said the token of a picture
                await answer_to(session, ModelCall((said("a ", first), *behind)))
            rows += session.trajectories(1.0)
    finally:
        await engine.close()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor(list(row.input_ids))
            expected = own_logprobs(model, folder, ids, row.pictures or ())
        trained = np.asarray(row.loss_mask)
        error = np.abs(expected.numpy() - np.asarray(row.behavior_logprobs))[trained]
        assert error.max() < 1e-4
    assert len({next(iter(row.pictures or ())) for row in rows}) == 2


def test_what_an_agent_sends_is_what_its_row_has() -> None:
    assert url_of(A) == data_url(A)
    assert data_url(picture(0, kind="JPEG")).startswith("data:image/jpeg;base64,")
    with pytest.raises(WorkflowError, match="no known kind"):
        data_url(b"text")
