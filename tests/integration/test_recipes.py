"""The recipes on small files of the shape of their sets, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from integration.run_process import REPOSITORY
from scripted_engine import ScriptedEngine
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_sc import SingleTurnWorkflow, Trajectory, load_config
from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import GenerationEngine
from areal_sc.errors import ArealError
from areal_sc.rewards.code.reward import CodeReward
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.sources.reference import ObjectReference, reference_of, resolve
from areal_sc.trainer.evaluation.evaluation_sets import configured_sets
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.math_reward import numeric_match

GSM8K = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7 pens.\n#### 7"},
    {"question": "A car costs $1,200. Two?", "answer": "It is 2*1200=2400.\n#### 2,400"},
]
ARC = [
    {
        "id": "a",
        "question": "Which is a gas?",
        "choices": {"text": ["iron", "steam", "ice", "sand"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    {
        "id": "b",
        "question": "What is hot?",
        "choices": {"text": ["ice", "snow", "fire"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
]
DEEPSCALER = [
    {"problem": "Solve $x^2 = 4$.", "answer": "\\pm 2", "solution": "..."},
    {"problem": "What is $\\frac12 + \\frac14$?", "answer": "\\frac{3}{4}", "solution": "..."},
    {"problem": "Draw it.", "answer": "see figure 5? (left)", "solution": ""},
    {"problem": "How many?", "answer": "12", "solution": ""},
]
READS = [{"input": "1 2\n", "output": "3\n", "type": "stdin_stdout", "fn_name": None}]
CALLS = {"fn_name": "double", "inputs": [[2], [3]], "outputs": [[4], [6]]}
TURNS = [{"input": "[1, 2]", "output": "[2, 1]", "testtype": "functional"}]
LISTED = [{"input": "3\n", "output": "3", "testtype": "stdin"}]
DEEPCODER: dict[str, list[dict[str, Any]]] = {
    "taco": [
        {
            "problem": "Print a + b.",
            "tests": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
            "solutions": ["print(sum(map(int, input().split())))"],
        },
        {
            "problem": "Double it.",
            "tests": json.dumps(CALLS),
            "solutions": ["def double(x):\n    return 2 * x"],
        },
        {"problem": "Nothing.", "tests": json.dumps([{"input": "1"}]), "solutions": []},
    ],
    "primeintellect": [
        {
            "problem": "Print a + b.",
            "tests": json.dumps(READS),
            "solutions": ["a, b = map(int, input().split())\nprint(a + b)"],
        },
    ],
    "lcbv5": [
        {
            "problem": "Turn it.",
            "starter_code": "class Solution:\n    def turn(self, items: List[int]):\n        ",
            "tests": json.dumps(TURNS),
            "metadata": {"func_name": "turn"},
            "solutions": [
                "class Solution:\n    def turn(self, items: List[int]):\n        return items[::-1]"
            ],
        },
        {
            "problem": "Print it.",
            "starter_code": "",
            "tests": json.dumps(LISTED),
            "metadata": {"func_name": None},
            "solutions": ["print(input())"],
        },
    ],
}
EVALUATED: dict[str, dict[str, Any]] = {
    "aime24": {"id": 60, "problem": "2 + 2 = $a$. Find a.", "solution": "\\boxed{4}", "url": ""},
    "aime25": {"problem": "2 + 2 = $a$. Find a.", "answer": "4", "id": "0"},
    "amc23": {"id": 0, "question": "2 + 2 = $a$. Find a.", "answer": "4.0", "url": ""},
    "math500": {
        "problem": "2 + 2 = $a$. Find a.",
        "solution": "It is $\\boxed{4}$.",
        "answer": "4",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "gsm8k": {"question": "2 + 2 = a. Find a.", "answer": "It is <<2+2=4>>4.\n#### 4"},
}
"""A row of each set, with the columns that it has on the hub."""
ON_A_CPU = (
    *("actor.device=cpu", "rollout.device=cpu", "rollout.engine=local", "actor.dtype=float32"),
    *("actor.random_init=true", "actor.parallel.data=1", "rollout.num_workers=1"),
    *("rollout.train_batch_groups=4", "rollout.group_size=2", "rollout.max_running_sequences=4"),
    *("rollout.max_concurrent_groups=4", "rollout.max_context_tokens=1024"),
    *("generation.max_new_tokens=256", "actor.max_tokens_per_micro_batch=1024"),
)
SIZES = {
    "gsm8k": ("qwen2", 896, 4864, 14, 24, 2, 151936, 32768, True),
    "gsm8k_arc": ("qwen2", 896, 4864, 14, 24, 2, 151936, 32768, True),
    "deepscaler": ("qwen2", 1536, 8960, 12, 28, 2, 151936, 131072, False),
    "deepcoder": ("qwen2", 1536, 8960, 12, 28, 2, 151936, 131072, False),
}
"""What `config.json` of each recipe's model says, by the names of `KEYS`."""
KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "vocab_size", "max_position_embeddings"),
    "tie_word_embeddings",
)
MACHINES = {"gsm8k": (1, 24), "gsm8k_arc": (1, 24), "deepscaler": (8, 80), "deepcoder": (8, 80)}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A model without weights, whose tokenizer knows printable ASCII and has a chat template."""
    characters = ["<pad>", "<end>", *string.printable]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}answer:{{ m['content'] }}<end>"
        "{% else %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}answer:{% endif %}"
    )
    folder = tmp_path / "model"
    fast.save_pretrained(folder)
    values = ("llama", 32, 64, 4, 2, 2, len(characters), 2048, True)  # qwen2 has its own tokenizer
    config = dict(zip(KEYS, values, strict=True)) | {"eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dry_run(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, *settings: str) -> str:
    """What the command of docs/recipes.md shows, with these settings."""
    config = REPOSITORY / "configs" / f"{name}.yaml"
    arguments = ["--config", str(config), f"run_dir={tmp_path / 'run'}", *settings, "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        import_module(name).main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_arc", "deepscaler"])
def test_its_rows_are_prompts_that_the_reward_understands(
    name: str, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        write(tmp_path / "maths" / f"{split}.jsonl", GSM8K)
        write(tmp_path / "arc" / f"{split}.jsonl", ARC)
    write(tmp_path / "deepscaler.jsonl", DEEPSCALER)
    settings = {
        "gsm8k": [f"task.dataset={tmp_path / 'maths'}"],
        "gsm8k_arc": [
            f"task.dataset={tmp_path / 'maths'}",
            f"task.choice_dataset={tmp_path / 'arc'}",
        ],
        "deepscaler": [f"task.dataset={tmp_path / 'deepscaler.jsonl'}", "task.num_held_out=1"],
    }[name]
    shown = dry_run(name, capsys, tmp_path, f"actor.path={chat_model}", *ON_A_CPU, *settings)
    assert re.search(r"^reward of the answer .* to it: 1$", shown, re.M | re.S), shown
    assert "answer:" in shown, "the prompt, in the model's chat format"
    assert {"gsm8k": "2 rows", "gsm8k_arc": "a stream", "deepscaler": "2 rows"}[name] in shown


@pytest.mark.parametrize("name", SIZES)
def test_its_model_fits_the_machine_that_it_is_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(KEYS, SIZES[name], strict=True))))
    gpus, memory = MACHINES[name]
    machine = ("--gpus", str(gpus), "--gpu-memory", str(memory), "--host-memory", "1000")
    shown = dry_run(name, capsys, tmp_path, f"actor.path={tmp_path}", *machine)
    needed = re.findall(rf"^cuda:\d: needs about ([\d.]+) GiB of {memory}\.0 GiB$", shown, re.M)
    assert len(needed) == gpus
    assert all(float(each) < 0.95 * memory for each in needed), "room for CUDA itself"


def test_choices_have_letters_whatever_the_set_calls_them() -> None:
    arc = import_module("gsm8k_arc")
    row = arc.choice_row(ARC[1])
    assert row["answer"] == "C"
    assert row["prompt"][1]["content"] == "What is hot?\n(A) ice\n(B) snow\n(C) fire"
    assert row["prompt"][0]["role"] == "system"


def test_unreadable_answers_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "rows.jsonl", DEEPSCALER)
    with caplog.at_level("INFO"):
        rows = import_module("deepscaler").load_deepscaler(str(tmp_path / "rows.jsonl"))
    assert [row["answer"] for row in rows] == ["\\pm 2", "\\frac{3}{4}", "12"]
    assert "rows=3 left_out=1" in caplog.text


@pytest.fixture
def deepcoder_set(tmp_path: Path) -> str:
    """A folder in the shape of the hub's repository."""
    folder = tmp_path / "deepcoder"
    configs = []
    for name, rows in DEEPCODER.items():
        for split in ("train", "test"):
            write(folder / f"{name}-{split}.jsonl", rows)
        files = [{"split": it, "path": f"{name}-{it}.jsonl"} for it in ("train", "test")]
        configs.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    return str(folder)


