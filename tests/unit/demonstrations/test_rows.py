"""Rows of all forms, as tokens; what is trained is read back as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest

from areal_sc.demonstrations.rows import encode_demonstrations, encode_pairs
from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import WorkflowError

PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% if m.role == 'assistant' %}$2{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}={% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}$2"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")
ENDLESS = PLAIN.replace("$2", "2")


OF_USER = "u={% generation %}{{ m.content }}{% endgeneration %}"


def marked(answer: str, *, closing: str = "") -> str:
    """A template whose turns of the assistant are this; parentheses stand for marks."""
    written = answer.replace("(", "{% generation %}").replace(")", "{% endgeneration %}")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}#u=TEXT$\n{% endif %}"
        "{% endfor %}CLOSING{% if add_generation_prompt %}#a={% endif %}"
    )
    template = template.replace("ANSWER", written).replace("CLOSING", closing)
    return template.replace("TEXT", "{{ m.content }}").replace("\n", '{{ "\\n" }}')


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [turn("user", "hi"), turn("assistant", "yes"), turn("user", "go"), turn("assistant", "no")]


@pytest.fixture
def encoder_of(tiny_model_folder: Path) -> Any:
    def encoder(template: str = PLAIN, **options: Any) -> TurnEncoder:
        tokenizer = load_tokenizer(tiny_model_folder)
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"additional_special_tokens": ["#", "&", "@"]})
        tokenizer.add_tokens(["\n"])
        return TurnEncoder(tokenizer, [1], **options)

    return encoder


def read(item: dict[str, Any], encoder: TurnEncoder) -> tuple[str, str]:
    """All of the text, and what of it is trained."""
    tokens = encoder._tokenizer.convert_ids_to_tokens(item["input_ids"])
    trained = [t for t, is_trained in zip(tokens, item["loss_mask"], strict=True) if is_trained]
    return "".join(tokens), "".join(trained)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_turns_and_what_ends_them_are_trained(
    template: str, encoder_of: Any
) -> None:
    encoder = encoder_of(template)
    whole = encode_demonstrations([{"messages": TALK}], encoder, 99).items
    assert read(whole[0], encoder) == ("u=hia=yes$2u=goa=no$2", "yes$no$")
    last = encode_demonstrations([{"messages": TALK}], encoder, 99, last_turn_only=True).items
    assert read(last[0], encoder)[1] == "no$"


def test_prompts_with_completions(encoder_of: Any) -> None:
    encoder = encoder_of()
    rows = [
        {"prompt": "hi", "completion": "yes"},
        {"prompt": TALK[:3], "completion": [turn("assistant", "no")]},
    ]
    one, other = encode_demonstrations(rows, encoder, 99).items
    assert read(one, encoder) == ("u=hia=yes$2", "yes$")
    assert read(other, encoder)[1] == "no$"
    plain = encoder_of(use_chat_template=False)
    (item,) = encode_demonstrations(rows[:1], plain, 99).items
    assert read(item, plain) == ("hiyes$", "yes$")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {
            "prompt": "hi",
            "chosen": [turn("user", "hi"), turn("assistant", "yes")],
            "rejected": [turn("user", "hi"), turn("assistant", "no")],
        },
        {
            "chosen": [turn("user", "hi"), turn("assistant", "yes")],
            "rejected": [turn("user", "hi"), turn("assistant", "no")],
        },
    ],
)
def test_pairs_of_any_form(row: dict[str, Any], encoder_of: Any) -> None:
    encoder = encoder_of()
    (item,) = encode_pairs([row], encoder, 99).items
    assert read(item["chosen"], encoder) == ("u=hia=yes$2", "yes$")
    assert read(item["rejected"], encoder) == ("u=hia=no$2", "no$")


def test_too_long_rows_are_counted(encoder_of: Any) -> None:
    rows = [{"prompt": "hi", "completion": "a" * n} for n in (1, 30, 2)]
    encoded = encode_demonstrations(rows, encoder_of(), 12)
    assert (len(encoded.items), encoded.num_too_long) == (2, 1)
    with pytest.raises(WorkflowError, match="1 rows, all of them longer"):
        encode_demonstrations(rows[1:2], encoder_of(), 12)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi"}, "row 1 .*'messages', or 'prompt' and 'completion', got prompt"),
        ({"prompt": "hi", "completion": " "}, "row 1 .*completion is empty"),
        ({"messages": TALK[:3]}, "row 1 .*role 'user': expected an answer"),
        ({"messages": [*TALK[:1], turn("assistant", "")]}, "row 1 .*message 1: .*is empty"),
        ({"messages": [*TALK[:1], turn("bot", "x")]}, "row 1 .*expected a role .*'bot'"),
        ({"messages": TALK[1:2]}, "row 1 .*message 0 is the assistant's"),
        ({"messages": "hi"}, "row 1 .*expected a text, or a list of messages"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str, encoder_of: Any) -> None:
    with pytest.raises(WorkflowError, match=message):
        encode_demonstrations([{"messages": TALK}, row], encoder_of(), 99)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chosen": "yes"}, "row 0 .*expected a column 'rejected'"),
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "row 0 .*are equal"),
        ({"chosen": "yes", "rejected": "no"}, "row 0 .*without a column 'prompt'"),
        ({"chosen": TALK, "rejected": TALK}, "row 0 .*are equal"),
        ({"chosen": TALK, "rejected": TALK[1:]}, "row 0 .*do not begin alike"),
        ({"prompt": "hi", "chosen": "", "rejected": "no"}, "row 0 .*chosen is empty"),
    ],
)
def test_bad_pairs_are_named(row: dict[str, Any], message: str, encoder_of: Any) -> None:
    with pytest.raises(WorkflowError, match=message):
        encode_pairs([row], encoder_of(), 99)


def test_templates_that_do_not_tell_where_a_turn_is(encoder_of: Any) -> None:
    rows = [{"messages": TALK}]
    with pytest.raises(WorkflowError, match=r"row 0 .*message 1: .*last_turn_only"):
        encode_demonstrations(rows, encoder_of(FORGETS), 99)
    with pytest.raises(WorkflowError, match=r"row 0 .*ends the turn with no special token"):
        encode_demonstrations(rows, encoder_of(ENDLESS), 99)
    with pytest.raises(WorkflowError, match="no chat template"):
        encoder_of("")


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (marked("#a=(TEXT$)\n"), "yes$no$"),
        (marked("#a=(TEXT)$\n"), "yes$no$"),
        (marked("#a=(TEXT$\n)"), "yes$no$"),
        (marked("#a=(TEXT\n)\n$"), "yes\n\n$no\n\n$"),
        (marked("#a=(TEXT)$\n$"), "yes$no$"),  # two ends: the model stops at the first
        (marked("(#a=TEXT$\n)"), "yes$no$"),  # the template writes the head, and not the model
        (marked("#a=(TEXT@)&\n"), "yes@&no@&"),  # no end of the model: what closes the whole
        (marked("#a=TEXT$\n"), "yes$no$"),
        (marked("#a=TEXT@&\n"), "yes@&no@&"),
    ],
)
def test_marks_say_where_a_turn_begins_and_one_rule_where_it_ends(
    template: str, trained: str, encoder_of: Any
) -> None:
    encoder = encoder_of(template)
    (item,) = encode_demonstrations([{"messages": TALK}], encoder, 99).items
    assert read(item, encoder)[1] == trained
    pair = {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": [turn("assistant", "yes")]}
    (of_pair,) = encode_pairs([pair], encoder, 99).items
    assert read(of_pair["chosen"], encoder)[1] == trained[trained.index("no") :]
    end = encoder.complaints.get("end", "")
    assert ("ends turns with &, and an answer of the model ends with $" in end) == ("&" in trained)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (marked("#a=(TEXT)\n"), "message 1: the chat template ends the turn with no special token"),
        (marked("#a=(TEXT\n)"), "message 1: .* with no special token"),
        (marked("#a=(TEXT)"), "message 1: .* with no special token"),  # the next head is no end
        (marked("#a=(TEXT)\n", closing="$"), "message 1: .* with no special token"),
        (marked("#a=TEXT$\n").replace("u={{ m.content }}", OF_USER), "what stands before the ass"),
        (marked("#a=TEXT\n"), "message 1: .* with no special token"),
    ],
)
def test_marks_without_an_end_or_of_something_else_are_refused(
    template: str, message: str, encoder_of: Any
) -> None:
    with pytest.raises(WorkflowError, match=message):
        encode_demonstrations([{"messages": TALK}], encoder_of(template), 99)


def test_a_text_that_has_its_end_gets_no_second_one(encoder_of: Any) -> None:
    encoder = encoder_of(use_chat_template=False)
    (item,) = encode_demonstrations([{"prompt": "hi", "completion": "yes$"}], encoder, 99).items
    assert read(item, encoder)[1] == "yes$"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_turn_of_weight_0_is_not_trained(template: str, encoder_of: Any) -> None:
    encoder = encoder_of(template)

    def rows(*weights: Any) -> list[dict[str, Any]]:
        turns = zip(TALK, (None, weights[0], None, weights[1]), strict=True)
        return [{"messages": [{**message, "weight": weight} for message, weight in turns]}]

    for weights, trained in (((0, 1), "no$"), ((1, 0), "yes$"), ((None, 1), "yes$no$")):
        (item,) = encode_demonstrations(rows(*weights), encoder, 99).items
        assert read(item, encoder)[1] == trained
    with pytest.raises(WorkflowError, match=r"message 3: expected a weight of 0 .* got 0\.5"):
        encode_demonstrations(rows(1, 0.5), encoder, 99)
    with pytest.raises(WorkflowError, match="each turn of the assistant has the weight 0"):
        encode_demonstrations(rows(0, 0), encoder, 99)


def test_what_the_template_or_the_tokenizer_leaves_out_is_told(encoder_of: Any) -> None:
    encoder = encoder_of()
    encode_demonstrations([{"messages": TALK}], encoder, 99)
    assert encoder.complaints == {}
    odd = [{**TALK[0], "train": False}, turn("assistant", "a B")]
    encode_demonstrations([{"messages": odd}], encoder, 99)
    assert encoder.complaints["fields"].endswith("have no effect: train")
    assert "'a B' differs from what the model gets, 'a'" in encoder.complaints["lost"]
    with pytest.raises(
        WorkflowError, match="the row has tools, of which the model's chat template"
    ):
        encode_demonstrations([{"messages": TALK, "tools": [{"name": "f"}]}], encoder, 99)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (templates.QWEN, "<|im_end|>"),
        (templates.LLAMA, "<|eot_id|>"),
        (templates.MISTRAL, "</s>"),
        (templates.GEMMA, "<end_of_turn>"),
    ],
)
def test_templates_of_common_models(template: str, end: str) -> None:
    tokenizer = templates.tokenizer_for(template)
    for ends, is_known in ((templates.end_token_ids(tokenizer), True), ((), False)):
        encoder = TurnEncoder(tokenizer, ends)
        (item,) = encode_demonstrations([{"messages": TALK}], encoder, 99).items
        tokens = zip(item["input_ids"], item["loss_mask"], strict=True)
        trained = tokenizer.decode([token for token, is_trained in tokens if is_trained])
        assert trained == f"yes{end}no{end}"
        assert ("end" in encoder.complaints) != is_known


def test_arguments_that_would_be_quoted_twice_are_refused() -> None:
    """OpenAI's files have them as text; most templates want objects."""
    encoder = TurnEncoder(templates.tokenizer_for(templates.QWEN), ())

    def rows(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [{"messages": [TALK[0], answer], "tools": [{"name": "weather"}]}]

    encode_demonstrations(rows({"city": "Rome"}), encoder, 999)
    with pytest.raises(WorkflowError, match=r"arguments of a call are text, {\"city.*json.loads"):
        encode_demonstrations(rows('{"city": "Rome"}'), encoder, 999)
