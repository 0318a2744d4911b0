"""The circle of a product: run, collect, train, export, deploy, and collect again.

    python examples/closed_loop.py --config configs/tool_use.yaml run_dir=runs/loop

The agents of `online.py` collect while the run trains. The model that it leaves is deployed behind
SGLang, or by the command of `+task.deploy=...`, and the same agents go on there: URL and key
differ, nothing else. The next round begins from the deployed model:

    python examples/closed_loop.py --config configs/tool_use.yaml run_dir=runs/loop_2 \
        actor.path=runs/loop/model
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import online
from agent import look_up
from tool_use import Keys, LookUp, train

from areal_sc import GRPOConfig, OnlineWorkflow, load_config, run_script

DEPLOY = (
    "{python} -m sglang.launch_server --model-path {model} --port {port} "
    "--served-model-name policy --tool-call-parser qwen"
)
NUM_QUESTIONS = 64


@contextmanager
def deployed(command: str, model: Path) -> Iterator[str]:
    """URL of the model behind a server of its own."""
    with socket.socket() as kept:  # bound, so that no other process gets the port meanwhile
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but the server may listen
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        names = {"model": shlex.quote(str(model)), "python": shlex.quote(sys.executable)}
        server = subprocess.Popen(shlex.split(command.format(port=port, **names)))
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit(f"the server has ended: {server.args}") from None
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait()


async def collect_again(url: str, key: str, seed: int) -> list[float]:
    """The rewards of episodes with the deployed model."""
    session, keys = SimpleNamespace(base_url=url, api_key=key), Keys(seed)
    return await asyncio.gather(*(look_up(keys[n], session) for n in range(NUM_QUESTIONS)))


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig, makes_model=True)
    run_dir = Path(config.run_dir)
    collecting = subprocess.Popen([sys.executable, online.__file__, "collect", str(run_dir)])
    try:
        train(argv, OnlineWorkflow(), evaluation_workflow=LookUp())
    finally:
        collecting.terminate()
        collecting.wait()

    with deployed(config.task.get("deploy", DEPLOY), run_dir / "model") as url:
        rewards = asyncio.run(collect_again(url, "any", config.seed + 2_000_003))
    print(f"the deployed model: {sum(rewards) / len(rewards):.3f} of {len(rewards)} answers right")


if __name__ == "__main__":
    sys.exit(run_script(main))
