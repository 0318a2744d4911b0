"""The answers of an evaluation of its own, a line each: what a killed one goes on from.

OUT/evaluation.json   the model and the settings that the answers come from
OUT/answers.jsonl     one `KeptAnswer` a line, as they come
OUT/summary.json      the numbers of each set, and of all together
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from areal_sc.errors import CommandError, RunFolderError
from areal_sc.records.samples import Place, Sample
from areal_sc.rejection import Rejection
from areal_sc.system.durable import os_errors_as, write_atomic
from areal_sc.system.json_lines import read_json_lines, to_json
from areal_sc.workers.calls import EvaluatedText, EvaluationReply

ANSWERS: Final = "answers.jsonl"
SETTINGS: Final = "evaluation.json"
SUMMARY: Final = "summary.json"

OF_SET: Final = "set "
"""Before a set's name, among the settings that answers come from."""

OF_REWARDS: Final = "rewards of "
"""Also before a set's name: what --rescore may change, with the content of its prompts' file."""

_OF_ANSWERS: Final = ("temperature",)
"""Settings of a set which do not say what its prompts are."""


class KeptAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to one prompt.

    Attributes:
        set: name of the set.
        prompt: number of the set's prompt, from 0.
        sample: number of the answer to it, from 0.
        reward: None where the answer was rejected.
        metrics: what the workflow reports of it.
        vote: see `EvaluationReply`.
        rejected: cause, where it was rejected; `why` is the rest of it.
        text: what the model read and wrote; None: nothing came of it.
    """

    set: str
    prompt: int
    sample: int
    reward: float | None
    metrics: dict[str, float] = {}
    vote: str | None = None
    versions: tuple[int, int] = (0, 0)
    rejected: str = ""
    why: Rejection | None = None
    text: EvaluatedText | None = None

    @classmethod
    def of(cls, set_name: str, prompt: int, sample: int, reply: EvaluationReply) -> KeptAnswer:
        why = reply.rejection
        return cls(
            set=set_name,
            prompt=prompt,
            sample=sample,
            reward=reply.reward,
            metrics=reply.metrics,
            vote=reply.vote,
            versions=reply.versions,
            rejected="" if why is None else why.cause,
            why=why,
            text=reply.text,
        )

    @property
    def reply(self) -> EvaluationReply:
        """What the worker had replied."""
        return EvaluationReply(
            self.reward, self.metrics, self.versions, self.why, self.vote, self.text
        )


def read_answers(folder: Path) -> list[KeptAnswer]:
    """The answers that are kept, the last one of each place; none where there is no file.

    Raises: RunFolderError: the file cannot be read, or is damaged.
    """
    path = folder / ANSWERS
    found = read_json_lines(path, KeptAnswer) if path.exists() else []
    return list({(it.set, it.prompt, it.sample): it for it in found}.values())


def write_answers(folder: Path, answers: Iterable[KeptAnswer]) -> None:
    """Replaces the file. Raises: RunFolderError: it cannot be written."""
    write_file(folder / ANSWERS, b"".join(to_json(it) + b"\n" for it in answers))


def replace_answers(
    folder: Path, answers: Iterable[KeptAnswer], settings: Mapping[str, Any]
) -> None:
    """Replaces the answers and what they come from: at no moment do they seem to come from others.

    Killed between the two files, the folder names no rewards, and --rescore goes on.

    Raises: RunFolderError: they cannot be written.
    """
    noted = _read_settings(folder / SETTINGS)
    unchanged = {key: it if noted.get(key) == it else None for key, it in settings.items()}
    note_settings(folder, unchanged)
    write_answers(folder, answers)
    note_settings(folder, settings)


def check_settings(
    folder: Path, settings: Mapping[str, Any], *, may_differ: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compares what the answers of the folder come from with what is to come; if there are some.

    Args:
        may_differ: settings whose names begin so may have changed.
    Returns: what `note_settings` is to note.
    Raises: CommandError: the answers come from other settings. RunFolderError: they cannot be read.
    """
    noted = _read_settings(folder / SETTINGS) if (folder / ANSWERS).exists() else {}
    differing = [
        f"{key}: {noted[key]} -> {value}"
        for key, value in settings.items()
        if noted.get(key, value) != value and not key.startswith(may_differ)
    ]
    if differing:
        raise CommandError(
            f"the answers in {folder} come from other settings ({'; '.join(differing)}): name "
            "another --out, or delete them by --overwrite; where the rewards alone are others, "
            "--rescore"
        )
    return {**noted, **settings}


def note_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Notes what the answers come from. Raises: RunFolderError: it cannot be written."""
    write_file(folder / SETTINGS, msgspec.json.format(to_json(settings)) + b"\n")


def check_prompts(folder: Path, other: Path, name: str) -> None:
    """Raises: CommandError: a set of the same name has other prompts in the two folders."""
    one, two = _noted_prompts(folder, name), _noted_prompts(other, name)
    if differing := [
        f"{key}: {two.get(key)} there, {one.get(key)} here"
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
    ]:
        raise CommandError(
            f"the answers in {other} are to other prompts of {name} than those in {folder} "
            f"({'; '.join(differing)}): evaluate both models on the same ones"
        )


def _noted_prompts(folder: Path, name: str) -> dict[str, Any]:
    """What tells the prompts of a set; the path of a file does not, but its content."""
    noted = _read_settings(folder / SETTINGS)
    content = (noted.get(f"{OF_REWARDS}{name}") or {}).get("prompts")
    found = {k: it for k, it in noted.get(f"{OF_SET}{name}", {}).items() if k not in _OF_ANSWERS}
    if content:
        found["prompts"] = list(content.values())
    return found


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file as a whole. Raises: RunFolderError: it cannot be written."""
    with os_errors_as(RunFolderError, f"cannot write {path}"):
        write_atomic(path, content)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); delete the folder") from error


def as_samples(answers: Sequence[KeptAnswer]) -> list[Sample]:
    """The answers as `samples` shows them: those to a prompt together, the best one first."""
    groups = defaultdict[tuple[str, int], list[KeptAnswer]](list)
    for answer in answers:
        groups[answer.set, answer.prompt].append(answer)
    samples = []
    for group, (_, of_prompt) in enumerate(sorted(groups.items())):
        rewards = [_reward(it) for it in of_prompt]
        for answer in sorted(of_prompt, key=_reward, reverse=True):
            place = Place.best if _reward(answer) == max(rewards) else Place.worst
            place = Place.equal if max(rewards) == min(rewards) else place
            samples.append(_sample(answer, group, place, sum(rewards) / len(rewards)))
    return samples


def _reward(answer: KeptAnswer) -> float:
    return 0.0 if answer.reward is None else answer.reward


def _sample(answer: KeptAnswer, group: int, place: Place, group_reward: float) -> Sample:
    text = answer.text
    written = answer.rejected and f"[rejected: {answer.rejected}] "
    return Sample(
        step=0,
        group=group,
        place=place,
        reward=_reward(answer),
        group_reward=group_reward,
        metrics=answer.metrics,
        num_tokens=sum(len(it.token_ids) for it in text.completions) if text else 0,
        first_version=answer.versions[0],
        last_version=answer.versions[1],
        staleness=0,
        prompt=text.prompt if text else f"prompt {answer.prompt} of {answer.set}",
        answer=written + (text.answer if text else ""),
    )
