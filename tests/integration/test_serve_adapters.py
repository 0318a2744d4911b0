"""`serve` of many adapters on one base: several clients at a time, by the official client.

Each model of a client is compared with the same one that was trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from integration.serving import NUM_PROMPT, WORD, Served, datum, sampled, served, tokens_of
from msgspec.structs import replace
from safetensors.torch import load_file
from tinker import types

from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import RunStatus, TenantStatus, read_status
from areal_sc.run.verdict import State, _living

ADAM = types.AdamParams(learning_rate=1e-2)
RANK = 4
OVERRIDES = (f"actor.lora.rank={RANK}", "actor.lora.alpha=8", "actor.lora.places=3")
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve") / "run"
    with served(folder, tiny_model_folder, *OVERRIDES, tenants="alice,bob") as server:
        yield server


def begun(
    client: tinker.ServiceClient, model: Path, seed: int = 0, rank: int = RANK
) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=model.name, rank=rank, seed=seed).result()


def rows_of(seed: int, step: int) -> list[types.Datum]:
    letters = LETTERS[(seed + step) % 8], LETTERS[(seed * 3 + 1) % 8]
    return [datum(f"{a}{b}c=abc$") for a, b in (letters, letters[::-1])]


def take_step(model: tinker.TrainingClient, seed: int, step: int) -> list[Any]:
    """Futures of a pass and an update."""
    passed = model.forward_backward(rows_of(seed, step), "cross_entropy")
    return [passed, model.optim_step(ADAM)]


def weights_of(server: Served, model: tinker.TrainingClient, name: str) -> dict[str, torch.Tensor]:
    path = model.save_state(name).result().path
    folder = path.removeprefix("tinker://").split("/")[0].replace(":", "-")
    folder = server.run_dir / "serving" / "models" / folder / f"state-{name}"
    return load_file(folder / "adapter_model.safetensors") | {
        f"optimizer {key}": it for key, it in load_file(folder / "optimizer.safetensors").items()
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], atol=atol, rtol=0, err_msg=name)


def trained(server: Served, models: dict[int, tinker.TrainingClient], steps: int) -> None:
    """Each takes its steps, all at the same time."""
    asked = [
        take_step(model, seed, step) for step in range(steps) for seed, model in models.items()
    ]
    for futures in asked:
        for future in futures:
            future.result()


def test_models_beside_each_other_are_those_trained_alone(
    server: Served, tiny_model_folder: Path
) -> None:
    """Five models at three places, of two ranks: two of them rest at any time."""
    client = server.client("alice")
    ranks = {0: RANK, 1: RANK, 2: 2, 3: RANK, 4: 1}
    models = {seed: begun(client, tiny_model_folder, seed, rank) for seed, rank in ranks.items()}
    trained(server, models, steps=4)
    together = {seed: weights_of(server, model, "together") for seed, model in models.items()}
    for seed, rank in ranks.items():
        alone = begun(client, tiny_model_folder, seed, rank)
        trained(server, {seed: alone}, steps=4)
        assert_equal(weights_of(server, alone, "alone"), together[seed], atol=2e-4)
    moved = [it for name, it in together[0].items() if name.endswith("lora_B.weight")]
    assert all(float(it.abs().max()) > 0.01 for it in moved)


def test_states_are_loaded(server: Served, tiny_model_folder: Path) -> None:
    client = server.client("alice")
    first = begun(client, tiny_model_folder)
    trained(server, {0: first}, steps=3)
    path = first.save_state("third").result().path
    trained(server, {0: first}, steps=2)
    expected = weights_of(server, first, "fifth")
    again = client.create_training_client_from_state_with_optimizer(path).result()
    trained(server, {0: again}, steps=2)
    assert_equal(weights_of(server, again, "fifth"), expected, atol=1e-6)
    fresh = client.create_training_client_from_state(path).result()
    trained(server, {0: fresh}, steps=2)
    differs = weights_of(server, fresh, "fifth")
    name = next(it for it in expected if it.endswith("lora_B.weight"))
    assert float((differs[name] - expected[name]).abs().max()) > 1e-4  # it has no moments


def test_samples_are_of_the_adapter_that_was_saved(server: Served, tiny_model_folder: Path) -> None:
    client = server.client("bob")
    base = client.create_sampling_client(base_model=tiny_model_folder.name).result()
    before = sampled(base)
    word, other = begun(client, tiny_model_folder, 1), begun(client, tiny_model_folder, 2)
    for _ in range(40):
        word.forward_backward([datum()], "cross_entropy")
        other.forward_backward([datum("cab=cba$")], "cross_entropy")
        last = [word.optim_step(ADAM), other.optim_step(ADAM)]
    for future in last:
        future.result()
    samplers = [it.save_weights_and_get_sampling_client() for it in (word, other)]
    assert [sampled(it.result())[0] for it in samplers] == [tokens_of("abc$"), tokens_of("cba$")]
    assert sampled(base) == before
    path = word.save_weights_for_sampler("word").result().path
    named = client.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints(tokens_of(WORD))
    scored = named.compute_logprobs(prompt).result()
    passed = word.forward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    np.testing.assert_allclose(scored[1:], passed.loss_fn_outputs[0]["logprobs"].data, atol=1e-5)
    assert scored[0] is None
    asked = types.SamplingParams(max_tokens=2, temperature=0.0)
    answer = named.sample(
        prompt, 1, asked, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert answer.prompt_logprobs is not None
    np.testing.assert_allclose(answer.prompt_logprobs[1:], scored[1:], atol=1e-5)
    tops = answer.topk_prompt_logprobs
    assert tops is not None
    assert tops[0] is None
    assert [len(top or ()) for top in tops[1:]] == [3] * 7
    assert [(top or [])[0][0] for top in tops[NUM_PROMPT:]] == tokens_of("abc$")


def session(server: Served, folder: Path, disturb: Callable[[int], None]) -> list[Any]:
    """What two clients get in 6 steps of three models, and the weights at their end."""
    clients = [server.client("alice"), server.client("bob")]
    models = {seed: begun(clients[seed % 2], folder, seed) for seed in range(4)}
    told = list[Any]()
    for step in range(6):
        asked = [take_step(model, seed, step) for seed, model in models.items()]
        saved = models[step % 4].save_weights_and_get_sampling_client()
        disturb(step)
        for passed, update in asked:
            told += [passed.result().metrics, update.result().metrics]
        told += sampled(saved.result())
    return [*told, *(weights_of(server, model, "end") for model in models.values())]


def test_kills_change_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    victims = {0: "server", 1: "train/0", 2: "rollout/0", 3: "server", 4: "train/0", 5: "server"}
    with served(tmp_path / "run", tiny_model_folder, *OVERRIDES, tenants="alice,bob") as server:
        expected = session(server, tiny_model_folder, lambda step: None)
    small = dict(tenants="alice,bob", script="small_journal.py")  # it is written anew meanwhile
    with served(tmp_path / "killed", tiny_model_folder, *OVERRIDES, **small) as server:

        def kill(step: int) -> None:
            if step == 4:
                server.run.kill_all()
                server.start()
            elif step in victims:
                server.kill(victims[step])

        found = session(server, tiny_model_folder, kill)
        sources = server.run_dir / "sources"
        assert len(list(sources.glob("rows-served-*"))) == 1
        assert not (sources / "rows-served.jsonl").exists()
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, dict) and any(name.startswith("optimizer ") for name in one):
            assert_equal(one, other, atol=2e-4)


def test_what_is_anothers_stays_its_own(server: Served, tiny_model_folder: Path) -> None:
    alice, bob = server.client("alice"), server.client("bob")
    model = begun(alice, tiny_model_folder)
    path = model.save_state("secret").result().path
    sampling = model.save_weights_for_sampler("secret").result().path
    trained(server, {0: model}, steps=1)
    expected = weights_of(server, model, "before")

    def refused(what: str, ask: Callable[[], Any]) -> None:
        with pytest.raises(tinker.TinkerError, match=what):
            ask().result()

    refused("there is no session", lambda: bob.create_training_client_from_state(path))
    refused("there is no session", lambda: bob.create_sampling_client(model_path=sampling))
    stolen = bob.create_lora_training_client(base_model=tiny_model_folder.name, rank=RANK).result()
    stolen.model_id = model.model_id  # type: ignore[misc]
    refused("there is no session", lambda: stolen.optim_step(ADAM))
    create = alice.create_lora_training_client
    refused("rank: expected 1 to 4", lambda: create(tiny_model_folder.name, rank=8))
    missing = path.replace("secret", "missing")
    refused("there are no weights", lambda: alice.create_training_client_from_state(missing))
    above = path.replace("secret", "..")
    refused("path: ", lambda: alice.create_training_client_from_state(above))
    refused(
        "no state of an optim",
        lambda: alice.create_training_client_from_state_with_optimizer(sampling),
    )
    assert_equal(weights_of(server, model, "after"), expected, atol=0)


def test_status_shows_tenants(server: Served, tiny_model_folder: Path) -> None:
    model = begun(server.client("bob"), tiny_model_folder)
    trained(server, {0: model}, steps=1)
    folder = RunFolder(server.run_dir)
    found = list[RunStatus]()

    def is_told() -> bool:
        found[:] = [status for status in [read_status(folder.status_path)] if status is not None]
        waits = [it.num_waiting for status in found for it in status.tenants]
        return bool(waits) and not any(waits) and bob_of(found[0]).num_answered >= 2

    server.run.wait_until(is_told, "the answers of bob, and that nobody waits")
    (status,) = found
    assert bob_of(status).num_models >= 1
    assert bob_of(status).busy_s > 0
    roles = {name: replace(role, looked=status.written) for name, role in status.roles.items()}
    quiet = replace(status, progressed=0.0, longest_quiet_s=0.0, roles=roles)  # for a night, say
    assert _living(quiet, status.written)[0] is State.healthy


def bob_of(status: RunStatus) -> TenantStatus:
    return next(it for it in status.tenants if it.name == "bob")


def test_what_is_refused_or_ended_holds_up_nothing_else(
    server: Served, tiny_model_folder: Path
) -> None:
    client = server.client("alice")
    model, ended = (begun(client, tiny_model_folder, seed) for seed in (0, 1))
    with pytest.warns(FutureWarning, match="DEPRECATED"):
        loading = model.load_state("tinker://missing/weights/x")
    with pytest.raises(tinker.RequestFailedError, match="there is no session"):
        loading.result()
    trained(server, {0: model}, steps=1)
    session = str(model.model_id).partition(":")[0]
    new = {"model_seq_id": 7, "base_model": tiny_model_folder.name, "lora_config": {"rank": 1}}
    headers = {"X-API-Key": server.key("alice")}
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=60) as raw:
        made_up = raw.post("create_model", json={"session_id": f"{session}:/../../x", **new})
        assert (made_up.status_code, "there is no session" in made_up.text) == (404, True)
        far = {"model_id": model.model_id, "seq_id": 10**9, "optim_params": ADAM.model_dump()}
        assert "expected about" in raw.post("optim_step", json=far).text
        under_way = take_step(ended, 1, 0)
        under_way[0].result()
        asked = raw.post("unload_model", json={"model_id": ended.model_id}).json()
        with suppress(tinker.TinkerError):  # its update may have been before
            under_way[1].result()
        raw.post("retrieve_future", json={"request_id": asked["request_id"]}).raise_for_status()
    with pytest.raises(tinker.NotFoundError, match="any more"):
        ended.optim_step(ADAM).result()
    trained(server, {0: model}, steps=1)
