"""`--dry-run` of the task: what would fail in the run fails there, and nothing is started."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders import picture
from picture_models import save_picture_model

from areal_sc import (
    GRPOConfig,
    PPOTrainer,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    Workflow,
    load_config,
    make_actor,
    make_generator,
    make_scheduler,
    start,
)
from areal_sc.controller import dry_run
from areal_sc.errors import ArealError, ConfigError, WorkflowError
from areal_sc.sources.row_file import PromptSource
from areal_sc.workflows.base import EpisodeEngine

ROWS = [{"prompt": f"{letters}=", "answer": letters[::-1]} for letters in ("ab", "cd", "xyz")]
TOO_LONG = {"prompt": "a" * 40, "answer": "a"}


def reversed_letters(prompt: Mapping[str, Any], completion: str) -> float:
    return 0.25 + float(completion == prompt["answer"])


async def asked(prompt: Mapping[str, Any], completion: str) -> float:
    return 0.5


def lacks_a_key(prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion == prompt["solution"])


def hangs(prompt: Mapping[str, Any], completion: str) -> float:
    while True:
        time.sleep(1)


class Two(Workflow):
    """Two turns, the reward of the second."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> None:
        ids = engine.tokenizer.encode(prompt["prompt"])
        first = await engine.generate(ids)
        await engine.generate([*ids, *first.token_ids])
        await engine.score(reversed_letters, prompt, "")


