"""A run whose steps are those that clients of the Tinker API ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from aiohttp import web
from transformers import AutoConfig

from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import TakenOver
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import CommandError
from areal_sc.serving.journal import Failed, ServeJournal, Turn
from areal_sc.serving.served_models import TinkerModels
from areal_sc.serving.server import TinkerServer, key_of
from areal_sc.serving.wire import RowLimits
from areal_sc.trainer.run import Run
from areal_sc.trainer.snapshots import SnapshotState

HOST: Final = "127.0.0.1"
PLACES: Final = 8
"""Adapters that are trained together, where the settings say nothing."""
KEYS: Final = "keys"
"""Folder with a file a tenant."""


class ServeRun(Run):
    """Its steps are those of clients, who keep their own account of them."""

    def _take_over(self, taken: TakenOver, rollout: SnapshotState) -> None:
        self.display.note(str(taken))


async def serve(config: GRPOConfig, port: int, tenants: Sequence[str], output: TextIO) -> None:
    """Serves until it is cancelled.

    Raises: CommandError: the port is taken. WorkerError, StepsLost: the run cannot go on; the same
        command does.
    """
    if config.actor.lora.rank and config.actor.lora.places == 1:
        config.actor.lora.places = PLACES
    with ServeRun(config) as run:
        actor = TrainController(make_actor(run.config.actor), run.scheduler)
        rollout = RolloutController(make_generator(run.config.rollout), run.scheduler)
        with run.training(actor, rollout):
            folder = run.folder.serving
            (folder / KEYS).mkdir(parents=True, exist_ok=True)
            keys = {tenant: key_of(folder / KEYS / tenant) for tenant in tenants}
            journal = ServeJournal(folder / "journal")
            found = journal.records()
            turns = [it for it in found if isinstance(it, Turn | Failed)]
            limits = limits_of(run.config)
            models = TinkerModels(actor, rollout, limits, run.folder, journal, turns)
            server = TinkerServer(models, keys, journal, found)
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
                    f"serving {Path(models.name).name} at http://{HOST}:{bound}; keys are in "
                    f"{folder / KEYS}",
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
