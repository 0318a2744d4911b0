"""`serve`: the Tinker API by its official client, over HTTP, with real workers.

Losses and steps are compared with a loop in float64; killed servers and workers with a session that
nobody disturbed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from integration.run_process import REPOSITORY
from integration.serving import (
    NUM_PROMPT,
    WORD,
    Served,
    begun,
    datum,
    end,
    sampled,
    served,
    tokens_of,
)
from tinker import types
from transformers import AutoModelForCausalLM

ADAM = types.AdamParams(
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5
)
SPREAD = [0.0, 0.0, -2.0, -0.5, -1.0, -3.0, -2.5]
GAINS = [0.0, 0.0, 0.0, 1.5, -1.0, 0.5, -0.25]
GIVEN_ADVANTAGES = {"logprobs": SPREAD, "advantages": GAINS}


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("serve") / "run", tiny_model_folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> tinker.ServiceClient:
    return server.client()


def reference_loss(name: str, logprobs: torch.Tensor) -> torch.Tensor:
    """Of one row, by the formulas of the API's documentation."""
    gains, sampled_logprobs = torch.tensor(GAINS).double(), torch.tensor(SPREAD).double()
    ratio = (logprobs - sampled_logprobs).exp()
    match name:
        case "cross_entropy":
            return -logprobs[NUM_PROMPT - 1 :].sum()
        case "importance_sampling":
            return -(ratio * gains).sum()
        case "ppo":
            return -torch.minimum(ratio * gains, ratio.clamp(0.9, 1.3) * gains).sum()
        case "cispo":
            return -(ratio.clamp(0.9, 1.3).detach() * logprobs * gains).sum()
    quadratic = 0.1 / 2 * (logprobs - sampled_logprobs) ** 2
    return -(logprobs * gains - quadratic).sum()


SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.1},
}


