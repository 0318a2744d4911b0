"""Single-turn and multi-turn episodes against a scripted engine and a real tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import multi_turn
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import RewardFunction
from areal_sc.sources.reference import reference_of, resolve
from areal_sc.workflows.math_reward import exact_match
from areal_sc.workflows.single_turn import SingleTurnWorkflow
from areal_sc.workflows.text import bare_tokens, describe_unknown, encode_text


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder)


class ScriptedEngine:
    """Answers with the given texts, one after the other, and keeps what it was asked."""

    def __init__(
        self, tokenizer: Any, answers: Sequence[str], finish_reason: str = "stop", context: int = 99
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context_tokens = context
        self.asked: list[tuple[list[int], GenerationConfig | None]] = []
        self._answers = list(answers)
        self._finish_reason = finish_reason

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None, **_: Any
    ) -> Completion:
        self.asked.append((list(input_ids), sampling))
        token_ids = self.tokenizer.encode(self._answers.pop(0), add_special_tokens=False)
        number = len(self.asked)
        return Completion(
            token_ids,
            [-0.5 * number] * len(token_ids),
            [number] * len(token_ids),
            self._finish_reason,
            0.5 * number,
        )

    async def score(
        self, reward: RewardFunction, prompt: Mapping[str, Any], completion: str
    ) -> float:
        value = reward(dict(prompt), completion)
        assert isinstance(value, float)
        return value


def test_only_a_prompt_that_is_mostly_unknown_is_described(tokenizer: Any) -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    known = PreTrainedTokenizerFast(tokenizer_object=words)

    def described(text: str) -> str:
        return describe_unknown(known, known.encode(text))

    assert described("abab") == described("aAbB") == described("") == ""
    assert described("A" * 30) == "30 of its 30 tokens are ?:" + " ?" * 20
    assert describe_unknown(tokenizer, [2, 3, 4]) == ""  # it has no such token


def test_limits_in_the_tokenizers_file_are_not_those_of_a_conversation(
    tiny_model_folder: Path,
) -> None:
    cut, padded, free = (AutoTokenizer.from_pretrained(tiny_model_folder) for _ in range(3))
    cut.backend_tokenizer.enable_truncation(2)
    padded.backend_tokenizer.enable_padding(length=9)
    expected = [free.convert_tokens_to_ids(it) for it in "abcab"]
    for tokenizer in (cut, padded, free):
        assert [bare_tokens(tokenizer, "abcab") for _ in range(2)] == [expected, expected]


async def test_a_single_turn_is_prompt_and_completion(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, ["abc$"])
    generation = GenerationConfig(max_new_tokens=7)
    workflow = SingleTurnWorkflow(exact_match, generation)
    trajectory = await workflow.run_episode({"prompt": "cab=", "answer": "abc"}, engine)
    assert trajectory is not None
    assert trajectory.input_ids == tokenizer.encode("cab=abc$", add_special_tokens=False)
    assert trajectory.loss_mask == [False] * 4 + [True] * 4
    assert trajectory.behavior_logprobs == [0.0] * 4 + [-0.5] * 4
    assert trajectory.temperatures == [1.0] * 4 + [0.5] * 4
    assert trajectory.versions == [-1] * 4 + [1] * 4
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"accuracy": 1.0, "completion_tokens": 4.0, "stopped": 1.0}
    assert engine.asked == [(trajectory.input_ids[:4], generation)]


async def test_an_answer_that_was_cut_keeps_its_last_token(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, ["abc"], finish_reason="length")
    trajectory = await SingleTurnWorkflow(exact_match).run_episode(
        {"prompt": "cab=", "answer": "abc"}, engine
    )
    assert trajectory is not None
    assert trajectory.reward == 1.0
    assert trajectory.metrics["stopped"] == 0.0


async def test_a_chat_template_wraps_the_question(tokenizer: Any, tiny_model_folder: Path) -> None:
    chat = AutoTokenizer.from_pretrained(tiny_model_folder)
    chat.chat_template = (
        "{% for m in messages %}{{ m['content'] }}z{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    question = {"question": "cab", "answer": "abc"}
    workflow = SingleTurnWorkflow(exact_match, use_chat_template=True, prompt_key="question")
    engine = ScriptedEngine(chat, ["abc$"])
    trajectory = await workflow.run_episode(question, engine)
    assert trajectory is not None
    assert trajectory.input_ids == tokenizer.encode("cabz=abc$", add_special_tokens=False)

    question["question"] = [{"role": "user", "content": "c"}, {"role": "user", "content": "b"}]
    engine = ScriptedEngine(chat, ["abc$"])
    trajectory = await workflow.run_episode(question, engine)
    assert trajectory is not None
    assert trajectory.input_ids == tokenizer.encode("czbz=abc$", add_special_tokens=False)

    with pytest.raises(WorkflowError, match="has no chat template"):
        await workflow.run_episode(question, ScriptedEngine(tokenizer, ["abc$"]))


@pytest.fixture
def chat(tiny_model_folder: Path) -> Any:
    chat = AutoTokenizer.from_pretrained(tiny_model_folder)
    chat.chat_template = (
        "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}{% endfor %}z{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m['content'] or '' }}z{% endfor %}"
        "{% if add_generation_prompt %}={% if enable_thinking is false %}x{% endif %}{% endif %}"
    )
    return chat


def question_of(chat: Any, prompt: Any, **settings: Any) -> str:
    """What the model reads."""
    workflow = SingleTurnWorkflow(exact_match, use_chat_template=True, **settings)
    token_ids = workflow._prompt_tokens({"prompt": prompt}, ScriptedEngine(chat, []))
    return str(chat.decode(token_ids)).replace(" ", "")


def test_a_last_message_of_the_assistant_is_continued(chat: Any) -> None:
    begun = [{"role": "user", "content": "cab"}, {"role": "assistant", "content": "ab"}]
    assert question_of(chat, begun) == "cabzab"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert question_of(chat, [call, {"role": "user", "content": "c"}]) == "zcz="


def test_a_field_that_a_message_does_not_have_is_not_written(chat: Any) -> None:
    chat.chat_template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m['name'] }}{% endif %}"
        "{% for part in m['content'] %}{{ part['text'] or part }}{% endfor %}{% endfor %}"
    )
    named = {"role": "user", "content": "c", "name": "b"}
    assert question_of(chat, [named, {"role": "user", "content": "a", "name": None}]) == "bca"
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}], "name": None}]
    assert question_of(chat, parts) == "ab"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "the prompt is None: expected a text, or a list of messages"),
        ([], r"the prompt is \[\]: expected"),
        ({"role": "user", "content": "c"}, "the prompt is {'role': 'user'"),
        (["c"], "message 0 of the prompt is 'c'"),
        ([{"content": "c"}], "message 0 of the prompt is {'content': 'c'}"),
        ([{"role": "user", "content": None}], r"content of message 0 .* \(user\) is None"),
        ([{"role": "user"}], r"content of message 0 .* is None"),
        (
            [{"role": "user", "content": "c"}, {"role": "assistant", "content": None}],
            r"content of message 1 .* \(assistant\) is None",
        ),
        ([{"role": "user", "content": 7}], "is 7: expected a text"),
        ([{"role": "tool", "content": "c"}], "template refuses the messages: .*no tools"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "c"}]}],
            "template does not read lists of parts: it writes .{'type': 'text'",
        ),
    ],
)
def test_messages_that_a_template_would_read_as_something_else_are_refused(
    chat: Any, prompt: Any, message: str
) -> None:
    with pytest.raises(WorkflowError, match=message):
        question_of(chat, prompt)


def test_a_chat_template_gets_further_arguments(chat: Any) -> None:
    tools = [{"type": "function", "function": {"name": "fg"}}]
    off = {"enable_thinking": False}
    assert question_of(chat, "cab") == "cabz="
    assert question_of(chat, "cab", chat_template_arguments=off) == "cabz=x"
    assert question_of(chat, "cab", chat_template_arguments={"tools": tools}) == "fgzcabz="
    with pytest.raises(WorkflowError, match="does not read 'enable_thinkng'"):
        question_of(chat, "cab", chat_template_arguments={"enable_thinkng": False})
    with pytest.raises(WorkflowError, match="use_chat_template=True is needed"):
        SingleTurnWorkflow(exact_match, chat_template_arguments=off)
    with pytest.raises(WorkflowError, match="add_generation_prompt follows from the messages"):
        question_of(chat, "cab", chat_template_arguments={"add_generation_prompt": False})
    workflow = SingleTurnWorkflow(
        exact_match, use_chat_template=True, chat_template_arguments={"tools": tools}
    )
    assert resolve(reference_of(workflow)).chat_template_arguments == {"tools": tools}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "cab="}, r"no 'prompt', only \['question'\]"),
        ({"prompt": ["cab="]}, "the prompt is a list, expected a string"),
    ],
)
async def test_a_row_without_a_usable_prompt_is_refused(
    tokenizer: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkflowError, match=message):
        await SingleTurnWorkflow(exact_match).run_episode(row, ScriptedEngine(tokenizer, []))


async def test_a_retry_sees_the_feedback_but_does_not_train_on_it(tokenizer: Any) -> None:
    workflow = multi_turn.RetryWorkflow(exact_match, feedback="xy=", discount=0.5)
    engine = ScriptedEngine(tokenizer, ["ba$", "ab$"])
    trajectory = await workflow.run_episode({"prompt": "ba=", "answer": "ab"}, engine)
    assert tokenizer.decode(trajectory.input_ids) == "ba=ba$xy=ab$"
    mask = "".join("1" if trained else "0" for trained in trajectory.loss_mask)
    assert mask == "000111000111"
    assert trajectory.versions == [-1] * 3 + [1] * 3 + [-1] * 3 + [2] * 3
    assert trajectory.behavior_logprobs == [0.0] * 3 + [-0.5] * 3 + [0.0] * 3 + [-1.0] * 3
    assert trajectory.temperatures == [1.0] * 3 + [0.5] * 3 + [1.0] * 6
    assert trajectory.reward == 0.5
    assert trajectory.metrics == {"accuracy": 1.0, "turns": 2.0}


async def test_retries_end_with_their_number_or_the_context(tokenizer: Any) -> None:
    retry_workflow = multi_turn.RetryWorkflow
    row = {"prompt": "ba=", "answer": "ab"}
    engine = ScriptedEngine(tokenizer, ["ba$"] * 9)
    trajectory = await retry_workflow(exact_match, max_turns=4, feedback="x").run_episode(
        row, engine
    )
    assert (trajectory.reward, trajectory.metrics["turns"]) == (0.0, 4.0)
    engine = ScriptedEngine(tokenizer, ["ba$"] * 9, context=11)  # 3 + 3, then 1 + 3, then full
    trajectory = await retry_workflow(exact_match, max_turns=9, feedback="x").run_episode(
        row, engine
    )
    assert trajectory.metrics["turns"] == 2.0


def tokenizer_with(template: str) -> Any:
    """One of letters that puts around a text what the template says; `^` is BOS, `!` EOS."""
    vocabulary = {token: number for number, token in enumerate("^!abc")}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("^", 0), ("!", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="^", eos_token="!")


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("$A", "abc", [2, 3, 4]),
        ("^ $A", "abc", [0, 2, 3, 4]),
        ("^ $A", "^abc", [0, 2, 3, 4]),  # it has one already
        ("^ $A !", "abc", [0, 2, 3, 4]),  # the text goes on: no end
        ("$A !", "a", [2]),
    ],
)
def test_a_text_begins_as_its_tokenizer_wants_it(
    template: str, text: str, expected: list[int]
) -> None:
    tokenizer = tokenizer_with(template)
    assert encode_text(tokenizer, text) == expected
    assert encode_text(tokenizer, text, begins=False) == tokenizer.encode(
        text, add_special_tokens=False
    )
