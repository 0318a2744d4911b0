"""Chat templates in the formats of common models, and a tokenizer with their special tokens."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_HERMES_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_HERMES_ANSWERS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)

QWEN = (
    _HERMES_TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _HERMES_ANSWERS
    + "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _HERMES_CALLS + "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with Hermes' tool calls."""

QWEN_THINKING = (
    _HERMES_TOOLS + "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}" + _HERMES_ANSWERS + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last "
    "and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content or '' }}" + _HERMES_CALLS + "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The same with reasoning, which it drops before the last question of the user."""

LLAMA = (
    "<s>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}\n\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3: calls are JSON without a marker, and texts are trimmed."""

MISTRAL = (
    "<s>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
"""Mistral: the tools stand before the last question, calls are a list, and have ids."""

GEMMA = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma: no system, and no tools."""

DEEPSEEK = (
    "<s>{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|output|>{{ m.content }}<|output_end|>"
    "{% if loop.last and add_generation_prompt %}<|Assistant|><think>\n{% endif %}{% else %}"
    "<|Assistant|>{{ (m.content or '').split('</think>')[-1] }}"
    "{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}<|call|>function<|sep|>"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}<|call_end|>"
    "{% endfor %}<|calls_end|>{% endif %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|><think>\n"
    "{% endif %}"
)
"""DeepSeek R1: arguments are text; the reasoning begins in the prompt, and is always dropped."""

GLM = (
    "[gMASK]{% for t in tools or [] %}<|system|>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""GLM: the mark of who speaks next ends an answer, and arguments stand between tags."""

NUMBERED = (
    "{% for m in messages %}{{ loop.index }}|{{ m.role }}|{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}{{ messages | length + 1 }}|assistant|{% endif %}"
)
"""One whose text behind an answer depends on what came before."""

ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|user|>", "<|observation|>")
_SPECIAL = re.compile(r"<\|[\w]+\|>|\[/?[A-Z_]+\]|\[gMASK\]|<start_of_turn>|<end_of_turn>|</?s>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def tokenizer_for(template: str) -> Any:
    """Byte-level pairs over the template's own text; its special tokens are tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = sorted({*ENDS, *_SPECIAL.findall(template)})
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    texts = [template, "the answer is: sunny in Paris, rain in Rome and Oslo tomorrow. " * 20]
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False) for tag in _TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def end_token_ids(tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(ENDS)))
