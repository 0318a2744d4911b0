"""Tokenizers in the shapes of common families, each trained here on a few texts, and broken ones.

What a family's `tokenizer.json` is made of (normalizer, pre-tokenizer, model, decoder, special
tokens), its chat template and the tokens that end an answer are those of its public files, in
short. The vocabulary is a small one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chat_templates as templates
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "How many is 12 + 30? Answer with a number.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May.",
    "def f(x):\n    return x ** 2\n\nWhat is f(3)?",
    'Let $x^2 + y = \\frac{1}{2}$. Find {x, y} in [0, 1]; use the "chain rule" #### 7',
    "Österreich hat 9 Länder. Ça va \u2013 naïve café, “quoted” … ½ kg",
    "北京的首都是什么\uff1f 3 个 苹果",
    "Ответь на вопрос: сколько будет 2 + 2?",
    "Tabs\tand   many spaces  at the end ",
)
"""What a task may ask."""

RARE = "An emoji 😀, a rune ᚠ"
"""What a vocabulary without bytes does not have: one row that is lost is no broken tokenizer."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OLMO = (
    "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|endoftext|>{% else %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COHERE = (
    "<BOS>{% for m in messages %}<|START|><|{{ 'CHATBOT' if m.role == 'assistant' else 'USER' }}|>"
    "{% if m.role == 'assistant' %}<|RESPONSE|>{{ m.content }}<|RESPONSE_END|>{% else %}"
    "{{ m.content }}{% endif %}<|END|>{% endfor %}"
    "{% if add_generation_prompt %}<|START|><|CHATBOT|><|RESPONSE|>{% endif %}"
)
PLAIN_ROLES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
EXAONE = (
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}{% if m.role == 'assistant' %}"
    "[|endofturn|]{% endif %}\n{% endfor %}{% if add_generation_prompt %}[|assistant|]{% endif %}"
)
MINIMAX = (
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)

_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
)


@dataclass(frozen=True)
class Made:
    """A tokenizer and what its model's folder says beside it.

    Attributes:
        backend: trained.
        specials: special tokens beyond the end.
        end: `eos_token`; "": none.
        more_ends: of `generation_config.json`.
        template: of chats; "": none.
        too_small: the model has no room for the special tokens.
    """

    backend: Tokenizer
    specials: tuple[str, ...] = ()
    end: str = "<|endoftext|>"
    more_ends: tuple[str, ...] = ()
    template: str = ""
    too_small: bool = False

    def save(self, folder: Path) -> None:
        """Writes a model folder without weights."""
        specials = [*self.specials, *self.more_ends]
        self.backend.add_special_tokens([AddedToken(it, normalized=False) for it in specials])
        num_trained = self.backend.get_vocab_size()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.backend, eos_token=self.end or None
        )
        if self.template:
            tokenizer.chat_template = self.template
        tokenizer.save_pretrained(folder)
        config: dict[str, Any] = {
            "model_type": "llama",
            "vocab_size": num_trained if self.too_small else len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": None,
        }
        (folder / "config.json").write_text(json.dumps(config))
        if self.more_ends:
            ends: Any = tokenizer.convert_tokens_to_ids(list(self.more_ends))
            path = folder / "generation_config.json"
            path.write_text(json.dumps({"eos_token_id": ends}))


def byte_level(
    *before: Any, normalizer: Any = None, prefix: bool = False, decodes: bool = True
) -> Tokenizer:
    """GPT-2's bytes, behind splits of the family's own."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer or normalizers.Sequence([])
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not before)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_])
    if decodes:
        made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(made, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return made


def sentence_pieces(*, prefix: bool = True, is_legacy: bool = True) -> Tokenizer:
    """Pairs with bytes for what they do not know, as of Llama 2 and Gemma."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if is_legacy or not prefix:
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        if not prefix:
            made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * prefix)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(made, trainers.BpeTrainer(vocab_size=700, special_tokens=specials[:3]))
    known = json.loads(made.to_str())
    vocab = known["model"]["vocab"]
    for name in specials[3:]:
        vocab.setdefault(name, len(vocab))
    return Tokenizer.from_str(json.dumps(known))


def unigram(*, normalizer: Any = None) -> Tokenizer:
    """SentencePiece's unigrams, which fold characters and white space."""
    made = Tokenizer(models.Unigram())
    collapse = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizer or normalizers.Sequence([normalizers.NFKC(), collapse])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    _train(made, trainer)
    return made


