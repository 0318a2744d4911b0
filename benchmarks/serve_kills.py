"""Processes of a server of the Tinker API are killed in the midst of calls of its official client.

    python benchmarks/serve_kills.py --json serve_kills.json      50 kills of each kind
    python benchmarks/serve_kills.py --part adapter --kinds server rank
    python benchmarks/serve_kills.py --quick

SIGKILL hits, at random moments while calls are open: the server (which is the script), a train
rank, a rollout worker, all processes of the run at once, or a client (a process of its own in the
midst of calls; every second one is started again, the others stay away). Parts share the kills:

adapter   one model; weights and the optimizer's state are those of an undisturbed session, bit for
          bit. Clients that are killed sample.
many      four models of two tenants at three places. Rows of several models are computed together
          as they come, so two undisturbed sessions differ, too; `noise` is by how much, as a share
          of each tensor's largest number. Those of killed ones are within `TOLERANCE`, and their
          counts of steps are equal. Clients that are killed train a model, and sample.
whole     all parameters of one model: weights bit for bit. Clients that are killed sample.

Answers are compared as well, but for the norm of a gradient, which the answer of a step lacks that
the ranks made right before the server died: `answers_without_norm` are so many. The program ends
with an error where anything differs, or where a process, a file in shared memory, or a folder of a
model that was unloaded is left at the end.

`until_step_s` is from the signal until the step whose calls were open, and the one after it, were
answered: whoever died has to be back by then. Undisturbed, that is two steps. The official client
asks a server that is away again after 1, 2, 4, 8, 16, 30 s; `until_serving_s` is until the server
listens once more.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import minimal
import report
import tinker
import torch
from integration.serving import Served
from safetensors.torch import load_file
from tinker import types

KINDS: Final = ("server", "rank", "rollout", "all", "client")
PARTS: Final = ("adapter", "many", "whole")
WORKERS: Final = {"rank": "train/0", "rollout": "rollout/0"}
TENANTS: Final = {"adapter": ("alice",), "many": ("alice", "bob"), "whole": ("alice",)}
NUM_MODELS: Final = {"adapter": 1, "many": 4, "whole": 1}
RANK: Final = 4
ADAM: Final = types.AdamParams(learning_rate=1e-2, eps=1e-4)
TOLERANCE: Final = 0.02
"""Of the largest number of a tensor; a step that is missing, or made twice, is ten times more."""
MOST_WAIT_S: Final = 0.6


def overrides_of(part: str, memory: Path) -> list[str]:
    settings = [f"transport.shared_memory={memory}", "scheduler.max_deaths=100000"]
    settings += ["rollout.max_context_tokens=16"]
    if part != "whole":
        settings += [f"actor.lora.rank={RANK}", "actor.lora.alpha=8", "actor.lora.places=3"]
    return settings


def row_of(number: int) -> types.Datum:
    """An answer that depends on the prompt."""
    chosen = random.Random(number)
    ids = [chosen.randrange(3, 13) for _ in range(4)]
    ids += sorted(ids)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0] * 3 + [1.0] * 4},
    )


def begun(client: tinker.ServiceClient, name: str, rank: int, seed: int) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=name, rank=rank, seed=seed).result()


class Session:
    """Models of the clients, which take their steps until there were enough kills.

    Attributes:
        told: what the clients were answered, by step.
        num_steps: that were answered.
        may_step: is cleared by who wants no step to begin meanwhile.
    """

    def __init__(self, server: Served, model: Path, part: str) -> None:
        self.told: list[Any] = []
        self.num_steps = 0
        self.may_step = threading.Event()
        self.may_step.set()
        self._answered = threading.Condition()
        self._server = server
        self._part = part
        clients = [server.client(tenant) for tenant in TENANTS[part]]
        rank = 0 if part == "whole" else RANK
        self.models = [
            begun(clients[seed % len(clients)], model.name, rank, seed)
            for seed in range(NUM_MODELS[part])
        ]

    def step(self) -> None:
        """All calls of a step are sent before one is answered."""
        asked = []
        for seed, model in enumerate(self.models):
            rows = [row_of(self.num_steps * 64 + seed * 8 + it) for it in range(3)]
            asked += [
                model.forward_backward(rows[:1], "cross_entropy"),
                model.forward_backward(rows[1:], "cross_entropy"),
                model.optim_step(ADAM),
            ]
        saving = self.models[self.num_steps % len(self.models)]
        saved = saving.save_weights_and_get_sampling_client()
        self.told += [future.result().metrics for future in asked]
        prompt = types.ModelInput.from_ints([3, 4, 5, 6])
        settings = types.SamplingParams(max_tokens=4, temperature=0.0)
        answer = saved.result().sample(prompt, 2, settings).result()
        self.told.append([list(it.tokens) for it in answer.sequences])
        with self._answered:
            self.num_steps += 1
            self._answered.notify_all()

    def wait_for_steps(self, number: int) -> None:
        with self._answered:
            self._answered.wait_for(lambda: self.num_steps >= number)

    def end(self) -> list[dict[str, torch.Tensor]]:
        """Weights and state of each model."""
        found = []
        for model in self.models:
            path = model.save_state("end").result().path
            folder = path.removeprefix("tinker://").split("/")[0].replace(":", "-")
            folder = self._server.run_dir / "serving" / "models" / folder / "state-end"
            found.append(
                {
                    f"{file.name} {name}": values
                    for file in sorted(folder.glob("*.safetensors"))
                    for name, values in load_file(file).items()
                }
            )
            assert found[-1], f"{folder} has no weights"
        return found


class Client:
    """A process that calls the server until it is killed; its parent reads ids of its models."""

    def __init__(self, server: Served, part: str, model: Path, folder: Path) -> None:
        self._file = folder / "models-of-clients"
        given = server.url, server.key("alice"), part, model.name, str(self._file)
        command = [sys.executable, __file__, "--client", json.dumps(given)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise AssertionError("a client has ended before it was killed")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def be_client(url: str, key: str, part: str, name: str, file: str) -> None:
    """Never ends."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    base = client.create_sampling_client(base_model=name).result() if part != "whole" else None
    model = begun(client, name, RANK, 77) if part == "many" else None
    if model is not None:
        with open(file, "a") as written:
            written.write(f"{model.model_id}\n")
    prompt = types.ModelInput.from_ints([7, 8, 9])
    settings = types.SamplingParams(max_tokens=16)
    print("calls", flush=True)
    number = 0
    while True:
        number += 1
        asked: list[Any] = []
        if base is not None:
            asked += [base.sample(prompt, 4, settings) for _ in range(3)]
        if model is not None:
            asked += [model.forward_backward([row_of(number)], "cross_entropy")]
            asked += [model.optim_step(ADAM), model.save_weights_and_get_sampling_client()]
        if not asked:  # of a whole model, whose base is sampled from before the first publication
            asked.append(client.create_lora_training_client(base_model=name, rank=0))
        for future in asked:
            future.result()


