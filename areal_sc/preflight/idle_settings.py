"""Settings that a run does not read, though they were set, and those that are seldom meant.

When a setting is idle stands in its own line of the schema, or in that of a section around it:

    rejection_window: int = setting(128, ..., idle=("max_rejection_rate=1",))

It is idle where one of these conditions holds. A condition is one or more of the following, joined
by `and`. Keys are those of the same section, after a dot those of the section around it, or else
those of the whole run.

    KEY=VALUE,VALUE      the setting has one of these values; nothing: it is empty
    KEY!=VALUE,VALUE     it has none of them
    KEY lacks FIELD      the loss that KEY names is known not to read this field of the rows
    any other words      a fact that the settings do not tell, see `ScriptFacts`

Behind `: ` may stand why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple, get_type_hints

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.fields import IDLE, TEMPLATE, has_place, is_section, taken_from, value_at
from areal_sc.config.loading.presets import preset_settings, preset_warnings
from areal_sc.config.schema import GRPOConfig, RolloutEngine
from areal_sc.errors import ModelError
from areal_sc.sizing.model_context import num_parameters

_COMPARED: Final = re.compile(r"(\.?[\w.]+)(!?=)(.*)")
_LACKS: Final = re.compile(r"([\w.]+) lacks (\w+)")


@dataclass(frozen=True)
class ScriptFacts:
    """What the script does with its settings.

    Attributes:
        generates: False: it trains on rows of a data set.
        has_agents: its workflow runs agents.
        evaluates: it has prompts for evaluations, beside those that the settings name.
    """

    generates: bool = True
    has_agents: bool = False
    evaluates: bool = False

    def holds(self, words: str, config: GRPOConfig) -> bool:
        """Whether a fact of a condition holds."""
        evaluation = config.evaluation
        is_told = self.evaluates or bool(evaluation.sets or evaluation.every_steps)
        facts = {
            "in a run on rows of a data set": lambda: not self.generates,
            "without a workflow of agents": lambda: not self.has_agents,
            "without prompts for evaluations": lambda: self.generates and not is_told,
        }
        return facts[words]()


class _Setting(NamedTuple):
    """Where a setting is, and when it is idle.

    Attributes:
        template: `${key}` that its value is taken from, unless it is given; "": its default.
        conditions: of itself and the sections around it, the outermost first: the prefix of the
            keys in the section where it stands, and its text.
    """

    key: str
    template: str
    conditions: tuple[tuple[str, str], ...]


def idle_settings(config: GRPOConfig, facts: ScriptFacts) -> Iterator[str]:
    """A sentence for each cause: which settings have no effect, and why."""
    defaults, preset = _defaults(), preset_settings(config.actor.algorithm)
    of_cause = dict[str, list[str]]()
    for key, template, conditions in _all_settings():
        value = value_at(config, key)
        unset = preset.get(key, value_at(defaults, key))
        if value == (taken_from(config, template) if template else unset):
            continue
        for prefix, condition in conditions:
            if cause := _cause(config, prefix, condition, facts):
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                of_cause.setdefault(cause, []).append(f"{key}={shown}")
                break
    for cause, given in of_cause.items():
        yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {cause}"


def idle_in_script(config: GRPOConfig, facts: ScriptFacts) -> list[str]:
    """What is idle by what the script does, which nobody knew when settings were read."""
    known = {*idle_settings(config, replace(facts, has_agents=True, evaluates=True))}
    return [text for text in idle_settings(config, facts) if text not in known]


@cache
def _defaults() -> GRPOConfig:
    return GRPOConfig()


@cache
def _all_settings() -> tuple[_Setting, ...]:
    return tuple(_settings(GRPOConfig))


def _settings(
    section: type[Any],
    prefix: str = "",
    origin: str = "",
    conditions: tuple[tuple[str, str], ...] = (),
) -> Iterator[_Setting]:
    """Each setting of a section that has its place there.

    Args:
        prefix: of the keys in the section.
        origin: the section that its settings are taken from; "": there is none.
        conditions: of the sections around.
    """
    annotations = get_type_hints(section)
    for found in fields(section):
        key, annotation = f"{prefix}{found.name}", annotations[found.name]
        if not has_place(found):
            continue
        template = found.metadata.get(TEMPLATE, "")
        if origin:
            template = f"${{{origin}.{found.name}}}"
        own = *conditions, *((prefix, text) for text in found.metadata.get(IDLE, ()))
        if not is_section(annotation):
            yield _Setting(key, template, own)
        else:
            yield from _settings(annotation, f"{key}.", template[2:-1], own)


def _cause(config: GRPOConfig, prefix: str, condition: str, facts: ScriptFacts) -> str:
    """Why a setting is idle, in words: the condition as it holds; "" where it does not."""
    text, _, why = condition.partition(": ")
    words = []
    for part in text.split(" and "):
        if compared := _COMPARED.fullmatch(part):
            key = _whole_key(config, prefix, compared[1])
            value = _shown(value_at(config, key))
            is_met = (value in compared[3].split(",")) is (compared[2] == "=")
            words.append(f"with {key}={value}" if value else f"without {key}")
        elif lacking := _LACKS.fullmatch(part):
            key = _whole_key(config, prefix, lacking[1])
            read = loss_of(value_at(config, key.rpartition(".")[0])).fields
            is_met = read is not None and lacking[2] not in read
            words.append(f"with {key}={value_at(config, key)}")
        else:
            is_met = facts.holds(part, config)
            words.append(part)
        if not is_met:
            return ""
    return " and ".join(dict.fromkeys(words)) + (f": {why}" if why else "")


def _whole_key(config: GRPOConfig, prefix: str, key: str) -> str:
    """Where a key of a condition is among the settings of the run."""
    if key.startswith("."):
        return f"{prefix[:-1].rpartition('.')[0]}{key}"
    section = value_at(config, prefix[:-1]) if prefix else config
    return f"{prefix}{key}" if hasattr(section, key.partition(".")[0]) else key


def _shown(value: Any) -> str:
    """A value as conditions have it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    return str(value) if value else ""