class Breaks(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> None:
        raise LookupError("of its own")


class Exits(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> None:
        sys.exit(3)


class Stuck(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> None:
        await asyncio.get_running_loop().create_future()


Dry = Callable[..., GRPOConfig]


@pytest.fixture
def dry(tmp_path: Path, tiny_model_folder: Path) -> Dry:
    def load(*overrides: str, **settings: Any) -> GRPOConfig:
        values = {
            "run_dir": tmp_path / "run",
            "total_steps": 2,
            "actor.path": tiny_model_folder,
            "rollout.max_context_tokens": 32,
            "generation.max_new_tokens": 8,
            **settings,
        }
        return load_config(
            values, "--dry-run", "actor.device=cpu", "rollout.device=cpu", *overrides
        )

    return load


def fit(config: GRPOConfig, workflow: Workflow, prompts: PromptSource, **others: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        PPOTrainer(config).fit(workflow, prompts, **others)
    assert ended.value.code == 0


def test_a_trainer_shows_a_prompt_a_reward_and_what_is_left_out(
    dry: Dry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow = SingleTurnWorkflow(reversed_letters)
    config = dry("rollout.group_size=4", "generation.max_new_tokens=5")
    fit(config, workflow, [*ROWS, TOO_LONG], evaluation_prompts=iter(ROWS * 4))
    shown = capsys.readouterr().out
    assert "would start a new run" in shown
    assert "row 0 as the model gets it, 3 tokens:\n  | ab=\n" in shown
    assert "reward of the answer 'ba' to it: 1.25\n" in shown
    assert "prompts: 4 rows; 4 looked at, of 3 to 4 tokens\n  left out: 1 of them" in shown
    assert "prompts: a stream; 12 looked at" in shown
    # of 4 * (10 / 3 + 5) tokens 3 * 10 / 3
    assert shown.count("4 rows begin alike: 30% of a batch's tokens") == 1
    assert "computed once, if answers have 5\n" in shown
    assert "loss policy_gradient: tried on two rows" in shown
    assert "nothing was started" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_the_tokenizer_changes_is_told(
    dry: Dry, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"prompt": "aB=", "answer": "Ba", "of": ["C"]}]
    fit(dry(), SingleTurnWorkflow(reversed_letters), rows)
    shown = capsys.readouterr().out
    lost = "the model's tokenizer loses the text of 1 of 4 prompts: 'aB=' comes back as 'a='"
    assert f"WARNING: {lost}: it has lost b " in shown
    fit(dry(), SingleTurnWorkflow(reversed_letters), [{**row, "of": ["C"]} for row in ROWS])
    assert "WARNING" not in capsys.readouterr().out


def test_pictures_are_shown_with_their_tokens(
    dry: Dry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_picture_model(tmp_path / "model", "qwen2_5_vl")
    rows = [
        {"prompt": "how many?", "answer": "2", "images": [picture(0, 30, 20)]},
        {"prompt": "how many?", "answer": "3", "images": [picture(1, 24, 48), picture(2)]},
        {"prompt": "how many?", "answer": "1"},
    ]
    chosen = {"actor.path": folder, "rollout.max_context_tokens": 64}
    fit(dry(**chosen), SingleTurnWorkflow(asked, use_chat_template=True), rows)
    shown = capsys.readouterr().out
    assert "row 0 as the model gets it, 24 tokens:\n  picture 0: 30 x 20 pixels, " in shown
    assert f"{len(rows[0]['images'][0])} bytes, 8 tokens\n" in shown
    assert "  | u:<|vision_start|><|image_pad|><|vision_end|>how many?<eos>a:\n" in shown
    assert "prompts: 3 rows; 3 looked at, of 14 to 36 tokens" in shown
    torn = [{**row, "images": [picture(0)[:900]]} for row in rows]
    with pytest.raises(WorkflowError, match=r"3 of 3 prompts cannot be given .* is damaged"):
        PPOTrainer(dry(**chosen)).fit(SingleTurnWorkflow(asked, use_chat_template=True), torn)
    with pytest.raises(WorkflowError, match="the row has pictures, and the model reads none"):
        PPOTrainer(dry()).fit(SingleTurnWorkflow(asked), rows)


def test_prompts_that_the_tokenizer_loses_are_refused(dry: Dry) -> None:
    rows = [ROWS[0], *({"prompt": f"a {letter}=", "answer": "a"} for letter in "bcde")]
    with pytest.raises(ConfigError, match="loses the text of 4 of 5 prompts: 'a b=' ") as refusal:
        PPOTrainer(dry()).fit(SingleTurnWorkflow(asked), rows)
    assert refusal.value.exit_code == 2


def test_an_answer_that_cannot_be_written_is_told(
    dry: Dry, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(dry(), SingleTurnWorkflow(asked), [{"prompt": "ab=", "answer": "B"}])
    assert "WARNING: the model cannot write this answer by its tokens" in capsys.readouterr().out


def test_an_end_that_is_not_the_templates(
    dry: Dry, tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    chat, plain = (SingleTurnWorkflow(asked, use_chat_template=it) for it in (True, False))
    chosen = {"actor.path": folder}
    with pytest.raises(ConfigError, match=r"writes '<pad>' .* generation\.stop_token_ids=\[0\]"):
        PPOTrainer(dry(**chosen)).fit(chat, ROWS)
    fit(dry("generation.stop_token_ids=[0]", **chosen), chat, ROWS)
    fit(dry(**chosen), plain, ROWS)


def wrong_way_round(prompt: Mapping[str, Any], completion: str) -> float:
    return -float(completion == prompt["answer"])


def mostly_long(prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion == prompt["answer"]) + len(completion)


def a_little_short(prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion == prompt["answer"]) - 0.9 * len(completion)


def of_the_answer_alone(prompt: Mapping[str, Any], completion: str) -> float:
    return float(sum(map(ord, completion)))


def right_once(prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion != prompt["answer"] or completion in ("yx", "c"))


async def by_chance(prompt: Mapping[str, Any], completion: str) -> float:
    return random.random()


ANSWERED = [{"prompt": f"{it}=", "answer": it[::-1]} for it in ("a", "b", "c", "vw", "xy", "abcd")]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (wrong_way_round, "wrong way round: to row 0, 'a' gets -1 and 'dcba' 0; to row 5, 'dcba'"),
        (mostly_long, "counts more than being right: to row 0, 'a' gets 2 and 'dcba' 4; to row 5"),
    ],
)
def test_a_reward_that_pays_wrong_answers_more(dry: Dry, reward: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"gets less reward than a wrong one: .*{said}"):
        PPOTrainer(dry()).fit(SingleTurnWorkflow(reward), ANSWERED)


@pytest.mark.parametrize(
    "reward",
    [reversed_letters, a_little_short, of_the_answer_alone, right_once, by_chance, asked],
)
def test_a_reward_of_which_that_is_not_known(dry: Dry, reward: Any) -> None:
    fit(dry(), SingleTurnWorkflow(reward), ANSWERED)


def test_a_right_answer_that_is_a_number(dry: Dry, capsys: pytest.CaptureFixture[str]) -> None:
    fit(dry(), SingleTurnWorkflow(asked), [{"prompt": "ab=", "answer": 42}])
    assert "reward of the answer '42' to it: 0.5\n" in capsys.readouterr().out


UNGUARDED = """
from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config
def reward(prompt, completion):
    return 0.5
PPOTrainer(load_config()).fit(SingleTurnWorkflow(reward), [{"prompt": "ab="}])
"""


def test_a_script_without_its_guard_is_told_as_by_a_worker(
    dry: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    main = ModuleType("a_script_that_was_started")
    main.__file__ = str(script)
    head, _, _ = UNGUARDED.rpartition("PPOTrainer(")
    exec(compile(head, script, "exec"), vars(main))
    monkeypatch.setitem(sys.modules, main.__name__, main)
    with pytest.raises(WorkflowError, match=r"ConfigError: .* under `if __name__ == "):
        PPOTrainer(dry()).fit(SingleTurnWorkflow(main.reward), ROWS)
    assert "AREAL_SC_SCRIPT" not in os.environ


def test_a_loop_of_ones_own_ends_at_its_first_batch(
    dry: Dry, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dry()
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    with start(actor, rollout):
        assert actor.version == 0
        with pytest.raises(SystemExit) as ended:
            rollout.prepare_batch(ROWS, SingleTurnWorkflow(asked))
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "reward of the answer 'ba' to it: 0.5\n" in shown
    assert "3 rows; 3 looked at" in shown


@pytest.mark.parametrize(
    ("workflow", "prompts", "said"),
    [
        (SingleTurnWorkflow(lacks_a_key), ROWS, r"KeyError at test_dry_run.py:\d+: .*'solution'"),
        (SingleTurnWorkflow(hangs), ROWS, "took longer than 0.5 s"),
        (SingleTurnWorkflow(asked, use_chat_template=True), ROWS, "has no chat template"),
        (SingleTurnWorkflow(asked, prompt_key="question"), ROWS, "no 'question', only"),
        (SingleTurnWorkflow(asked), [TOO_LONG] * 3, "all 3 prompts .* too long"),
        (
            SingleTurnWorkflow(asked),
            [*ROWS, *[{"prompt": 7}] * 4],
            "4 of 7 prompts cannot be given",
        ),
        (Breaks(), ROWS, "3 of 3 prompts cannot .* LookupError: of its own"),
        (Breaks(), ROWS * 99, "8 of 8 prompts cannot .* LookupError: of its own"),
        (Stuck(), ROWS * 99, "row 0: the episode asked the model nothing in 0.2 s"),
        (Two(), ROWS, "the workflow returned None"),
        (Exits(), ROWS, r"3 of 3 prompts cannot .* SystemExit at test_dry_run.py:\d+"),
    ],
    ids=[
        "raises",
        "hangs",
        "no template",
        "no key",
        "too long",
        "types",
        "workflow",
        "many",
        "stuck",
        "returns",
        "exits",
    ],
)
def test_a_task_that_cannot_be_run(
    dry: Dry,
    workflow: Workflow,
    prompts: PromptSource,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dry_run, "EPISODE_LIMIT_S", 0.2 if isinstance(workflow, Stuck) else 60.0)
    limit_s = 0.5 if "0.5 s" in said else 60.0
    with pytest.raises(WorkflowError, match=said) as refusal:
        PPOTrainer(dry(f"rollout.reward_timeout_s={limit_s}")).fit(workflow, prompts)
    assert refusal.value.exit_code == 7


def test_a_model_whose_answers_have_no_end(
    dry: Dry, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(tiny_model_folder, folder)
    for file in folder.glob("*.json"):
        content = json.loads(file.read_text())
        content |= {key: None for key in content if key.startswith("eos_token")}
        file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"no token ends an answer: .* generation\.stop_token_ids"
    ):
        PPOTrainer(dry(**{"actor.path": folder})).fit(SingleTurnWorkflow(asked), ROWS)
    for words in ("generation.stop_token_ids=[1]", "generation.max_new_tokens=1"):
        fit(dry(words, **{"actor.path": folder}), SingleTurnWorkflow(asked), ROWS)
    assert "an answer ends with '$'\n" in capsys.readouterr().out
    stopped = dry("generation.stop=[zz,z]", **{"actor.path": folder})
    fit(stopped, SingleTurnWorkflow(reversed_letters), ROWS)
    shown = capsys.readouterr().out
    assert "an answer ends with 'zz' or 'z'\n" in shown
    assert "reward of the answer 'ba' to it: 1.25\n" in shown
    special = dry("generation.stop=['<pad>']", **{"actor.path": folder})
    with pytest.raises(ConfigError, match=r"generation\.stop: '<pad>' is a special token"):
        PPOTrainer(special).fit(SingleTurnWorkflow(asked), ROWS)


LOSSES = """
from areal_sc.algorithms.losses import Metric
def scaled(tokens, *, scale):
    return -scale * (tokens.logprobs * tokens.fields["advantages"]).sum(), {}
def alone(tokens): return tokens.logprobs.sum()
def constant(tokens): return tokens.logprobs.sum().detach(), {}
def plain(tokens): return tokens.logprobs.sum(), {"mean": 1.0}
def raises(tokens): return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scaled", "missing a required argument: 'scale'"),
        ("alone", "expected a scalar tensor and a dict of metrics, got tensor"),
        ("constant", "expected a scalar loss that depends on log-probabilities or entropies"),
        ("plain", "metric mean: expected a Metric of one number, got 1.0"),
        ("raises", r"tried on two rows, .* raised ZeroDivisionError: .* at losses_of_a_user.py:8"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_a_loss_is_tried_on_one_row(
    dry: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "losses_of_a_user", raising=False)
    loss = f"actor.ppo.loss=losses_of_a_user:{name}"
    with pytest.raises(ArealError, match=said) as refusal:
        fit(dry(loss), SingleTurnWorkflow(asked), ROWS[:1])
    assert isinstance(refusal.value, ConfigError)
    if name == "scaled":
        right = "+actor.ppo.loss_settings.scale=2"
        fit(dry(loss, right), SingleTurnWorkflow(asked), ROWS[:1])