class Killer:
    """Kills, and notes how long it takes until the next whole step is answered.

    Attributes:
        took_s: by kind.
        serving_s: of those of the server, until it listens again.
        failed: by what it has ended.
        noise, difference: of weights; see above.
        num_without_norm: answers of `optim_step` that lack its gradient's norm.
    """

    def __init__(
        self, server: Served, session: Session, kinds: list[str], start: Callable[[], Client]
    ) -> None:
        self.took_s = defaultdict[str, list[float]](list)
        self.serving_s = defaultdict[str, list[float]](list)
        self.failed: BaseException | None = None
        self.noise = self.difference = 0.0
        self.num_without_norm = 0
        self._server = server
        self._session = session
        self._kinds = kinds
        self._start = start
        self._clients = list[Client]()
        self._random = random.Random(len(kinds))

    def run(self) -> None:
        try:
            for kind in self._kinds:
                if kind == "client" and not self._clients:
                    self._start_client()
                time.sleep(self._random.random() * MOST_WAIT_S)
                self._kill(kind)
        except BaseException as error:
            self.failed = error
        finally:
            for client in self._clients:
                client.kill()

    def _kill(self, kind: str) -> None:
        num_steps, killed_s = self._session.num_steps, time.monotonic()
        if kind == "client":
            self._clients.pop().kill()
        elif kind == "all":
            self._server.run.kill_all()
            self._server.start()
        else:
            self._server.kill(WORKERS.get(kind, kind))
        if kind in ("server", "all"):
            self.serving_s[kind].append(time.monotonic() - killed_s)
        self._session.wait_for_steps(num_steps + 2)
        self.took_s[kind].append(time.monotonic() - killed_s)
        report.say(f"{kind} {len(self.took_s[kind])}: {self.took_s[kind][-1]:.2f} s")
        if kind == "client" and len(self.took_s[kind]) % 2:
            self._start_client()

    def _start_client(self) -> None:
        self._session.may_step.clear()
        self._clients.append(self._start())
        self._session.may_step.set()