def word_pieces(
    *,
    lowercase: bool = True,
    texts: Sequence[str] = TEXTS,
    decodes: bool = True,
    vocab_size: int = 500,
) -> Tokenizer:
    """BERT's, which writes white space around signs and Han characters."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if decodes:
        made.decoder = decoders.WordPiece(cleanup=False)
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    _train(made, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=specials), texts)
    return made


def characters(known: str, *, split: Any = None) -> Tokenizer:
    """One token a character, and the end for all others."""
    made = Tokenizer(models.WordLevel({it: i for i, it in enumerate(["$", *known])}, "$"))
    every = pre_tokenizers.Split("", "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, every]) if split else every
    made.decoder = decoders.Fuse()
    return made


def words() -> Tokenizer:
    """One token a word; no decoder."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    _train(made, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    return made


def digits_alone() -> Tokenizer:
    """Pairs over digits and signs, without bytes: all other characters vanish."""
    made = Tokenizer(models.BPE())
    made.decoder = decoders.Fuse()
    _train(made, trainers.BpeTrainer(special_tokens=["</s>"]), ["0123456789 +-=?." * 9])
    return made


def with_normalizer(made: Tokenizer, *steps: Any) -> Tokenizer:
    made.normalizer = normalizers.Sequence([made.normalizer, *steps])
    return made


def with_begin(made: Tokenizer, begin: str) -> Tokenizer:
    """One that writes a token before each text."""
    made.add_special_tokens([begin])
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
    )
    return made


def _train(made: Tokenizer, trainer: Any, texts: Sequence[str] = TEXTS) -> None:
    trainer.show_progress = False
    made.train_from_iterator(list(texts) * 4, trainer)


_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_IM = ("<|im_start|>",)
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_ONE_DIGIT = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
_HAN = pre_tokenizers.Split(Regex("[一-龥]+"), "isolated")

FAMILIES: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: Made(byte_level()),
    "gpt_neox": lambda: Made(byte_level(normalizer=normalizers.NFC())),
    "opt": lambda: Made(with_begin(byte_level(), "</s>"), end="</s>"),
    "bloom": lambda: Made(
        byte_level(pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。])]+"), "isolated")),
        end="</s>",
    ),
    "falcon": lambda: Made(byte_level(pre_tokenizers.Punctuation("contiguous"), _DIGITS)),
    "starcoder2": lambda: Made(byte_level(_DIGITS)),
    "codegen": lambda: Made(byte_level(prefix=True)),
    "qwen2": lambda: Made(
        byte_level(pre_tokenizers.Split(_WORDS, "isolated"), normalizer=normalizers.NFC()),
        ("<|endoftext|>", *_IM),
        "<|im_end|>",
        template=templates.QWEN,
    ),
    "qwen3": lambda: Made(
        byte_level(pre_tokenizers.Split(_WORDS, "isolated"), normalizer=normalizers.NFC()),
        ("<|endoftext|>", *_IM),
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        templates.QWEN_THINKING,
    ),
    "llama": lambda: Made(sentence_pieces(), ("<s>",), "</s>", template=LLAMA2),
    "llama, not legacy": lambda: Made(
        sentence_pieces(is_legacy=False), ("<s>",), "</s>", template=LLAMA2
    ),
    "llama3": lambda: Made(
        with_begin(byte_level(pre_tokenizers.Split(_WORDS, "isolated")), "<s>"),
        _HEADERS,
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        templates.LLAMA,
    ),
    "mistral": lambda: Made(
        sentence_pieces(), ("<s>", "[INST]", "[/INST]"), "</s>", template=templates.MISTRAL
    ),
    "ministral3": lambda: Made(
        byte_level(pre_tokenizers.Split(_WORDS, "isolated")),
        ("<s>", "[INST]", "[/INST]"),
        "</s>",
        template=templates.MISTRAL,
    ),
    "gemma": lambda: Made(
        sentence_pieces(prefix=False),
        ("<start_of_turn>",),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        templates.GEMMA,
    ),
    "phi3": lambda: Made(
        sentence_pieces(), _ROLES, "<|endoftext|>", ("<|endoftext|>", "<|end|>"), PHI3
    ),
    "gpt_oss": lambda: Made(
        byte_level(pre_tokenizers.Split(_WORDS, "isolated")),
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        "<|return|>",
        ("<|return|>", "<|endoftext|>"),
        HARMONY,
    ),
    "deepseek_v3": lambda: Made(
        byte_level(_ONE_DIGIT, _HAN, pre_tokenizers.Split(_WORDS, "isolated")),
        ("<s>", "<|User|>", "<|Assistant|>", "<think>"),
        "</s>",
        template=templates.DEEPSEEK,
    ),
    "glm4": lambda: Made(
        byte_level(pre_tokenizers.Split(_WORDS, "isolated")),
        ("[gMASK]", "<|assistant|>"),
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        templates.GLM,
    ),
    "olmo2": lambda: Made(byte_level(), _ROLES, template=OLMO),
    "cohere2": lambda: Made(
        byte_level(_DIGITS, normalizer=normalizers.NFC()),
        ("<BOS>", "<|START|>", "<|USER|>", "<|CHATBOT|>", "<|RESPONSE|>", "<|RESPONSE_END|>"),
        "<|END|>",
        template=COHERE,
    ),
    "granite": lambda: Made(
        byte_level(), ("<|start_of_role|>", "<|end_of_role|>"), "<|end_of_text|>", template=GRANITE
    ),
    "exaone4": lambda: Made(
        byte_level(), ("[|user|]", "[|assistant|]"), "[|endofturn|]", template=EXAONE
    ),
    "minimax_m2": lambda: Made(byte_level(), ("]~b]",), "[e~[", template=MINIMAX),
    "stablelm": lambda: Made(byte_level(), _IM, "<|im_end|>", template=CHATML),
    "hunyuan_v1_dense": lambda: Made(byte_level(), _ROLES, "<|eos|>", template=""),
    "a base model with plain roles": lambda: Made(byte_level(), template=PLAIN_ROLES),
    "xglm": lambda: Made(unigram(), end="</s>"),
    "bert": lambda: Made(word_pieces(), end="[SEP]"),
    "gpt2 of BERT's pieces": lambda: Made(word_pieces(lowercase=False), end="[SEP]"),
    "words": lambda: Made(words(), end="</s>"),
    "characters": lambda: Made(characters("".join(sorted({*"".join(TEXTS)} - {"$"}))), end="$"),
}
"""Family -> its tokenizer; none is broken."""

