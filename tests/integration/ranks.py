"""Scenarios of `ranks_program`, and what its ranks leave."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from integration.agent_forks import start_script

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.snapshot_model import export_snapshot

PROGRAM = Path(__file__).with_name("ranks_program.py")
LIMIT_S = 540.0
EIGHT = [11, 6, 14, 3, 9, 20, 5, 8]
ALL = list(range(8))
ONE_SHARE = [{"lengths": EIGHT, "rows": [ALL]}, {"lengths": EIGHT[::-1], "rows": [ALL]}]
TWO_SHARES = [  # of the second minibatch, the first share has nothing
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3, 4, 6, 7], [5]]},
    {"lengths": EIGHT[::-1], "rows": [[], ALL]},
]
Ranks = list[dict[str, Any]]
Results = dict[str, Ranks]


def save_model(folder: Path, config: Any) -> str:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases are 0, norms all alike
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)


def run_ranks(
    folder: Path, scenarios: Mapping[str, dict[str, Any]], environment: Mapping[str, str] = {}
) -> Results:
    """Scenario name -> what each rank left in the folder."""
    run_program(PROGRAM, folder, scenarios, environment)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(it["world_size"])]
        for name, it in scenarios.items()
    }


def run_program(
    program: Path,
    folder: Path,
    scenarios: Mapping[str, dict[str, Any]],
    environment: Mapping[str, str] = {},
) -> None:
    """Runs `program FOLDER` to its end, with the scenarios in `FOLDER/scenarios.json`."""
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    path = folder / "output.txt"
    with path.open("wb") as output:
        command = [sys.executable, str(program), str(folder)]
        process = start_script(command, folder, os.environ | environment, output)
    try:
        code = process.wait(LIMIT_S)
    finally:
        with suppress(ProcessLookupError):  # ranks that it has left, too
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, path.read_text(errors="replace")[-4000:]


def load_program() -> Any:
    """The program as a module: what its ranks compute with."""
    specification = importlib.util.spec_from_file_location("ranks_program", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest one; both have the same names."""
    assert found.keys() == expected.keys()
    pairs = ((found[name].detach().double(), expected[name].detach().double()) for name in found)
    return max(float((one - other).abs().max()) for one, other in pairs)


def loaded_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder of transformers."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def snapshot_weights(model: Path, snapshot: Path) -> dict[str, torch.Tensor]:
    """Of the folder that `export_snapshot` writes of it."""
    folder = snapshot.with_name(f"model_of_{snapshot.name}")
    export_snapshot(ActorConfig(path=str(model), device="cpu"), snapshot, folder)
    return loaded_weights(folder)


def check_user_losses(of_ranks: list[dict[str, Any]]) -> None:
    """Every rank has done the same, and no loss has kept the next one from its update."""
    first = of_ranks[0]
    for other in of_ranks[1:]:
        assert repr(other) == repr(first)  # NaN does not equal itself
    num_minibatches = first["plain"]["num_updates"]
    assert num_minibatches > 0
    for kind in ("sparse", "names", "constant"):
        assert first[kind]["num_updates"] == num_minibatches, kind
    assert first["sparse"]["seen"] == first["plain"]["num_effective_tokens"]
    assert {"of_share_0", "of_share_1"} <= first["names"].keys()
    assert first["nan"]["num_skipped_updates"] > 0
    for kind, message in (
        ("floats", "WorkflowError: train rank .: the loss raised TypeError: metric seen: expected"),
        ("raises", "WorkflowError: train rank .: the loss raised KeyError: 'no such thing'"),
        ("empty", "WorkflowError: train rank .: the loss raised .*max"),
    ):
        assert re.match(message, first[kind]), first[kind]
        assert first[f"{kind} moves"] == {"most": 0.0}, kind
    mixed = "WorkflowError: the loss: metric 'seen': expected the same kind .*, got max and sum"
    assert re.match(mixed, first["mixed"]), first["mixed"]
