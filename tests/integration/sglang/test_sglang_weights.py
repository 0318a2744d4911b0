"""Weights replaced under running answers, each way; every token checked against its version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from integration.sglang.policies import Generating, Policies
from integration.sglang.trainer import GROUP_TIMEOUT_S, Trainer
from local_engines import at_hand
from msgspec import structs

from areal_sc.config.schema import GenerationConfig, OnWeightUpdate
from areal_sc.engines.base import Completion
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.errors import EngineFailed, ModelError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
LONG = GenerationConfig(max_new_tokens=900)
PROMPTS = [[3 + i % 7, 11 + i] for i in range(8)]
NUM_UPDATES = 20
MIN_UPDATES = 3


def start_answers(
    engine: ServerEngine, prompts: Sequence[list[int]] = PROMPTS
) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts]


def check_span_both(answers: Sequence[Completion], old: int, new: int) -> None:
    assert all(set(answer.versions) == {old, new} for answer in answers)
    assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)


async def test_tensors_replace_weights_in_the_middle_of_answers(
    engine: ServerEngine, policies: Policies, generating: Generating
) -> None:
    old, new = engine.version, policies.add()
    before = engine.stats()
    tasks = await generating(lambda: start_answers(engine))
    flat = [(name, tensor.flatten()) for name, tensor in policies.named_tensors(new)]
    await engine.update_weights(new, at_hand(flat))
    assert engine.version == new
    answers = await asyncio.gather(*tasks)
    check_span_both(answers, old, new)
    policies.check_all(PROMPTS, answers)
    after = engine.stats()
    num_bytes = sum(tensor.nbytes for _, tensor in flat)
    assert after["update_bytes"] - before["update_bytes"] == num_bytes
    assert after["weight_updates"] - before["weight_updates"] == 1


async def test_a_folder_replaces_weights_in_the_middle_of_answers(
    engine: ServerEngine, policies: Policies, generating: Generating, tmp_path: Path
) -> None:
    old, new = engine.version, policies.add()
    folder = policies.save(new, tmp_path / "new")
    tasks = await generating(lambda: start_answers(engine))
    await engine.update_weights_from_disk(new, folder)
    answers = await asyncio.gather(*tasks)
    check_span_both(answers, old, new)
    policies.check_all(PROMPTS, answers)
    # the folder may go, now that another version is published
    await publish(engine, policies)


async def test_a_broadcast_replaces_weights_in_the_middle_of_answers(
    engine: ServerEngine, policies: Policies, generating: Generating
) -> None:
    trainer = Trainer(policies, "group-a", num_ranks=1 + engine.count_ranks())
    await trainer.meet(engine)
    assert engine.has_whole_group("group-a")
    for _ in range(2):  # a group serves more than one update
        old, new = engine.version, policies.add()
        tasks = await generating(lambda: start_answers(engine))
        num_bytes, _ = await asyncio.gather(
            trainer.send(new),
            trainer.receive(engine, new),
        )
        answers = await asyncio.gather(*tasks)
        check_span_both(answers, old, new)
        policies.check_all(PROMPTS, answers)
        assert num_bytes == sum(tensor.nbytes for _, tensor in policies.named_tensors(new))
    await engine.leave_group("group-a")
    assert not engine.has_whole_group("group-a")
    trainer.broadcaster.close()


async def test_a_refused_broadcast_leaves_nobody_waiting(
    engine: ServerEngine, policies: Policies
) -> None:
    """The servers get the weights another way, and the trainer is told to stop."""
    trainer = Trainer(policies, "group-b", num_ranks=1 + engine.count_ranks())
    await trainer.meet(engine)
    old, new = engine.version, policies.add()
    await engine.server.client.begin_update()  # a second begin is refused
    sending = asyncio.create_task(trainer.send(new))
    await trainer.receive(engine, new)
    assert not engine.has_whole_group("group-b")
    assert trainer.cancelled.is_set()
    await asyncio.wait({sending}, timeout=GROUP_TIMEOUT_S / 2)
    assert sending.done()
    if error := sending.exception():  # small broadcasts need nobody who receives them
        assert isinstance(error, EngineFailed)
    trainer.broadcaster.close()
    assert engine.version == new != old
    answers = await asyncio.gather(
        *(engine.generate(prompt, GenerationConfig(max_new_tokens=20)) for prompt in PROMPTS)
    )
    assert all(set(answer.versions) == {new} for answer in answers)
    policies.check_all(PROMPTS, answers)


async def test_a_broadcast_of_other_parameters_is_refused_beforehand(
    engine: ServerEngine, policies: Policies
) -> None:
    """SGLang itself would leave out what it does not know, and say nothing."""
    version = engine.version
    trainer = Trainer(policies, "group-c", num_ranks=1)
    layouts = trainer.layouts(version)
    wrong = structs.replace(layouts[0], names=(*layouts[0].names[:-1], "no.such.parameter"))
    with pytest.raises(ModelError, match=r"1 unknown \(no\.such\.parameter\)"):
        await trainer.receive(engine, version, [wrong])
    assert trainer.cancelled.is_set()
    assert engine.version == version


async def test_answers_across_many_updates(
    engine: ServerEngine, policies: Policies, generating: Generating, tmp_path: Path
) -> None:
    prompts = [[3 + i, 7, 9 + i] for i in range(16)]
    tasks = await generating(lambda: start_answers(engine, prompts))
    before, first = engine.stats(), engine.version
    # as many as a busy machine makes while all answers go on
    while engine.version - first < NUM_UPDATES and not any(task.done() for task in tasks):
        version = policies.add()
        if version % 3 == 0:
            folder = policies.save(version, tmp_path / str(version))
            await engine.update_weights_from_disk(version, folder)
        else:
            await engine.update_weights(version, policies.source(version))
    num_updates = engine.version - first
    assert num_updates >= MIN_UPDATES
    answers = await asyncio.gather(*tasks)
    policies.check_all(prompts, answers)
    assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)
    assert max(len(set(answer.versions)) for answer in answers) >= num_updates // 2
    after = engine.stats()
    sampled = sum(len(answer.token_ids) for answer in answers)
    assert after["generated_tokens"] - before["generated_tokens"] == sampled
    assert after["lost_requests"] == before["lost_requests"]
    await publish(engine, policies)


async def test_servers_without_version_spans_are_interrupted_by_aborting(
    engine: ServerEngine, policies: Policies, generating: Generating
) -> None:
    """As older ones are: partial answers go on as prompt and partial answer."""
    with without_spans(engine):
        old, new = engine.version, policies.add()
        continued = engine.stats()["continued_requests"]
        tasks = await generating(lambda: start_answers(engine))
        await engine.update_weights(new, policies.source(new))
        answers = await asyncio.gather(*tasks)
        continued = engine.stats()["continued_requests"] - continued
    # on a busy machine one may be interrupted before its first token: it begins anew
    both = [answer for answer in answers if old in answer.versions]
    assert continued >= len(both) > len(tasks) // 2
    check_span_both(both, old, new)
    policies.check_all(PROMPTS, answers)


async def test_running_answers_may_finish_first(
    engine: ServerEngine, policies: Policies, generating: Generating, until: Until
) -> None:
    old, new = engine.version, policies.add()
    with settings(engine, on_weight_update=OnWeightUpdate.finish_running):
        tasks = await generating(lambda: start_answers(engine))
        update = asyncio.create_task(engine.update_weights(new, policies.source(new)))
        await until(lambda: not engine.server.places.is_open)
        late = asyncio.create_task(engine.generate([7, 7], GenerationConfig(max_new_tokens=9)))
        answers = await asyncio.gather(*tasks)
        await update
    assert all(set(answer.versions) == {old} for answer in answers)
    assert set((await late).versions) == {new}
    policies.check_all([*PROMPTS, [7, 7]], [*answers, await late])


async def test_weights_that_do_not_fit_change_nothing(
    engine: ServerEngine, policies: Policies, tmp_path: Path
) -> None:
    version = engine.version
    tensors = policies.named_tensors(version)
    with pytest.raises(ModelError, match=r"1 parameters are missing \(model\.norm\.weight\)"):
        await engine.update_weights(99, at_hand(t for t in tensors if t[0] != "model.norm.weight"))
    wrong = [(n, torch.zeros(3) if n == "lm_head.weight" else t) for n, t in tensors]
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape"):
        await engine.update_weights(99, at_hand(wrong))
    folder = policies.save(version, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated or damaged"):
        await engine.update_weights_from_disk(99, folder)
    with pytest.raises(ModelError, match="no such folder"):
        await engine.update_weights_from_disk(99, tmp_path / "nowhere")
    assert engine.version == version
    answer = await engine.generate([5, 6], GenerationConfig(max_new_tokens=5))
    policies.check([5, 6], answer)
    assert set(answer.versions) == {version}


async def test_weights_may_change_while_paused(
    engine: ServerEngine, policies: Policies, generating: Generating
) -> None:
    old, new = engine.version, policies.add()
    tasks = await generating(lambda: start_answers(engine))
    await engine.pause()
    await engine.update_weights(new, policies.source(new))
    assert engine.server.is_paused
    done, _ = await asyncio.wait(tasks, timeout=0.5)
    assert not done
    await engine.resume()
    answers = await asyncio.gather(*tasks)
    check_span_both(answers, old, new)
    policies.check_all(PROMPTS, answers)


async def publish(engine: ServerEngine, policies: Policies) -> None:
    version = policies.add()
    await engine.update_weights(version, policies.source(version))


@contextmanager
def settings(engine: ServerEngine, **changed: object) -> Iterator[None]:
    """Settings that the engine reads at each update."""
    before = {name: getattr(engine._config, name) for name in changed}
    for name, value in changed.items():
        setattr(engine._config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(engine._config, name, value)


@contextmanager
def without_spans(engine: ServerEngine) -> Iterator[None]:
    """The server counts as one that tells only one version an answer."""
    client = engine.server.client
    client.abilities = replace(client.abilities, has_version_spans=False)
    try:
        yield
    finally:
        client.abilities = replace(client.abilities, has_version_spans=True)