SMALL_MODEL_PARAMETERS = 1_000_000_000
"""The embedded engine is made for models below this size."""


def settings_warnings(config: GRPOConfig, facts: ScriptFacts) -> Iterator[str]:
    """A sentence for each, with the setting and its value."""
    yield from idle_settings(config, facts)
    yield from _step_warnings(config)
    if not facts.generates:
        return
    yield from _distribution_warnings(config)
    yield from preset_warnings(config)
    yield from _engine_warnings(config)


def _distribution_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings by which the trained distribution is not the one that was sampled from."""
    generation = config.generation
    cuts = {"top_p": generation.top_p < 1, "top_k": generation.top_k > 0}
    names = [f"generation.{name}={value_at(generation, name)}" for name in cuts if cuts[name]]
    if names:
        yield (
            f"{' and '.join(names)}: the sampled distribution is cut, and the trainer's is over "
            "the whole vocabulary, since it is not told which tokens were kept. So behavior_kl and "
            "mismatch also measure what was cut off; pi / pi_behav is smaller by the share that "
            "was kept, and with actor.ppo.clip_center=behavior more tokens are clipped; a token "
            "that is always cut off is never tried"
        )


def _step_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that take no effect in so few training steps."""
    optimizer, defaults = config.actor.optimizer, GRPOConfig()
    if 0 < optimizer.total_steps <= optimizer.num_warmup_steps:
        yield (
            f"actor.optimizer.warmup_steps={optimizer.warmup_steps:g} is not below "
            f"actor.optimizer.total_steps={optimizer.total_steps}: lr is never reached"
        )
    for section in ("evaluation", "checkpoint"):
        every = value_at(config, f"{section}.every_steps")
        is_default = every == value_at(defaults, f"{section}.every_steps")
        if every > config.total_steps and not is_default:
            yield (
                f"{section}.every_steps={every} has no effect with total_steps={config.total_steps}"
            )


def _engine_warnings(config: GRPOConfig) -> Iterator[str]:
    """A model that the embedded engine takes, and is not made for."""
    rollout, number = config.rollout, 0
    if rollout.engine == RolloutEngine.local:
        with suppress(ModelError):  # it is being written
            number = num_parameters(rollout)
    if number > SMALL_MODEL_PARAMETERS:
        yield (
            f"rollout.engine=local is made for small models, and {rollout.path} has "
            f"{number / 1e9:.1f} billion parameters: sglang or vllm generate far faster"
        )