async def test_solutions_of_deepcoder_pass_its_tests(
    deepcoder_set: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, reward = import_module("deepcoder"), CodeReward(max_tests=15)
    with caplog.at_level("INFO"):
        problems = recipe.load_problems(deepcoder_set, [*DEEPCODER], "train", reward)
    assert "problem 2 is left out: test 0: it has no output" in caplog.text
    assert "problems=6 left_out=1" in caplog.text
    kept = [row for rows in DEEPCODER.values() for row in rows if row["solutions"]]
    assert len(problems) == len(kept) == 5
    again = resolve(ObjectReference.from_wire(reference_of(problems).to_wire()))
    run_code = CodeRunner(SandboxConfig())
    try:
        for number, row in enumerate(kept):
            assert again[number] == problems[number]
            solution = f"```python\n{row['solutions'][0]}\n```"
            assert await reward(problems[number], solution, run_code) == 1.0
            assert await reward(problems[number], "```python\npass\n```", run_code) == 0.0
    finally:
        await run_code.close()
    prompts = [problems[number]["prompt"] for number in range(5)]
    assert ["standard input" in prompt for prompt in prompts] == [True, False, True, False, True]
    assert "the Python function `double`" in prompts[1]
    assert "class Solution:\n    def turn(self" in prompts[3]


def test_deepcoder_is_tried_on_a_row(
    deepcoder_set: str, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"actor.path={chat_model}", f"task.dataset={deepcoder_set}", *ON_A_CPU)
    shown = dry_run("deepcoder", capsys, tmp_path, *settings)
    assert "prompts: 5 rows; 5 looked at" in shown
    assert "| user: Print a + b." in shown


def test_a_generated_task_is_tried_on_a_row(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"actor.path={chat_model}", *ON_A_CPU, "task.size=200", "task.num_held_out=8")
    shown = dry_run("reasoning_gym_task", capsys, tmp_path, *settings)
    assert re.search(r"^prompts: (19\d|200) rows", shown, re.M), shown
    assert re.search(r"^reward of the answer .* to it: 1$", shown, re.M | re.S), shown


def test_questions_that_train_are_not_evaluated() -> None:
    recipe = import_module("reasoning_gym_task")
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = recipe.load_task(
        recipe.Task(settings=one_digit, size=60, num_held_out=20), seed=1
    )
    asked = [{row["prompt"] for row in rows} for rows in (train, held_out)]
    assert asked[0].isdisjoint(asked[1])
    assert 30 <= len(train) < 60  # 162 questions in all: some were held out
    assert len(asked[1]) == len(held_out) > 10
    with pytest.raises(ArealError, match=r"task\.num_held_out=20000: these are all questions"):
        recipe.load_task(recipe.Task(settings=one_digit, size=60, num_held_out=20_000), seed=1)


def test_sets_that_papers_report_are_asked_and_judged(tmp_path: Path) -> None:
    given = [f"run_dir={tmp_path}", "actor.path=/none"]
    path = str(REPOSITORY / "configs" / "evaluation_sets.yaml")
    config = load_config(["--config", path, *given])
    assert [one.name for one in config.evaluation.sets] == list(EVALUATED)
    for one in config.evaluation.sets:
        folder = tmp_path / one.name
        write(folder / f"{one.split}.jsonl", [EVALUATED[one.name]])
        parts = [{"split": one.split, "path": f"{one.split}.jsonl"}]
        known = [{"config_name": one.subset or "default", "data_files": parts}]
        (folder / "README.md").write_text(f"---\n{json.dumps({'configs': known})}\n---\n")
        one.prompts = str(folder)
    for name, one in configured_sets(config.evaluation, SingleTurnWorkflow(numeric_match)).items():
        assert one.num_samples == (1 if name == "gsm8k" else 32)
        (row,) = one.prompts
        assert row["prompt"].startswith("2 + 2 = ")
        assert row["prompt"].endswith("within \\boxed{}.")
        assert numeric_match(row, "So it is \\boxed{4}.") == 1
        assert numeric_match(row, "So it is \\boxed{5}.") == 0


@pytest.fixture
def letters(chat_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(chat_model)


async def episode_of(
    workflow: Any, row: Mapping[str, Any], wrote: Sequence[str], tokenizer: Any
) -> Trajectory:
    """The one row of an episode whose model writes these texts, turn by turn."""
    engine = ScriptedEngine(tokenizer)
    engine.will_say(*wrote)
    sampling = GenerationConfig(stop=[f"</{workflow.ask_tag}>", "</answer>"])
    served, pool = cast("GenerationEngine", engine), cast("RewardPool", None)
    episode = WorkerEpisodeEngine(served, pool, "g", sampling, None)
    (trajectory,) = await workflow.run_episode(row, episode)
    assert isinstance(trajectory, Trajectory)
    return trajectory


async def test_a_search_finds_what_the_question_asks_for(letters: Any) -> None:
    recipe = import_module("search")
    row = recipe.questions()[0]
    name = next(name for name in recipe.people() if name in row["prompt"])
    wrote = [f"<search>{name}</search>", f"<answer>{row['answer']}</answer>"]
    trajectory = await episode_of(recipe.Search(), row, wrote, letters)
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"accuracy": 1.0, "uses": 1, "answered": 1.0}
    text = letters.decode(trajectory.input_ids)
    passages = re.findall(r"</search>\n<information>(.*)</information>\n<answer>", text)
    assert len(passages) == 2, "that of the example, and what was found"
    assert name in passages[1]
    assert row["answer"] in passages[1]
    trained = [
        token
        for token, is_trained in zip(trajectory.input_ids, trajectory.loss_mask, strict=True)
        if is_trained
    ]
    assert letters.decode(trained) == "".join(wrote), "what it has read is not trained"
    for unasked in (["Ada"], ["<search>x</search>"] * 3, [f"<answer>{name}</answer>"]):
        trajectory = await episode_of(recipe.Search(), row, unasked, letters)
        assert trajectory.reward == 0.0
    assert recipe.corpus().best("nobody has these words", 1) == []


async def test_a_tool_of_an_mcp_server_answers_what_the_model_writes(
    letters: Any,
) -> None:
    recipe = import_module("mcp_tool")
    workflow, row = recipe.ToolUse(), {"prompt": "What is 37 times 41?", "answer": "1517"}
    calls = {
        '{"name": "multiply", "arguments": {"a": 37, "b": 41}}': "1517",
        '{"name": "multiply", "arguments": {"a": 37}}': "expected the integers a and b",
        '{"name": "add", "arguments": {"a": 37, "b": 41}}': "unknown: add",
        "37 * 41": "this is no call of a tool",
    }
    for call, result in calls.items():
        wrote = [f"<tool>{call}</tool>", "<answer>1517</answer>"]
        trajectory = await episode_of(workflow, row, wrote, letters)
        assert trajectory.reward == 1.0
        text = letters.decode(trajectory.input_ids)
        assert "multiply: The product of two integers." in text
        assert f"{call}</tool>\n<result>{result}</result>\n<answer>" in text
    workflow.server.process.kill()
    await workflow.server.process.wait()
    again = await workflow.use('{"name": "multiply", "arguments": {"a": 2, "b": 3}}')
    assert again == "6", "a server that has ended is started again"
    workflow.server.process.stdin.close()
    assert await workflow.server.process.wait() == 0


LINES = {
    "The sum of the first 3 items.": "sum(items[:3])",
    "The number of the last 4 items.": "len(items[-4:])",
    "The largest of the items smaller than 5.": "max(filter(lambda item: item < 5, items))",
    "The smallest of the items larger than 2.": "min(item for item in items if item > 2)",
    "A list of the even items.": "[item for item in items if not item % 2]",
    "A sorted list of the odd items.": "sorted(item for item in items if item % 2)",
    "A list of 6 times each item.": "[item * 6 for item in items]",
    "A sorted list of the items.": "sorted(items)",
}
"""What some functions of the code task should return -> a line that does."""


async def test_functions_are_right_where_they_pass_their_tests_in_the_sandbox() -> None:
    recipe = import_module("code_task")
    rows = recipe.functions()
    assert len({row["prompt"] for row in rows}) == len(rows) > 2 * recipe.NUM_HELD_OUT
    run_code = CodeRunner(SandboxConfig())
    try:
        for asked, line in LINES.items():
            (row,) = (row for row in rows if f'"""{asked}"""' in row["stub"])
            assert row["prompt"].endswith(row["stub"])
            right = await recipe.passes(row, f" {line}", run_code)
            assert right == right.parts["passed"] == 1.0, asked
        for wrong in (" sum(items)", " items[", " print(items)"):
            assert await recipe.passes(rows[0], wrong, run_code) == 0.0
    finally:
        await run_code.close()


def test_the_code_task_is_tried_on_a_row(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = dry_run("code_task", capsys, tmp_path, f"actor.path={chat_model}", *ON_A_CPU)
    assert "prompts: 104 rows" in shown
    assert re.search(r"^reward of the answer .*: 0$", shown, re.M), shown


def test_the_preferred_answer_is_the_right_number_alone() -> None:
    recipe, sums = import_module("sum_pairs"), import_module("sums")
    pairs = recipe.pairs()
    assert len({row["prompt"] for row in pairs}) == len(pairs) == recipe.NUM_PAIRS
    assert not {row["prompt"] for row in pairs} & {row["prompt"] for row in sums.sums()}
    in_words = 0
    for row in pairs:
        a, sign, b = re.findall(r"\d+|[+-]", row["prompt"])
        value = int(a) + int(b) if sign == "+" else int(a) - int(b)
        assert row["chosen"] == str(value)
        assert row["rejected"] != row["chosen"]
        in_words += row["rejected"] == f"The answer is {value}."
    assert in_words == len(pairs) // 2, "the others are of another number"
    assert all(re.fullmatch(r"-?\d+|The answer is -?\d+\.", row["rejected"]) for row in pairs)


def test_pairs_are_tried_on_the_loss(
    chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = (f"actor.path={chat_model}", "actor.random_init=true")
    shown = dry_run("sum_pairs", capsys, tmp_path, *model)
    assert "loss dpo: tried on two rows" in shown
    assert "has no effect" not in caplog.text, "the run's own folder of weights is no setting"


async def test_a_server_whose_start_was_cut_short_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = import_module("mcp_tool").ToolUse().server

    async def says_nothing(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(server, "_ask", says_nothing)
    with pytest.raises(TimeoutError):
        await server.list_tools()
    first = server.process
    monkeypatch.undo()
    assert [tool["name"] for tool in await server.list_tools()] == ["multiply"]
    assert await first.wait() != 0
    assert server.process is not first
    server.process.stdin.close()
    assert await server.process.wait() == 0


def test_a_weight_of_zero_is_refused_before_the_start(tmp_path: Path) -> None:
    config = ["--config", str(REPOSITORY / "configs" / "gsm8k_arc.yaml")]
    with pytest.raises(ArealError, match=r"task\.choice_weight: expected a number above 0, got 0"):
        import_module("gsm8k_arc").main(
            [*config, *ON_A_CPU, f"run_dir={tmp_path}", "actor.path=/none", "task.choice_weight=0"]
        )
