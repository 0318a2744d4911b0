"""Mathematics as models and datasets write it, brought to one way to write each thing."""

from __future__ import annotations

import re
import unicodedata

MATH_CHARACTERS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DOT OPERATOR}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{SQUARE ROOT}": "sqrt",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{UNION}": r"\cup ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{DEGREE SIGN}": r"^\circ",
}
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_FRACTIONS = re.compile("(?=[\u00bc-\u00be\u2150-\u215e])")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname|rm|textit)\s*\{([^{}]*)\}"
)

_LAYOUT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|limits|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:lbrace|rbrace)(?![A-Za-z])", lambda m: "\\{" if "l" in m.group() else "\\}"),
        (r"(?<=\d)(?:\\[,;: ]|\{,\}|\\,|\{\\,\})(?=\d{3}(?!\d))", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: !]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\?%|\bper\s?cent(?:age)?\b|\bpct\b", "%"),
        (r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\\(|\\\)|\\\[|\\\]|\$\$", " "),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),
        (r"\\\$", "$"),
        (r"(?<![\w)}\]])\*\*|\*\*(?![\w({\\])|`", ""),
        (r"\\([lg]e)q(?:slant)?(?![A-Za-z])", r"\\\1"),
        (r"\.\.\.", "\u2026"),
    )
]
_NOTATION = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+\^", "^"),
        (r"^(?:[A-Za-z]\s*)\\in(?![A-Za-z])", ""),
        (r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(?:minus|negative)\s+(?=\d)", "-"),
        (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt\s*\{", r"\\sqrt{"),
        (r"(?<![A-Za-z\\])sqrt\s*(\d+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
        (r"\\frac\s*(\d|[a-z])\s*(\d|[a-z])(?![A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d|[a-z])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d|[a-z])", r"\1{\2}"),
        (r"\\sqrt\s*(\d|[a-z])(?![A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\d.^{_/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
        (r"\\log\s*_\s*(\w)", r"\\log_{\1}"),
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*([-+]?\d+(?:\.\d+)?)", r"^{\1}"),
        (
            r"(?<![\d.A-Za-z])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?)\+?(\d+)(?![\w.])",
            r"\1\\cdot10^{\2\3}",
        ),
        (r"(?<![\d,.])(\d{1,3}(?: \d{3})+)(?=\.\d|$)", lambda m: m.group().replace(" ", "")),
        (r"(?<![.,\d])\.(?=\d)", "0."),
    )
]
_LEAD = re.compile(
    r"(?:(?:the|an?|is|are|equals|about|approximately|roughly)\b|[:=,~*\s]|\\approx\b)+",
    re.IGNORECASE,
)


def plain_latex(text: str) -> str:
    """The same mathematics without layout: one way to write each thing."""
    for character, latex in MATH_CHARACTERS.items():
        text = text.replace(character, latex)
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match.group()}}}", text)
    text = unicodedata.normalize("NFKC", _FRACTIONS.sub(" ", text))
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{FRACTION SLASH}", "/")
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    text = _without_text_commands(text)
    text = text.strip()
    if lead := _LEAD.match(text):
        text = text[lead.end() :]
    text = text.strip().rstrip(".,;:* \n")
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    return text.strip()


def plain_words(text: str) -> str:
    """Letters and digits alone, in lower case and without an article: to compare words by."""
    text = _without_text_commands(unicodedata.normalize("NFKC", text)).casefold()
    words = re.sub(r"[^\w+\-*/=<>]+", " ", text).strip(" _").split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) and words[1:] else words)


def _without_text_commands(text: str) -> str:
    return _TEXT_COMMAND.sub(r" \1 ", text)
