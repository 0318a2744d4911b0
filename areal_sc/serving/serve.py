"""A run whose steps are those that clients of the Tinker API ask for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from itertools import chain
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
from areal_sc.hub import local_model
from areal_sc.run.status_board import EVERY_S
from areal_sc.serving.journal import KeptRequest, Known, Record, ServeJournal
from areal_sc.serving.served_models import TinkerModels
from areal_sc.serving.server import TinkerServer, key_of
from areal_sc.serving.wire import RowLimits
from areal_sc.trainer.run import Run
from areal_sc.trainer.snapshots import SnapshotState

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
KEYS: Final = "keys"
"""Folder with a file a tenant."""


class ServeRun(Run):
    """Its steps are those of clients, who keep their own account of them."""

    def _take_over(self, taken: TakenOver, rollout: SnapshotState) -> None:
        self.display.note(str(taken))


async def serve(
    config: GRPOConfig,
    host: str,
    port: int,
    tenants: Sequence[str],
    certificate: Path | None,
    output: TextIO,
) -> None:
    """Serves until it is cancelled.

    Args:
        tenants: names of those who have a key each.
        certificate: a PEM file with the chain and the private key, for TLS; None: plain HTTP.
    Raises: CommandError: the certificate is none, other machines would read the keys, or it cannot
        listen there. WorkerError, StepsLost: the run cannot go on; the same command does.
    """
    tls = _tls(host, certificate)
    with ServeRun(config) as run:
        actor = TrainController(make_actor(run.config.actor), run.scheduler)
        rollout = RolloutController(make_generator(run.config.rollout), run.scheduler)
        with run.training(actor, rollout):
            folder = run.folder.serving
            (folder / KEYS).mkdir(parents=True, exist_ok=True)
            keys = {tenant: key_of(folder / KEYS / tenant) for tenant in tenants}
            journal = ServeJournal(folder / "journal")
            found = journal.records()
            _check_tenants(found, tenants, folder)
            limits = limits_of(run.config)
            models = TinkerModels(actor, rollout, limits, run.folder, journal, found)
            server = TinkerServer(models, keys, journal, found)
            telling = asyncio.create_task(_tell_tenants(run, server))
            await server.go_on()
            runner = web.AppRunner(server.application(), access_log=None)
            await runner.setup()
            try:
                try:
                    at = host, port
                    await web.TCPSite(runner, *at, ssl_context=tls).start()
                except OSError as error:
                    raise CommandError(f"cannot listen at {at}: {error.strerror}") from error
                url = f"{'https' if tls else 'http'}://{host}:{runner.addresses[0][1]}"
                print(
                    f"serving {models.name} at {url}; keys are in {folder / KEYS}",
                    file=output,
                    flush=True,
                )
                raise await server.failed
            finally:
                telling.cancel()
                await runner.cleanup()
                await server.close()
                journal.close()


def _tls(host: str, certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate)
        except OSError as error:  # of ssl, too
            raise CommandError(f"--certificate {certificate}: {error}") from error
        return context
    if host not in LOOPBACK:
        raise CommandError(
            f"--host {host}: without --certificate keys go in the clear; expected one of "
            f"{', '.join(LOOPBACK)}, or a certificate"
        )
    return None


def _check_tenants(found: Sequence[Record], tenants: Sequence[str], folder: Path) -> None:
    """Raises: CommandError: an earlier server had others, whose models go on here."""
    models = (it.models for it in found if isinstance(it, Known))
    earlier = {it.tenant for it in found if isinstance(it, KeptRequest)}
    earlier |= {it.tenant for it in chain.from_iterable(models)}
    if gone := sorted(earlier - set(tenants)):
        raise CommandError(
            f"--tenants: expected {', '.join(gone)}, too, who have models here; to begin without "
            f"any model, delete {folder}"
        )


async def _tell_tenants(run: Run, server: TinkerServer) -> None:
    while True:
        run.scheduler.status.note_tenants(server.tenants())
        await asyncio.sleep(EVERY_S)


def limits_of(config: GRPOConfig) -> RowLimits:
    """What the model and the settings allow."""
    own = AutoConfig.from_pretrained(local_model(config.actor.path)).get_text_config()
    room = own.max_position_embeddings, config.rollout.max_context_tokens
    return RowLimits(own.vocab_size, min(*room, config.actor.max_tokens_per_micro_batch))