@pytest.mark.parametrize("loss", SETTINGS)
def test_steps_are_those_of_a_loop_in_float64(
    client: tinker.ServiceClient, tiny_model_folder: Path, loss: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    decayed = [it for it in model.parameters() if it.dim() > 1]
    others = [it for it in model.parameters() if it.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    ids = torch.tensor([tokens_of(WORD)])
    trained = begun(client, tiny_model_folder)
    rows = [datum() if loss == "cross_entropy" else datum(**GIVEN_ADVANTAGES)]
    for _ in range(3):
        passes = [trained.forward_backward(rows * n, loss, SETTINGS[loss]) for n in (2, 1)]
        step = trained.optim_step(ADAM)
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1)
        logprobs = logprobs.gather(-1, ids[:, 1:, None])[0, :, 0]
        expected = reference_loss(loss, logprobs)
        first, second = (it.result() for it in passes)
        for output in (*first.loss_fn_outputs, *second.loss_fn_outputs):
            np.testing.assert_allclose(output["logprobs"].data, logprobs.tolist(), atol=1e-5)
        assert first.metrics["loss:sum"] == pytest.approx(2 * expected.item(), rel=1e-5)
        assert second.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
        adamw.zero_grad()
        (3 * expected).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        assert step.result().metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_a_loss_of_the_client(client: tinker.ServiceClient, tiny_model_folder: Path) -> None:
    """The client computes it, so the gradient is that of `cross_entropy` with its weights."""
    trained = begun(client, tiny_model_folder)

    def squares(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((it**2).sum() for it in logprobs), {"rows": float(len(data))}  # type: ignore

    output = trained.forward_backward_custom([datum()], squares).result()
    norm = trained.optim_step(ADAM).result().metrics["grad_norm"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    ids = torch.tensor([tokens_of(WORD)])
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    (logprobs**2).sum().backward()
    expected = torch.cat([it.grad.flatten() for it in model.parameters()]).norm()
    assert output.metrics["rows"] == 1.0
    assert norm == pytest.approx(float(expected), rel=1e-4)


def session(server: Served, model: Path, disturb: Callable[[int], None]) -> list[Any]:
    """What a client gets in 8 steps, and the weights at their end.

    Another client waits for the model meanwhile.

    Args: disturb: is called with the number of each step, while its calls are under way.
    """
    trained, told = begun(server.client(), model), list[Any]()
    server.client().create_lora_training_client(base_model=model.name, rank=0)
    for step in range(8):
        rows = [datum(f"{a}{b}d={min(a, b)}d{max(a, b)}$") for a, b in ("ab", "ca", "xe")]
        passes = [trained.forward_backward(rows[:n], "cross_entropy") for n in (3, 2)]
        update = trained.optim_step(ADAM)
        if step % 3 == 1:
            sampling = trained.save_weights_and_get_sampling_client()
        disturb(step)
        told += [it.result().metrics for it in passes] + [update.result().metrics]
        if step % 3 == 1:
            told += sampled(sampling.result())
    path = trained.save_state("end").result().path
    folder = path.removeprefix("tinker://").split("/")[0].replace(":", "-")
    weights = server.run_dir / "serving" / "models" / folder / "state-end" / "model.safetensors"
    return [*told, hashlib.sha256(weights.read_bytes()).hexdigest()]


def test_kills_change_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    victims = {1: "train/0", 2: "server", 4: "rollout/0", 5: "train/0", 6: "server", 7: "train/0"}
    with served(tmp_path / "run", tiny_model_folder) as server:
        expected = session(server, tiny_model_folder, lambda step: None)
    with served(tmp_path / "killed", tiny_model_folder) as server:

        def kill(step: int) -> None:
            if step in victims:
                server.kill(victims[step])

        assert session(server, tiny_model_folder, kill) == expected


def test_a_server_whose_workers_died_with_it_makes_all_steps_again(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    with served(tmp_path / "run", tiny_model_folder) as server:

        def kill_all(step: int) -> None:
            if step == 4:
                server.run.kill_all()
                server.start()

        expected = session(server, tiny_model_folder, lambda step: None)
    with served(tmp_path / "lost", tiny_model_folder) as server:
        assert session(server, tiny_model_folder, kill_all) == expected


@pytest.fixture
def adapter_server(tiny_model_folder: Path, tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "run", tiny_model_folder, "actor.lora.rank=8") as server:
        yield server


def test_the_loop_of_the_document(
    adapter_server: Served, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall("```python\n(.*?)```", (REPOSITORY / "docs/serve.md").read_text(), re.S)
    for given, own in {
        "runs/served/serving/keys/default": str(
            adapter_server.run_dir / "serving" / "keys" / "default"
        ),
        "http://127.0.0.1:8321": adapter_server.url,
        "SmolLM2-135M-Instruct": tiny_model_folder.name,
        "learning_rate=1e-3": "learning_rate=1e-2",  # of random weights, which have learned nothing
    }.items():
        assert given in block
        block = block.replace(given, own)
    names = dict[str, Any]()
    exec(block, names)
    end(names["client"])
    losses = [float(it) for it in re.findall("'loss:sum': ([0-9.]+)", capsys.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < 0.955 * losses[0]  # by 0.09 in each run; most tokens are padding


def test_samples_are_of_the_weights_that_were_saved(
    client: tinker.ServiceClient, tiny_model_folder: Path
) -> None:
    trained = begun(client, tiny_model_folder)
    before = sampled(client.create_sampling_client(base_model=tiny_model_folder.name).result())
    for _ in range(40):
        trained.forward_backward([datum()], "cross_entropy")
        last = trained.optim_step(types.AdamParams(learning_rate=1e-2))
    last.result()
    old = trained.save_weights_and_get_sampling_client().result()
    assert sampled(old) == [tokens_of(WORD[NUM_PROMPT:])] * 2 != before
    path = trained.save_weights_for_sampler("named").result().path
    named = client.create_sampling_client(model_path=path).result()
    assert sampled(named, stop=["b"]) == [tokens_of("ab")] * 2
    with pytest.raises(tinker.RequestFailedError, match="these weights are served no more"):
        sampled(old)


def test_what_is_wrong_is_refused_and_changes_nothing(
    server: Served, client: tinker.ServiceClient, tiny_model_folder: Path
) -> None:

    stranger = tinker.ServiceClient(base_url=server.url, api_key="tml-wrong")
    with pytest.raises(tinker.AuthenticationError, match="this is not the key"):
        stranger.create_sampling_client(base_model=tiny_model_folder.name).result()

    def refused(what: str, ask: Callable[[], Any]) -> None:
        with pytest.raises(tinker.RequestFailedError, match=what):
            ask().result()

    create = client.create_lora_training_client
    refused("lora_config.rank: expected 0", lambda: create(tiny_model_folder.name, rank=8))
    refused("base_model: expected tiny_model", lambda: create("Qwen/Qwen3-8B", rank=0))
    trained = begun(client, tiny_model_folder)

    def passed(*rows: types.Datum, loss: Any = "cross_entropy", **settings: float) -> Any:
        return trained.forward_backward(list(rows), loss, settings)

    refused("no forward_backward came", lambda: trained.optim_step(ADAM))
    nan = [float("nan")] * 7
    refused(r"data\[1\]: weights: expected finite", lambda: passed(datum(), datum(weights=nan)))
    refused("expected 7 numbers", lambda: passed(datum(weights=[1.0])))
    refused("expected at most 64 tokens", lambda: passed(datum("a" * 100, weights=[1.0] * 99)))
    refused("ppo reads .*, got 'weights'", lambda: passed(datum(), loss="ppo"))
    half = datum(logprobs=SPREAD)
    refused("loss_fn_inputs: expected advantages", lambda: passed(half, loss="ppo"))
    refused("loss_fn: expected one of", lambda: passed(datum(), loss="gspo"))
    refused("loss_fn_config of cross_entropy", lambda: passed(datum(), beta=1.0))
    beyond = datum().model_input.to_ints()[1:]
    other = types.Datum(
        model_input=datum().model_input,
        loss_fn_inputs={"target_tokens": [*beyond, 4000], "weights": [1.0] * 7},
    )
    refused("expected tokens of 0 to 38, got 4000", lambda: passed(other))
    shifted = types.Datum(
        model_input=datum().model_input, loss_fn_inputs={"target_tokens": [1, *beyond]}
    )
    refused("target_tokens: expected the tokens of model_input", lambda: passed(shifted))
    padded = types.Datum(  # as loops of reinforcement learning write prompts
        model_input=datum().model_input,
        loss_fn_inputs={"target_tokens": [0, 0, 0, *tokens_of(WORD)[4:]], **GIVEN_ADVANTAGES},
    )
    scored = passed(padded, loss="importance_sampling").result().loss_fn_outputs[0]["logprobs"]
    assert scored.data[:3] == [0.0] * 3
    assert all(it < 0 for it in scored.data[3:])
    first = passed(datum()).result().metrics
    refused("learning_rate", lambda: trained.optim_step(types.AdamParams(learning_rate=-1)))
    wrong = types.AdamParams.model_construct(learning_rate=float("nan"))
    refused("learning_rate", lambda: trained.optim_step(wrong))
    refused("path: expected a name", lambda: trained.save_state("../x"))
    assert trained.forward([datum()], "cross_entropy").result().metrics == first
    trained.optim_step(ADAM).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="temperature"):
        sampled(sampler, temperature=-1.0)
