"""A run whose steps are those that clients of the Tinker API ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TextIO

from aiohttp import web
from transformers import AutoConfig

from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import CommandError
from areal_sc.serving.journal import ServeJournal
from areal_sc.serving.served_model import TinkerModel
from areal_sc.serving.server import TinkerServer, key_of
from areal_sc.serving.wire import RowLimits
from areal_sc.trainer.run import Run

HOST: Final = "127.0.0.1"
KEY_FILE: Final = "key"


async def serve(config: GRPOConfig, port: int, output: TextIO) -> None:
    """Serves until it is cancelled.

    Raises: CommandError: the port is taken. WorkerError, StepsLost: the run cannot go on; the same
        command does.
    """
    with Run(config) as run:
        actor = TrainController(make_actor(run.config.actor), run.scheduler)
        rollout = RolloutController(make_generator(run.config.rollout), run.scheduler)
        with run.training(actor, rollout):
            folder = run.folder.serving
            folder.mkdir(exist_ok=True)
            journal = ServeJournal(folder / "journal")
            model = TinkerModel(actor, rollout, limits_of(run.config), run.folder)
            server = TinkerServer(model, key_of(folder / KEY_FILE), journal)
            await server.go_on()
            runner = web.AppRunner(server.application(), access_log=None)
            await runner.setup()
            try:
                try:
                    await web.TCPSite(runner, HOST, port).start()
                except OSError as error:
                    raise CommandError(f"--port {port}: {error.strerror}") from error
                bound = runner.addresses[0][1]
                print(
                    f"serving {Path(model.name).name} at http://{HOST}:{bound}; the key is in "
                    f"{folder / KEY_FILE}",
                    file=output,
                    flush=True,
                )
                raise await server.failed
            finally:
                await runner.cleanup()
                await server.close()
                journal.close()


def limits_of(config: GRPOConfig) -> RowLimits:
    """What the model and the settings allow."""
    own = AutoConfig.from_pretrained(config.actor.path).get_text_config()
    room = own.max_position_embeddings, config.rollout.max_context_tokens
    return RowLimits(own.vocab_size, min(*room, config.actor.max_tokens_per_micro_batch))
