"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import string
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from omegaconf import base

from areal_sc.system.own_addresses import keep_from_proxies

# Examples have no time limit of their own, only the test as a whole has: a busy machine may hold up
# any of them. Loaded before the test modules, whose own settings start from it.
settings.register_profile("areal_sc", deadline=None)
settings.load_profile("areal_sc")

TOGETHER = tuple(f"tests/integration/{name}/" for name in ("sglang", "vllm", "slurm", "ray"))
LONG = tuple(f"tests/integration/test_{name}.py" for name in ("run_lifecycle", "tool_use"))
FIRST = (*TOGETHER[:3], *LONG, TOGETHER[3], "tests/integration/test_")
"""The longest first: the many short files of the rest keep all processes busy to the end.

In the folders much is waited for: beside them others compute.
"""


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is kept for a user, as rows that a page has read, is kept for the tests alone."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def own_addresses() -> None:
    """What tests serve on this machine is reached without the proxy that leads outside."""
    keep_from_proxies()


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> None:
    """Each `${key}` of the schema is parsed once: that takes a third of the time of a loading."""
    base.parse = cache(base.parse)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def left_open() -> Iterator[None]:
    """What a file's tests leave open is told as an error of the last of them, and of no other's.

    Garbage that refers to itself warns of its sockets, say, when it is collected. A collection of
    all that is imported takes most of a second, and each start of controllers collects: so what
    earlier files left is frozen, and a run freezes nothing of this one, nor does its end thaw them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What the last test of a file was given ends with it, and is not kept beyond `left_open`."""
    getattr(item, "funcargs", {}).clear()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules make hardly any garbage, and are there to the end: its collections pass over them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """What has become garbage in a later file than its own is told at the very end."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # pytest itself collects twice behind this


def pytest_configure() -> None:
    """Ctrl-C works in the tests and in what they start, also where a shell ignores it.

    A shell without job control starts background processes with SIGINT ignored, and that is
    inherited.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures are told when they happen: the machine may end the tests before pytest sums up."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        cause = [line[:200] for line in lines if line.startswith("E ")][:3] + lines[-1:]
        print(f"\n{report.nodeid}: failed in its {report.when}", *cause, sep="\n", flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        starts = (i for i, folder in enumerate(FIRST) if item.nodeid.startswith(folder))
        return next(starts, len(FIRST))

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (`-n 2`) a file's tests stay together: fixtures are made once a file.

    Those of a kind of server share two servers, and those of SLURM, or Ray, a cluster: so their
    whole folder stays together.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it would begin with the files of most tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            together = (folder for folder in TOGETHER if path.startswith(folder))
            return next(together, path)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a tiny Qwen2 with random weights and a tokenizer of characters.

    Token 0 is padding, 1 the end of sequence (`$`), then `=`, the digits and the letters.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = ["<pad>", "$", "=", *string.digits, *string.ascii_lowercase]
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("tiny_model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="$"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(characters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
