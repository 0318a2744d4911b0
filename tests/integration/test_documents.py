"""README.md, its neighbours and docs/: each block of code and each command is run, here or by
another test."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import fields, replace
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from integration.agent_forks import environment_of_scripts
from integration.run_process import LIMIT_S, REPOSITORY
from markdown_it import MarkdownIt
from markdown_it.token import Token

import areal_sc
from areal_sc import errors
from areal_sc.algorithms.advantages import AdvantageRows
from areal_sc.algorithms.loss_tokens import loss_tokens_of
from areal_sc.algorithms.policy_gradient import policy_gradient
from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.servers.completion import Counters
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.weights import UpdateTimes
from areal_sc.engines.training.updates.update_metrics import OTHER_EXPERTS
from areal_sc.records.metrics import Summary
from areal_sc.rewards.base import declare_reward
from areal_sc.rewards.running import CodeRunner
from areal_sc.sources.prompt_choice import PromptPast
from areal_sc.system.sandbox.program import Limits
from areal_sc.trainer.steps import count
from areal_sc.workflows.single_turn import SingleTurnWorkflow

TRIED = ("docs/first-task.md", "docs/multi-turn.md", "docs/troubleshooting.md")
"""Their files are written to an empty folder, and their commands run there, in this order."""

ONE_GPU = (
    "python examples/jsonl_math.py --config configs/one_gpu.yaml "
    "actor.path=Qwen/Qwen2.5-0.5B-Instruct"
)

COOKBOOK = "base_url=http://127.0.0.1:8321 model_name=meta-llama/Llama-3.2-1B lora_rank=8"

NOT_RUN_HERE = {
    'loss = NamedLoss("package.module:loss")': (
        "tests/integration/test_adapters_beside.py"  # has the same calls
    ),
    "import sys": "tests/integration/test_minimal.py",
    "with Run(config) as run:": "examples/own_loop.py",  # of which it has the lines
    "prompts = load_prompts(": "needs the hub; test_prompt_sources.py has one of its own",
    "from transformers import AutoModelForCausalLM, AutoModelForImageTextToText": (
        "tests/unit/engines/test_multimodal.py"
    ),
    "from areal_sc.algorithms.named_advantage import kl_of_row": (
        "tests/integration/test_any_update.py"  # has the same calls
    ),
    "from areal_sc.workflows.teachers import": (
        "tests/unit/workflows/test_teachers.py"  # has the same calls
    ),
    "class WithToolOutput(Workflow):": (
        "tests/unit/algorithms/test_given_tokens.py"  # has the same calls
    ),
    "import asyncio": "tests/unit/rewards/test_weighted.py",
    **{
        f"python examples/minimal.py --config configs/minimal.yaml {setting}": (
            "tests/integration/test_own_engine.py"
        )
        for setting in (
            "actor.optimizer.type=muon:Muon",
            "rollout.engine=plain_engine:PlainGenerator",
        )
    },
    "async def ask(client, row):": "tests/unit/agents/test_agent_pictures.py",
    f"python -m tinker_cookbook.recipes.sl_loop {COOKBOOK}": (
        "needs the cookbook, and its data sets"
    ),
    f"python -m tinker_cookbook.recipes.rl_loop {COOKBOOK} loss_fn=importance_sampling": (
        "needs the cookbook, and its data sets"
    ),
    "import tinker": "tests/integration/test_serve.py, which runs these lines",
    "pip install areal-sc[serve]": "areal_sc is on no index yet",
    "python -m areal_sc serve --config x.yaml --port 8321": "tests/integration/test_serve.py",
    "from areal_sc import SingleTurnWorkflow\n\n\ndef reward(": (
        "examples/minimal.py"  # has one like it
    ),
    'workflow = SingleTurnWorkflow({"right"': "tests/integration/test_weighted_rewards.py",
    "# my_agent.py": "needs openai; examples/agent.py says the same in HTTP",
    "# train_my_agent.py": "needs openai and a GPU; examples/agent.py has the same calls",
    "python train_my_agent.py --config configs/one_gpu.yaml actor.path=Qwen/Qwen2.5-0.5B-Instruct "
    "run_dir=runs/mine": "needs a GPU, and a model of the hub",
    "python examples/closed_loop.py --config configs/tool_use.yaml run_dir=runs/loop": (
        "tests/integration/test_tool_use.py"
    ),
    "trainer.fit(OnlineWorkflow(": "examples/online.py",
    "# collect.py": "waits for a person; test_run_address.py makes the same requests",
    "python examples/online.py --config configs/tool_use.yaml run_dir=runs/online": (
        "tests/integration/test_tool_use.py"
    ),
    "python examples/online.py collect runs/online": "tests/integration/test_tool_use.py",
    "class MyAgent(Workflow):": "tests/integration/test_agents.py has one like it",
    "python examples/agent.py --config configs/tool_use.yaml run_dir=runs/agent": (
        "tests/integration/test_tool_use.py"
    ),
    "make quickstart": "takes minutes; test_run_whole.py runs its script",
    "make test": ".ci/run",
    "make real-model": "Makefile",  # `make test` needs it
    ".venv/bin/python examples/sums.py --config configs/sums.yaml": (
        "takes minutes; tests/unit/examples/test_sums.py has its task"
    ),
    "python -m areal_sc samples runs/minimal": "tests/integration/test_new_project.py",
    "python -m areal_sc samples runs/minimal --step 40": "tests/unit/commands/test_commands.py",
    "python -m areal_sc samples runs/minimal --worst --last 10": "tests/unit/commands",
    "python -m areal_sc ledger runs/minimal": "tests/unit/commands",
    "PPOTrainer(config).fit(": "tests/unit/trainer/evaluation/test_evaluations.py has such sets",
    "python -m areal_sc evaluate MODEL --config x.yaml --out evaluations/a --set aime": (
        "tests/integration/test_evaluate.py"
    ),
    "python -m areal_sc evaluate MODEL --out evaluations/b "
    "--set name=mine,prompts=mine.jsonl,reward=my_task:reward": (
        "tests/integration/test_evaluate.py"
    ),
    "from areal_sc.records.reading import rows": "tests/integration/test_records.py",
    "from areal_sc.records.reading import pictures, rows": (
        "tests/integration/test_picture_runs.py"  # has the same calls
    ),
    "from areal_sc.controller.ledger.group_lives import": "tests/integration/test_row_lives.py",
    "python -m areal_sc page runs/minimal": "tests/integration/test_page.py",
    "python -m areal_sc page runs/minimal runs/control": "tests/unit/commands/test_page.py",
    "python -m areal_sc page runs/minimal --export minimal.html": "tests/unit/commands",
    "# recipe.py": "tests/integration/test_any_update.py, which runs these lines",
    "def discounted(tokens": "tests/integration/test_any_update.py, which runs these lines",
    "from areal_sc.algorithms.token_function import": "tests/integration/test_any_update.py",
    "# own_field.py": "tests/integration/test_any_update.py, which runs these lines",
    "class Noted(SingleTurnWorkflow)": "tests/integration/test_any_update.py, which runs it",
    "from areal_sc.workflows.task_mix": "tests/integration/test_two_tasks.py",
    "from areal_sc.rewards.reasoning_gym": "tests/unit/sources/test_reasoning_gym.py",
    "from areal_sc import DPOTrainer": "tests/integration/test_row_trainers.py",
    "from areal_sc import RewardModelTrainer": "tests/integration/test_row_trainers.py",
    "# learned_reward.py": "tests/integration/test_row_trainers.py, which runs these lines",
    "from areal_sc import SFTTrainer": "tests/integration/test_row_trainers.py",
    "python examples/sft.py --config configs/sft.yaml actor.path=<model> task.dataset=<file>": (
        "tests/integration/test_row_trainers.py"
    ),
    "python examples/dpo.py --config configs/dpo.yaml actor.path=<model> task.dataset=<file>": (
        "tests/integration/test_row_trainers.py"
    ),
    "python examples/reward_model.py --config configs/reward_model.yaml actor.path=<model> "
    "task.dataset=<file>": "tests/integration/test_row_trainers.py",
    "python examples/sums.py --config configs/sums.yaml run_dir=runs/sums_after_pairs "
    "actor.path=runs/sum_pairs/model": (
        "takes minutes; tests/unit/examples/test_sums.py has its task"
    ),
    "python examples/count_shapes.py --config configs/count_shapes.yaml": (
        "tests/integration/test_count_shapes.py"
    ),
    'rows = [\n    {"prompt": "How many circles?"': "tests/unit/sources/test_pictures.py",
    ONE_GPU: "needs a GPU, and a model of the hub",
    "python examples/letter_sort.py --config configs/letter_sort.yaml scheduler.type=slurm "
    "scheduler.slurm.nodes=2": "tests/integration/slurm/test_slurm_run.py",
    "python examples/letter_sort.py --config configs/letter_sort.yaml "
    "scheduler.type=ssh_scheduler:SshScheduler "
    "scheduler.settings={hosts: [gpu1, gpu2, gpu3], nodes: 2}": "tests/integration/slurm",
    "python examples/letter_sort.py --config configs/letter_sort.yaml scheduler.type=ray": (
        "tests/integration/ray"
    ),
    "MEGATRON_ON_CPU=1 python examples/letter_sort.py --config configs/letter_sort.yaml "
    "run_dir=runs/megatron actor.engine=megatron": "tests/integration/test_megatron_run.py",
    "python two_models.py --config count.yaml run_dir=runs/two_models "
    "actor.ppo.loss=reference_kl:ppo_near_reference actor.ppo.loss_settings.kl_weight=0.1": (
        "tests/integration/test_several_models.py"  # runs a script with the same calls
    ),
    f"{ONE_GPU} --dry-run": "needs a GPU, and a model of the hub",
    **{
        f"python examples/recipes/{name}.py --config configs/{name}.yaml{flags}": (
            "tests/integration/test_recipes.py"
        )
        for name, plan in {
            "gsm8k": " --dry-run",
            "gsm8k_arc": " --dry-run",
            "reasoning_gym_task": " --dry-run",
            "search": " --dry-run",
            "mcp_tool": " --dry-run",
            "code_task": " --dry-run",
            "sum_pairs": " --dry-run",
            "deepscaler": " --dry-run --gpus 8 --gpu-memory 80 --host-memory 1000",
            "deepcoder": " --dry-run --gpus 8 --gpu-memory 80 --host-memory 1000",
        }.items()
        for flags in ("", plan)
    },
}
"""A command, or how a block begins -> what else runs it, or why nothing can."""

FRAGMENTS = (
    "load_config({",
    "class Printer(Tracker):",
    "@declare_reward(",
    "from areal_sc.rewards.answers",
    "from areal_sc.rewards.code.reward",
    "async def prints_its_answer",
    "async def shortest_wins",
    "# my_advantages.py",
    "# my_prompts.py",
    "# reference_kl.py",
    "# two_models.py",
    "# a scheduler alone",
)
"""How the blocks begin that tests below run."""


class Block(NamedTuple):
    document: str
    language: str
    text: str


@cache
def tokens(document: str) -> list[Token]:
    return MarkdownIt().parse((REPOSITORY / document).read_text())


def documents() -> list[str]:
    pages = [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/**/*.md"))]
    return [str(page.relative_to(REPOSITORY)) for page in pages]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the guides were followed, with two steps a run, and what was shown."""
    folder, shown = tmp_path_factory.mktemp("first_hour"), ""
    programs = tmp_path_factory.mktemp("programs")
    python, forked = programs / "python", Path(__file__).with_name("forked_python.py")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {forked} "$@"\n')
    python.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(*TRIED):
        if name := re.match(r"# (\S+\.(?:py|yaml))\n", block.text):
            text = re.sub("(?m)^total_steps: .*", "total_steps: 2", block.text)
            (folder / name[1]).write_text(text)
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-e", "-c", block.text],
                cwd=folder,
                env=environment_of_scripts() | {"PATH": path, "COLUMNS": "100"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, (block.text, done.stdout)
            shown += done.stdout
    return folder, shown


def blocks(*names: str) -> list[Block]:
    found = ((name, token) for name in names for token in tokens(name) if token.type == "fence")
    return [Block(name, token.info.strip(), token.content) for name, token in found]


def commands(text: str) -> list[str]:
    lines = (shlex.split(line, comments=True) for line in text.splitlines())
    return [" ".join(words) for words in lines if words]


def test_each_block_and_command_is_known() -> None:
    """And what is said of them is true of some."""
    given = [block for block in blocks(*documents()) if block.document not in TRIED]
    code = [block.text for block in given if block.language == "python"]
    typed = [line for block in given if block.language == "bash" for line in commands(block.text)]
    known = (*NOT_RUN_HERE, *FRAGMENTS)
    assert [line for line in typed if line not in known] == []
    assert [text for text in code if not text.startswith(known)] == []
    assert [k for k in known if k not in typed and not any(t.startswith(k) for t in code)] == []
    for where in NOT_RUN_HERE.values():
        assert " " in where or (REPOSITORY / where).exists(), where
    for block in given:
        if block.language == "python":
            compile(block.text, block.document, "exec")


def test_inline_commands_name_what_there_is() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    inlines = [child for name in documents() for t in tokens(name) for child in t.children or ()]
    texts = [t.content for t in inlines if t.type == "code_inline"]
    found = [t.split() for t in texts if t.startswith(("python ", "make ", "benchmarks/"))]
    assert len(found) > 10
    for program, *words in found:
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), words
        named = [w for w in (program, *words) if "/" in w and w.endswith((".py", ".yaml", ".sh"))]
        assert [w for w in named if not (REPOSITORY / w).exists()] == []