BROKEN: dict[str, tuple[Callable[[], Made], str]] = {
    "spaces are not split off as tokens": (
        lambda: Made(
            characters(
                "".join(sorted({*"".join(TEXTS)} - {"$"})), split=pre_tokenizers.WhitespaceSplit()
            ),
            end="$",
        ),
        "lost the white space between words",
    ),
    "unknown characters are the end": (
        lambda: Made(characters(" abcdefghijklmnopqrstuvwxyz0123456789>"), end="$"),
        "has lost",
    ),
    "no decoder of bytes": (lambda: Made(byte_level(decodes=False)), "has got g"),
    "no decoder of pieces": (
        lambda: Made(word_pieces(decodes=False, vocab_size=200), end="[SEP]"),
        "has got #",
    ),
    "letters vanish": (lambda: Made(digits_alone(), end="</s>"), "has lost"),
    "trained on other letters": (
        lambda: Made(word_pieces(texts=["0 1 2 3 4 5 6 7 8 9"]), end="[SEP]"),
        "has lost",
    ),
    "a normalizer that drops digits": (
        lambda: Made(with_normalizer(byte_level(), normalizers.Replace(Regex("[0-9]"), ""))),
        "has lost",
    ),
    "a normalizer that drops spaces": (
        lambda: Made(unigram(normalizer=normalizers.Replace(Regex(r"\s+"), "")), end="</s>"),
        "lost the white space between words",
    ),
    "no end": (lambda: Made(byte_level(), end=""), "no token ends an answer"),
    "an end beyond the model's vocabulary": (
        lambda: Made(byte_level(), end="<|done|>", too_small=True),
        "the model samples tokens below",
    ),
    "a base model's end with a template for chats": (
        lambda: Made(byte_level(), (*_IM, "<|im_end|>"), template=CHATML),
        r"writes '<\|im_end\|>' behind it.*generation\.stop_token_ids=\[",
    ),
    "phi3 without its generation_config": (
        lambda: Made(sentence_pieces(), (*_ROLES, "<|end|>"), "<|endoftext|>", template=PHI3),
        r"writes '<\|end\|>' behind it",
    ),
    "llama3 that ends as its base model": (
        lambda: Made(
            byte_level(), (*_HEADERS, "<|eot_id|>"), "<|end_of_text|>", template=templates.LLAMA
        ),
        r"writes '<\|eot_id\|>' behind it",
    ),
    "a template of another tokenizer": (
        lambda: Made(sentence_pieces(), ("<s>",), "</s>", template=CHATML),
        r"writes '<\|im_end\|>' behind it.*generation\.stop=\[",
    ),
}
"""What is broken -> the tokenizer, and what is told of it."""