def unload(server: Served, tenant: str, model_id: str) -> None:
    """As the client of the API does not."""
    key = server.key(tenant)

    def post(path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{server.url}/api/v1/{path}",
            json.dumps(body).encode(),
            {"X-API-Key": key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    asked = post("unload_model", model_id=model_id, type="unload_model")
    post("retrieve_future", request_id=asked["request_id"])


def left_of(server: Served, session: Session, part: str, file: Path, memory: Path) -> list[str]:
    """What is left once all models were unloaded, and the server has ended."""
    gone = file.read_text().split() if file.exists() else []
    for number, model in enumerate(session.models):
        unload(server, TENANTS[part][number % len(TENANTS[part])], str(model.model_id))
    for model_id in gone:
        unload(server, "alice", model_id)
    run = server.run
    run.send(signal.SIGINT)
    run.wait()
    left = [*run.processes().values(), *map(str, memory.glob("*"))]
    for folder in (server.run_dir / "serving" / "models").glob("*"):
        left += [str(path) for path in folder.glob("*") if not path.name.startswith("state-")]
        left += [] if any(folder.iterdir()) else [f"{folder} is empty"]
    return left


@contextmanager
def started(folder: Path, part: str, model: Path, memory: Path) -> Iterator[Served]:
    settings = overrides_of(part, memory)
    server = Served(folder, model, *settings, tenants=",".join(TENANTS[part]))
    try:
        yield server
    finally:
        server.close()


def undisturbed(folder: Path, part: str, model: Path, num_steps: int) -> tuple[Any, Any]:
    """What is told, and the weights of models, in so many steps."""
    with started(folder, part, model, folder.with_name("memory")) as server:
        session = Session(server, model, part)
        for _ in range(num_steps):
            session.step()
        return session.told, session.end()


def difference(one: Any, other: Any) -> float:
    """The largest difference of two sessions' weights, as a share of each tensor's largest number.

    Raises: AssertionError: models differ in the number of their steps.
    """
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            if values.dtype.is_floating_point:
                most = float(theirs[name].abs().max())
                gap = float((values - theirs[name]).abs().max())
                worst = max(worst, gap / most if most else gap)
            assert "step" not in name or torch.equal(values, theirs[name]), name
    return worst


def is_without_norm(told: Any, expected: Any) -> bool:
    """Whether an answer is that of a step which the ranks made right before a death."""
    return isinstance(told, dict) and told == {"lr": expected["lr"]}


def digest(weights: Any) -> str:
    found = hashlib.sha256()
    for model in weights:
        for name, values in sorted(model.items()):
            found.update(name.encode() + values.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def measure(folder: Path, part: str, model: Path, kinds: list[str]) -> Killer:
    """Raises: SystemExit: something differs, or is left."""
    folder.mkdir()
    memory = folder / "memory"
    memory.mkdir()
    with started(folder / "killed", part, model, memory) as server:
        session = Session(server, model, part)
        killer = Killer(server, session, kinds, lambda: Client(server, part, model, folder))
        thread = threading.Thread(target=killer.run, daemon=True)
        thread.start()
        while thread.is_alive():
            session.may_step.wait()
            session.step()
        thread.join()
        if killer.failed is not None:
            raise killer.failed
        num_steps, told, weights = session.num_steps, session.told, session.end()
        left = left_of(server, session, part, folder / "models-of-clients", memory)
    expected_told, expected = undisturbed(folder / "undisturbed", part, model, num_steps)
    report.say(f"{part}: {num_steps} steps of each model")
    if left:
        sys.exit(f"{part}: left behind: {left}")
    if part != "many":
        if digest(weights) != digest(expected):
            sys.exit(f"{part}: weights differ by up to {difference(weights, expected):g}")
        others = [pair for pair in zip(told, expected_told, strict=True) if pair[0] != pair[1]]
        killer.num_without_norm = sum(is_without_norm(*pair) for pair in others)
        if killer.num_without_norm < len(others):
            sys.exit(f"{part}: answers differ: {others}")
        return killer
    _, again = undisturbed(folder / "again", part, model, num_steps)
    noise, gap = difference(again, expected), difference(weights, expected)
    report.say(f"{part}: noise {noise:.2g}, difference {gap:.2g}")
    if gap > TOLERANCE:
        sys.exit(f"{part}: weights differ by {gap:g} of the largest one")
    killer.noise, killer.difference = noise, gap
    return killer


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of each kind, in all parts")
    parser.add_argument("--part", choices=PARTS, help="one part, with all kills")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--client", help="internal")
    arguments = report.parse(parser, kills=1)
    if arguments.client:
        be_client(*json.loads(arguments.client))
    parts = (arguments.part,) if arguments.part else PARTS[:1] if arguments.quick else PARTS
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    took_s = defaultdict[str, list[float]](list)
    serving_s = defaultdict[str, list[float]](list)
    folder = Path(tempfile.mkdtemp(prefix="serve-kills-"))
    try:
        model = folder / "model"
        minimal.make_model(str(model))
        for number, part in enumerate(parts):
            its = len(range(number, arguments.kills, len(parts)))
            kinds = [kind for kind in arguments.kinds for _ in range(its)]
            random.Random(0).shuffle(kinds)
            found = measure(folder / part, part, model, kinds)
            if part == "many":
                records["many",] = {
                    "noise_share": found.noise,
                    "difference_share": found.difference,
                }
            else:
                records[part,] = {"answers_without_norm": float(found.num_without_norm)}
            for kind, seconds in found.took_s.items():
                took_s[kind] += seconds
                serving_s[kind] += found.serving_s[kind]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for kind, seconds in took_s.items():
        records[kind,] = {
            "num_kills": float(len(seconds)),
            "median_until_step_s": statistics.median(seconds),
            "worst_until_step_s": max(seconds),
        }
        if serving_s[kind]:
            records[kind,] |= {
                "median_until_serving_s": statistics.median(serving_s[kind]),
                "worst_until_serving_s": max(serving_s[kind]),
            }
    told = {"kills": arguments.kills, "parts": " ".join(parts)}
    report.print_records("Kills in the midst of calls", told, ["what"], records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