def test_the_loop_with_a_run_has_the_lines_of_the_example() -> None:
    example = iter((REPOSITORY / "examples/own_loop.py").read_text().splitlines())
    (block,) = (
        b for b in blocks("docs/own-loop.md") if b.text.startswith("with Run(config) as run:")
    )
    code = [line.partition("#")[0].strip() for line in block.text.splitlines()]
    lines = (line.partition("#")[0].strip() for line in example)
    assert [line for line in code if line != "..." and line not in lines] == []  # in this order


def run_block(begin: str, **names: Any) -> dict[str, Any]:
    """What a block defines that uses the package's names, and these."""
    (block,) = (b for b in blocks(*documents()) if b.text.startswith(begin))
    namespace = {name: getattr(areal_sc, name) for name in areal_sc.__all__} | names
    exec(compile(block.text, block.document, "exec"), namespace)
    return namespace


def test_settings_without_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("{run_dir: r, total_steps: 1, actor: {path: m}}")
    monkeypatch.setattr(sys, "argv", ["x.py", "--config", "x.yaml"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "x.py", raising=False)
    run_block("load_config({", ActorConfig=ActorConfig)


def test_a_scheduler_lends_a_machine_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (node,) = run_block("# a scheduler alone")["nodes"]
    assert node.name == socket.gethostname()
    assert not Path("runs/lent/keys.json").exists(), "it was closed"


def test_a_tracker_and_a_reward_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = run_block("class Printer(Tracker):")["Printer"]()
    tracker.on_step(SimpleNamespace(step=3, reward=0.5))
    assert capsys.readouterr().out == "3 0.5\n"
    names = {"declare_reward": declare_reward, "import_the_library": print}
    reward = run_block("@declare_reward(", **names)["solves_it"]
    assert reward.areal_sc_declaration.late_after_s == 5.0


def test_ready_made_rewards_go_together() -> None:
    names = {"SingleTurnWorkflow": SingleTurnWorkflow}
    workflow = run_block("from areal_sc.rewards.answers", **names)["workflow"]
    workflow.check()
    row, completion = {"answer": "Paris"}, "<think>so so so so</think><answer>Paris</answer>"
    given = workflow.reward
    assert given["right"](row, completion) == 1.0
    assert given["format"][0](row, completion) == 1.0
    assert given["again"](row, "so so so so") == -0.5


async def test_rewards_that_run_code() -> None:
    tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}
    names = {"SingleTurnWorkflow": SingleTurnWorkflow, "rows": [{"tests": tests}]}
    defined = run_block("from areal_sc.rewards.code.reward", **names)
    defined["workflow"].check()
    code = "print(sum(map(int, input().split())))"
    answer = f"```python\n{code}\n```"
    run_code = CodeRunner(SandboxConfig())
    try:
        assert await defined["reward"](names["rows"][0], answer, run_code) == 0.5
        own = run_block("async def prints_its_answer", Limits=Limits)["prints_its_answer"]
        for input_, right in (("1 2", 1.0), ("1 1", 0.0), ("one", 0.0)):
            assert await own({"input": input_, "answer": "3"}, code, run_code) == right
    finally:
        await run_code.close()


