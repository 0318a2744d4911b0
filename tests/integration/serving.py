"""Real servers of the Tinker API, and its official client."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker
from integration.run_process import PATIENT, SCRIPTS, RunProcess
from tinker import types

SETTINGS = "generation: {max_new_tokens: 8}\nactor: {device: cpu}\nrollout: {device: cpu}\n"
WORD = "cab=abc$"
NUM_PROMPT = 4
CHARACTERS = "?$=0123456789abcdefghijklmnopqrstuvwxyz"  # of the tiny model, by their numbers


class Served:
    """A server, which may be killed and started again at the same address."""

    def __init__(
        self,
        run_dir: Path,
        model: Path,
        *overrides: str,
        tenants: str = "default",
        script: str = "command.py",
    ) -> None:
        self.run_dir = run_dir
        self._settings = run_dir.with_name(f"{run_dir.name}.yaml")
        self._settings.write_text(SETTINGS)
        own = f"actor.path={model}", "rollout.max_context_tokens=64"
        self._overrides = (*own, *PATIENT, *overrides)
        self._runs: list[RunProcess] = []
        self._clients: list[tinker.ServiceClient] = []
        self._port = 0
        self._tenants = tenants
        self._script = SCRIPTS / script
        self.start()

    def start(self) -> None:
        words = ("serve", "--config", str(self._settings), "--port", str(self._port))
        words += ("--tenants", self._tenants)
        run = RunProcess(self.run_dir, self._script, *words, *self._overrides)
        self._runs.append(run)
        pattern = re.compile(r"http://127\.0\.0\.1:(\d+);")
        run.wait_until(lambda: pattern.search(run.output), "the address")
        found = pattern.search(run.output)
        assert found is not None
        self._port = int(found[1])

    @property
    def run(self) -> RunProcess:
        return self._runs[-1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def key(self, tenant: str) -> str:
        return (self.run_dir / "serving" / "keys" / tenant).read_text()

    def kill(self, who: str) -> None:
        """Kills a worker, or the server, which is started again."""
        if who == "server":
            self.run.send(signal.SIGKILL)
            self.run.wait()
            self.start()
            return
        pids = (run.worker_pid(who) for run in self._runs[-1:])
        os.kill(next(pids), signal.SIGKILL)

    def client(self, tenant: str = "default") -> tinker.ServiceClient:
        """A client that ends with the server."""
        key = self.key(tenant)
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            end(client)
        for run in self._runs:
            run.kill_all()


def end(client: tinker.ServiceClient) -> None:
    """Else it tells its server that it lives for as long as this process does, and logs warnings
    into other tests when nobody hears it."""
    client._get_session_holder().close()


@contextmanager
def served(run_dir: Path, model: Path, *overrides: str, **options: str) -> Iterator[Served]:
    server = Served(run_dir, model, *overrides, **options)
    try:
        yield server
    finally:
        server.close()


def begun(client: tinker.ServiceClient, model: Path, rank: int = 0) -> tinker.TrainingClient:
    name = f"owner/{model.name}"  # as on the hub
    return client.create_lora_training_client(base_model=name, rank=rank).result()


def tokens_of(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def datum(text: str = WORD, **inputs: Sequence[float]) -> types.Datum:
    """A row; without inputs of a loss, its answer has the weight 1."""
    ids = tokens_of(text)
    answer = [0.0] * (NUM_PROMPT - 1) + [1.0] * (len(ids) - NUM_PROMPT)
    given: dict[str, Any] = dict(inputs) or {"weights": answer}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], **{k: list(v) for k, v in given.items()}},
    )


def sampled(sampler: tinker.SamplingClient, number: int = 2, **settings: Any) -> list[list[int]]:
    prompt = types.ModelInput.from_ints(tokens_of(WORD[:NUM_PROMPT]))
    asked = types.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **settings})
    answer = sampler.sample(prompt, number, asked).result()
    return [list(it.tokens) for it in answer.sequences]