def test_an_advantage_of_ones_own() -> None:
    shorter = run_block("# my_advantages.py")["shorter_is_better"]
    lengths = np.array([2, 4])
    rows = AdvantageRows(np.array([1.0, 3.0]), lengths, lengths, lengths, lengths)
    assert shorter(rows, weight=0.2).tolist() == pytest.approx([-1.1, 0.8])


async def test_a_reward_of_a_group() -> None:
    given = {"SingleTurnWorkflow": SingleTurnWorkflow, "reward": lambda prompt, completion: 0.0}
    shortest_wins = run_block("async def shortest_wins", **given)["shortest_wins"]
    answers = [SimpleNamespace(answer=text, reward=0.5) for text in ("long", "no", "ab")]
    assert await shortest_wins({}, answers) == [0.5, 1.5, 1.5]


def test_a_choice_of_prompts_of_ones_own() -> None:
    hard_ones = run_block("# my_prompts.py")["hard_ones"]
    shares = [hard_ones(PromptPast(1, success, has_signal=True)) for success in (0.4, 0.5)]
    assert shares == [1.0, 0.1]


def test_a_loss_with_a_reference_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds a penalty to decoupled PPO; the script makes the calls of the one that is tested."""
    fields = {
        f"{name}_logprobs": torch.tensor(values)
        for name, values in {
            "proximal": [-1.0, -0.5, -2.0],
            "behavior": [-1.1, -0.4, -2.0],
            "reference": [-0.5, -1.5, -2.5],
        }.items()
    } | {"advantages": torch.tensor([1.0, -1.0, 0.5])}
    logprobs = torch.tensor([-0.9, -0.6, -2.0], requires_grad=True)
    tokens = loss_tokens_of(logprobs, torch.zeros(3), fields, [3])
    given = replace(tokens, counts=replace(tokens.counts, tokens=4))
    loss, metrics = run_block("# reference_kl.py")["ppo_near_reference"](given, kl_weight=2.0)
    without, _ = policy_gradient(given, clip_low=0.2, clip_high=0.2)
    added = 2.0 * (0.4**2 + 0.9**2 + 0.5**2) / 2 / 4
    assert (loss - without).item() == pytest.approx(added, rel=1e-5)
    assert metrics["reference_kl"].value.item() == pytest.approx(added * 2, rel=1e-5)
    assert {"proximal_kl", "reference_kl"} <= metrics.keys()
    monkeypatch.setitem(sys.modules, "count", SimpleNamespace(PROMPTS=[], reward=len))
    assert callable(run_block("# two_models.py")["main"])
    (block,) = (b for b in blocks("docs/several-models.md") if b.text.startswith("# two_models.py"))
    tested = (REPOSITORY / "tests/integration/scripts/three_models.py").read_text().splitlines()
    lines = (line.strip() for line in tested)
    calls = re.findall(
        r"^ +((?:batch|stats) = (?:reference|actor)\..*|actor\.pub.*)", block.text, re.M
    )
    assert len(calls) == 5
    assert [call for call in calls if call not in lines] == []  # in this order


def test_the_guides_make_a_run_that_fails_as_told(tried: tuple[Path, str]) -> None:
    folder, shown = tried
    for name in ("count", "two_tries"):
        assert (folder / "runs" / name / "model" / "model.safetensors").is_file()
    assert "total_steps: expected an integer at least 1, got 0" in shown
    assert "exit code 2" in shown


def test_the_plan_is_shown_as_it_is(tried: tuple[Path, str]) -> None:
    (given,) = (b.text for b in blocks("docs/memory.md") if b.text.startswith("worker "))
    workers = [line for line in given.splitlines() if re.match(r"worker |\w+/0 ", line)]
    assert len(workers) == 3
    assert [line for line in given.splitlines()[:3] if line not in tried[1]] == []
    assert "not counted: what CUDA and libraries take for themselves" in tried[1]


def test_each_metric_of_a_run_is_explained_and_no_other(tried: tuple[Path, str]) -> None:
    page = (REPOSITORY / "docs/metrics.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    explained = {
        name
        for cell in cells
        for name in re.findall(r"`(\w+)(?:/<cause>)?`", re.sub(r"\([^)]*\)", "", cell))
    }
    lines = (tried[0] / "runs/count/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    written = {item.name for kind in (Summary, Counters, UpdateTimes) for item in fields(kind)}
    written |= set(re.findall(r'"(\w+)": ', inspect.getsource(ServerEngine.stats)))
    written |= set(re.findall(r'"(\w+)/\{', inspect.getsource(count)))  # by a cause
    written.add(OTHER_EXPERTS)  # of models with experts
    for record in records:
        if record["kind"] in ("step", "evaluation"):
            nested = [record.pop(name, {}) for name in ("workflow", "train", "counters")]
            written |= record.keys() | {name for values in nested for name in values}
    elsewhere = set(re.findall(r"`(\w+)`", page)) - explained  # in the text between the tables
    assert written - explained - elsewhere == set()
    assert explained - written == set()


def test_each_exit_code_is_explained() -> None:
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.ArealError)}
    assert len(codes) > 7
    told = set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))
    assert told == codes | {0, 128 + 1, 128 + 2, 128 + 3, 128 + 9, 128 + 15}


def test_links_lead_somewhere() -> None:
    def anchors(path: Path) -> set[str]:
        headings = re.findall(r"^#+ (.+)", path.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for name in documents():
        for target in re.findall(r"\]\(([^)]+)\)", (REPOSITORY / name).read_text()):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            path = (REPOSITORY / name).parent / file if file else REPOSITORY / name
            assert path.exists(), (name, target)
            assert not anchor or anchor in anchors(path), (name, target)


def test_the_ten_files_have_the_functions_that_the_page_names() -> None:
    page = (REPOSITORY / "docs/maintainers/ten-files.md").read_text()
    named = re.findall(r"^\| (\d+) \| \[(\S+)\]\(\S+\) \| `([\w.]+)` \|", page, re.MULTILINE)
    assert [int(number) for number, _, _ in named] == list(range(1, 11))
    for _, file, function in named:
        module = import_module(f"areal_sc.{file.removesuffix('.py').replace('/', '.')}")
        assert callable(attrgetter(function)(module))


def test_files_that_a_page_names_are_in_the_repository_or_made_by_its_blocks() -> None:
    folders = ("areal_sc", "benchmarks", "docs", "examples", "tests")
    there = [f"/{path}" for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    made = (re.match(r"# (\S+)\n", block.text) for block in blocks(*documents()))
    there += [f"/{head[1]}" for head in made if head]
    named = [
        (page, file)
        for page in documents()
        if page != "CHANGELOG.md"  # of what was
        for file in re.findall(r"`([\w./-]+\.py)`", (REPOSITORY / page).read_text())
    ]
    assert len(named) > 50
    assert [it for it in named if not any(path.endswith(f"/{it[1]}") for path in there)] == []
    paths = re.compile(rf"`((?:{'|'.join(folders)}|configs)/[\w./-]*)`")
    whole = [it for page in documents() for it in paths.findall((REPOSITORY / page).read_text())]
    assert [path for path in whole if not (REPOSITORY / path).exists()] == []


def test_the_map_leads_from_each_folder_to_tests() -> None:
    """Each folder of the package has a line, and each test of integration stands in one."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    told = set(re.findall(r"`(\w+)[`/]", page))
    package = REPOSITORY / "areal_sc"
    assert {path.parent.name for path in package.glob("*/__init__.py")} - told == set()
    patterns = re.findall(r"`(?:tests/integration/)?(test_[\w*]+\.py)`", page)
    tests = [path.name for path in (REPOSITORY / "tests/integration").glob("test_*.py")]
    assert [name for name in tests if not any(fnmatch(name, it) for it in patterns)] == []


def test_the_reference_of_all_public_names_is_built(tmp_path: Path) -> None:
    """Warnings are errors of it, as is a public name without a docstring."""
    command = [sys.executable, "-W", "error", "docs/build_api.py", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "areal_sc.html").read_text()
    assert [name for name in areal_sc.__all__ if f'id="{name}"' not in page] == []
