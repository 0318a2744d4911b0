"""The process beside the script, and nodes that share no folder with it, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recorded_groups import MEBI, add_span, played, trajectory
from waiting import until

from areal_sc import SingleTurnWorkflow
from areal_sc.config.schema import Device, RecordsConfig, SchedulerConfig
from areal_sc.errors import (
    CheckpointError,
    ConfigError,
    NotPermitted,
    PeerLost,
    StaleCall,
    TransportError,
    WaitTimeout,
    WorkflowError,
)
from areal_sc.nodes.spec import Launch, Shipped, Welcome, WorkerOrder
from areal_sc.records import recorder as recorder_module
from areal_sc.records.reading import rows, spans
from areal_sc.records.record_files import FilesOfProcess, RecordStore, Series, record_files
from areal_sc.records.recorder import Recorder
from areal_sc.run.named_paths import Contents, name_path
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.files_beside import FilesBeside
from areal_sc.shipping import worker_side
from areal_sc.shipping.calls import (
    END_FILE,
    PIECE_BYTES,
    READ_PIECE,
    SEND_RECORDS,
    WRITE_PIECE,
    FilePiece,
    SentRecords,
    WrittenFile,
    WrittenPiece,
)
from areal_sc.shipping.client import ScriptFiles
from areal_sc.shipping.node_side import FolderInPlace, NodeCache
from areal_sc.shipping.worker_side import ReceivedRecords, ShippedFiles
from areal_sc.sources import session
from areal_sc.sources.prompts import JsonlPrompts
from areal_sc.sources.reference import ObjectReference, resolve
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import KeyPair, RunKeys
from areal_sc.transport.security.passes import Caller, Passes
from areal_sc.transport.sockets.interface import LOOPBACK
from areal_sc.workflows.registry import SourceReader, SourceRegistry

LIMIT_S = 60.0
NO_SERVICE_S = 1.0
TOKEN = "0123456789ab"


@dataclass
class Script:
    """A run folder, and what serves its files.

    Attributes:
        files: a worker's connection.
    """

    folder: RunFolder
    keys: RunKeys
    where: str
    transport: ZmqTransport
    files: ScriptFiles

    def snapshot(self, step: int, text: str) -> None:
        folder = self.folder.snapshot_path(step) / "engine"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("rank-0.safetensors", "snapshot.json"):
            (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def patient_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all that waits when they are closed, on a busy machine too."""
    monkeypatch.setattr(recorder_module, "_CLOSE_LIMIT_S", LIMIT_S)


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys.create()


@pytest.fixture
def folder(tmp_path: Path, keys: RunKeys) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.sources, folder.checkpoints, folder.logs):
        path.mkdir(parents=True)
    keys.write(folder.keys_path)
    return folder


@pytest.fixture
def passes(keys: RunKeys) -> Passes:
    return Passes(keys)


@pytest.fixture
def beside(folder: RunFolder, passes: Passes) -> Iterator[FilesBeside]:
    beside = FilesBeside(folder, LOOPBACK, passes)
    yield beside
    beside.close()


@pytest.fixture
def next_beside(folder: RunFolder, keys: RunKeys) -> Iterator[FilesBeside]:
    """That of the next start of the script, which has the same keys."""
    beside = FilesBeside(folder, LOOPBACK, Passes(keys, 1, is_first=False))
    yield beside
    beside.close()


@pytest.fixture
async def script(
    beside: FilesBeside, folder: RunFolder, keys: RunKeys, passes: Passes
) -> AsyncIterator[Script]:
    where = await asyncio.to_thread(beside.address)
    of_worker = passes.issue("train/0", Caller.train)
    transport = ZmqTransport(client=CurveClient.of_worker(of_worker))
    async with ScriptFiles.opened(transport, where) as files:
        yield Script(folder, keys, where, transport, files)
    await transport.close()


def cache_in(path: Path) -> NodeCache:
    cache = NodeCache(str(path))
    cache.make()
    return cache


async def test_a_named_path_comes_once_a_node_and_again_when_it_has_changed(
    script: Script, tmp_path: Path
) -> None:
    model, content = tmp_path / "model", os.urandom(3 * PIECE_BYTES + 7)
    (model / "sub").mkdir(parents=True)
    (model / "weights").write_bytes(content)
    (model / "sub" / "empty").touch()
    name_path(script.folder.sources, model, Contents.all)
    cache = cache_in(tmp_path / "node")
    brought = await asyncio.gather(*(cache.bring(script.files, str(model), LIMIT_S) for _ in "abc"))
    [here] = set(brought)
    assert here is not None
    assert (here / "weights").read_bytes() == content
    assert (here / "sub" / "empty").read_bytes() == b""
    first_written_ns = (here / "weights").stat().st_mtime_ns
    assert await cache.bring(script.files, str(model), LIMIT_S) == here
    assert (here / "weights").stat().st_mtime_ns == first_written_ns, "it did not come again"
    (model / "weights").write_bytes(b"other")
    other = await cache.bring(script.files, str(model), LIMIT_S)
    assert other not in (None, here)
    assert [it.name for it in (tmp_path / "node").rglob(".*.partial")] == []


async def test_a_file_that_changes_on_its_way_does_not_come(script: Script, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("1")
    name_path(script.folder.sources, data, Contents.all)
    listing = await script.files.list_path(str(data))
    data.write_text("2")
    with pytest.raises(TransportError, match="was changed while it was brought"):
        await script.files.read_file(str(data), listing.files[0], tmp_path / "here")


async def test_nothing_else_of_the_machine_comes(script: Script, tmp_path: Path) -> None:
    secret, cache = tmp_path / "secret", cache_in(tmp_path / "node")
    secret.write_text("x")
    assert await cache.bring(script.files, str(secret), LIMIT_S) is None
    os.symlink(secret, script.folder.sources / "linked")
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").touch()
    (code / "notes").touch()
    name_path(script.folder.sources, code, Contents.code)
    await script.files.list_path(str(code))
    for path, name in (
        *(
            ("", "sources/linked"),
            ("", f"sources/.session_{'0' * 64}"),
            ("", "keys.json"),
            ("", "../secret"),
            ("", str(secret)),
        ),
        *((str(secret), "secret"), (str(code), "notes"), (str(code), "../secret"), (str(code), "")),
    ):
        with pytest.raises(TransportError):
            await script.files.read_all(path, name)
    connection = script.transport.connect(script.where, "files", ANY_INCARNATION)
    for num_bytes, offset in ((PIECE_BYTES + 1, 0), (-1, 0), (1, -1)):
        piece = FilePiece(str(code), "a.py", offset, num_bytes)
        with pytest.raises(TransportError):
            await connection.call(READ_PIECE, piece, timeout_s=LIMIT_S)


async def test_only_workers_of_the_run_are_served(script: Script) -> None:
    (script.folder.sources / "1.json").write_text("secret")
    piece = FilePiece("", "sources/1.json", 0, 6)
    strangers = Passes(RunKeys.create()).issue("rollout/0", Caller.rollout)
    for client in (
        CurveClient(KeyPair.create(), script.keys.workers.public),
        CurveClient(strangers.own, script.keys.workers.public, strangers.shown_pass),
    ):
        transport = ZmqTransport(client=client)
        stranger = transport.connect(script.where, "files", ANY_INCARNATION)
        with pytest.raises(TransportError):
            await stranger.call(READ_PIECE, piece, timeout_s=NO_SERVICE_S)
        await transport.close()
    member = script.transport.connect(script.where, "files", ANY_INCARNATION)
    assert await member.call(READ_PIECE, piece, timeout_s=LIMIT_S) == b"secret"


async def test_what_comes_back_is_whole_or_not_there(script: Script, tmp_path: Path) -> None:
    own, content = tmp_path / "own", os.urandom(2 * PIECE_BYTES + 1)
    own.write_bytes(content)
    name = "exports/train/0123abcd/model.safetensors"
    await script.files.write_file(own, name)
    assert (script.folder.path / name).read_bytes() == content
    own.write_bytes(b"")
    await script.files.write_file(own, name)
    assert (script.folder.path / name).read_bytes() == b""
    connection = script.transport.connect(script.where, "files", ANY_INCARNATION)
    piece = WrittenPiece(name, TOKEN, 0, b"a part")
    await connection.call(WRITE_PIECE, piece, timeout_s=LIMIT_S)
    end = WrittenFile(name, TOKEN, 7)
    with pytest.raises(CheckpointError, match="6 of 7 bytes have come"):
        await connection.call(END_FILE, end, timeout_s=LIMIT_S)
    assert (script.folder.path / name).read_bytes() == b""
    for token in ("../x", "", "xyz"):
        with pytest.raises(TransportError):
            await connection.call(WRITE_PIECE, replace(piece, token=token), timeout_s=LIMIT_S)
    with pytest.raises(NotPermitted):
        await script.files.write_file(own, "sources/1.json")
    snapshot = "checkpoints/.step-000002.partial/engine/snapshot.json"
    with pytest.raises(CheckpointError, match="No such file"):
        await script.files.write_file(own, snapshot)  # the script has given it up
    assert os.listdir(script.folder.checkpoints) == []
    assert [it.name for it in script.folder.path.rglob(".*.partial")] == []


async def test_a_generator_brings_logs_back_and_nothing_else(
    script: Script, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"a line")
    of_worker = Passes(script.keys).issue("rollout/0", Caller.rollout)
    transport = ZmqTransport(client=CurveClient.of_worker(of_worker))
    async with ScriptFiles.opened(transport, script.where) as files:
        log = "logs/node1/rollout-0.log"
        await files.write_file(own, log)
        assert (script.folder.path / log).read_bytes() == b"a line"
        with pytest.raises(NotPermitted):
            await files.write_file(own, "exports/train/0123abcd/config.json")
    await transport.close()
    assert not script.folder.exports.exists()


async def test_logs_of_a_node_come_back_in_the_name_of_any_worker_that_it_still_has(
    script: Script, passes: Passes, tmp_path: Path
) -> None:
    config = SchedulerConfig(run_dir=str(script.folder.path), node_folder=str(tmp_path / "node"))
    node = FolderInPlace(config, "run")
    node.note_welcome(Welcome("", script.where))
    names = ("rollout/0", "rollout/1")
    orders = [WorkerOrder("rollout", i, "x", {}, Device.cpu, 1) for i, _ in enumerate(names)]
    keys = [passes.issue(name, Caller.rollout) for name in names]
    await node.bring_first(Launch(orders, keys, timeout_s=LIMIT_S))
    elsewhere = CurveClient.of_worker(passes.issue(names[0], Caller.rollout))
    transport = ZmqTransport(client=elsewhere)
    async with ScriptFiles.opened(transport, script.where) as files:
        await files.list_run("checkpoints/step-1/engine")  # so its life before is known to be void
    await transport.close()
    RunFolder(node.config.run_dir).log_path("rollout/1").write_text("a line")
    await node.close()
    [log] = script.folder.logs.glob("*/rollout-1.log")
    assert log.read_text() == "a line"


async def test_a_process_that_dies_is_there_again_at_its_address(
    script: Script, beside: FilesBeside
) -> None:
    (script.folder.sources / "1.json").write_text("x")
    assert await script.files.read_all("", "sources/1.json") == b"x"
    port = int(script.where.rpartition(":")[2])
    async with asyncio.timeout(LIMIT_S):
        with beside._one_starts:  # so it is not started again before another process has its port
            assert beside._process is not None
            beside._process.child.kill()
            while True:
                with suppress(OSError):
                    other = socket.create_server(("127.0.0.1", port))
                    break
                await asyncio.sleep(0.05)
        log = script.folder.log_path("files")
        await until(lambda: "Address already in use" in log.read_text())
        other.close()
        while True:
            try:
                async with ScriptFiles.opened(script.transport, script.where) as files:
                    assert await files.read_all("", "sources/1.json") == b"x"
                break
            except TransportError:
                await asyncio.sleep(0.1)
    assert await asyncio.to_thread(beside.address) == script.where


async def served(files: ScriptFiles) -> bool:
    """Whether a caller is; NotPermitted otherwise, and nothing else."""
    try:
        return await files.read_all("", "sources/1.json") == b"x"
    except NotPermitted:
        return False


async def test_whose_worker_was_started_again_is_not_served_any_more(
    script: Script, beside: FilesBeside, passes: Passes
) -> None:
    (script.folder.sources / "1.json").write_text("x")
    lives = [passes.issue(f"rollout/{number}", Caller.rollout) for number in (0, 1)]
    transports = [ZmqTransport(client=CurveClient.of_worker(keys)) for keys in lives]
    async with (
        ScriptFiles.opened(transports[0], script.where) as before,
        ScriptFiles.opened(transports[1], script.where) as other,
    ):
        assert await served(before)
        passes.issue("rollout/0", Caller.rollout)  # its new life does not come here
        async with asyncio.timeout(LIMIT_S):
            while await served(before):
                pass
        assert await served(other)
    assert beside._process is not None
    os.kill(beside._process.child.pid, signal.SIGKILL)  # another one is told before it serves
    pid, answers = beside._process.child.pid, list[bool]()
    async with asyncio.timeout(LIMIT_S):
        while not answers:
            with suppress(PeerLost):
                async with ScriptFiles.opened(transports[0], script.where) as before:
                    answers.append(await served(before))
        # it may serve before the script has heard of it
        await until(lambda: beside._process is not None)
    assert beside._process.child.pid != pid
    assert answers == [False]
    for transport in transports:
        await transport.close()


class Rows:
    """A dataset that only the script can read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"prompt": str(index)}


def files_on_node(script: Script, tmp_path: Path, **settings: Any) -> ShippedFiles:
    """Those of a worker."""
    folders = {"run_dir": str(tmp_path / "here"), "node_folder": str(tmp_path / "node")}
    config = SchedulerConfig(**folders, **settings)
    return ShippedFiles(Shipped(str(script.folder.path)), config, script.transport)


@pytest.fixture
async def shipped(script: Script, tmp_path: Path) -> ShippedFiles:
    cache_in(tmp_path / "node")
    (tmp_path / "here" / "sources").mkdir(parents=True)
    (tmp_path / "here" / "checkpoints").mkdir()
    (tmp_path / "here" / ".files").write_text(script.where)
    files = files_on_node(script, tmp_path)
    files.loop.set_result(asyncio.get_running_loop())
    return files


async def test_sources_come_when_they_are_needed_and_rows_as_they_are_written(
    script: Script, shipped: ShippedFiles, tmp_path: Path
) -> None:
    data = tmp_path / "elsewhere" / "data.jsonl"
    data.parent.mkdir()
    data.write_text('{"prompt": "a"}\n')
    registry = SourceRegistry(script.folder.path, "rollout")
    listed = registry.register_prompts([{"prompt": "b"}])
    named = registry.register_prompts(JsonlPrompts(data))
    written = registry.register_prompts(Rows())
    reader = SourceReader(tmp_path / "here", shipped.place)
    for number, prompt in ((listed, "b"), (named, "a"), (written, "0")):
        await shipped.bring_source(number)
        assert reader.prompts(number)[0] == {"prompt": prompt}
    data.unlink()
    assert SourceReader(tmp_path / "here", shipped.place).prompts(named)[0] == {"prompt": "a"}
    for index in (7, 3):
        await registry.make_readable(written, index)
        await asyncio.gather(*(shipped.bring_source(written) for _ in "abc"))
        assert reader.prompts(written)[index] == {"prompt": str(index)}


async def test_a_script_without_py_in_its_name_comes_with_the_code_beside_it(
    script: Script, shipped: ShippedFiles, tmp_path: Path
) -> None:
    job = tmp_path / "job1"
    job.mkdir()
    (job / "beside_slurm.py").write_text("from areal_sc import JsonlPrompts\n")
    (job / "slurm_script").write_text(
        "from beside_slurm import JsonlPrompts\nclass Own(JsonlPrompts): pass\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    of_script = ObjectReference(f"{job}/slurm_script:Own", search_path=str(job))
    own = resolve(of_script)(tmp_path / "data.jsonl")
    number = SourceRegistry(script.folder.path, "rollout").register_prompts(own)
    await shipped.bring_source(number)
    shutil.rmtree(job)
    reader = SourceReader(tmp_path / "here", shipped.place)
    assert reader.prompts(number)[0] == {"prompt": "a"}


async def test_what_a_notebook_defines_is_refused_by_name(
    script: Script, shipped: ShippedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(session, "_loaded", {})
    exec("def reward(prompt, completion): return 1.0", vars(notebook))
    workflow = SingleTurnWorkflow(vars(notebook)["reward"])
    number = SourceRegistry(script.folder.path, "rollout").register_workflow(workflow)
    session._loaded.clear()  # the node's process has none of it
    await shipped.bring_source(number)
    with pytest.raises(WorkflowError, match=r"does not share the run folder: put it into a file"):
        SourceReader(tmp_path / "here", shipped.place).workflow(number)


async def test_a_row_that_a_killed_script_was_writing_is_another_one_in_the_end(
    script: Script, shipped: ShippedFiles, tmp_path: Path
) -> None:
    killed = SourceRegistry(script.folder.path, "rollout")
    number = killed.register_prompts(Rows())
    await killed.make_readable(number, 3)
    [rows] = script.folder.sources.glob("rows-*")
    with rows.open("ab") as file:
        file.write(b'{"index": 4, "row": {"prom')
    await shipped.bring_source(number)
    registry = SourceRegistry(script.folder.path, "rollout")
    assert registry.register_prompts(Rows()) == number
    await registry.make_readable(number, 5)
    await shipped.bring_source(number)
    reader = SourceReader(tmp_path / "here", shipped.place)
    assert [reader.prompts(number)[index] for index in (3, 5)] == [{"prompt": "3"}, {"prompt": "5"}]
    for it in (killed, registry):
        it.close()


async def test_what_is_not_answered_while_the_process_starts_again_is_asked_for_again(
    script: Script, shipped: ShippedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = SourceRegistry(script.folder.path, "rollout").register_prompts([{"prompt": "b"}])
    script.snapshot(1, "one")
    list_run, read_all, failures = ScriptFiles.list_run, ScriptFiles.read_all, list[str]()

    def failing_twice(original: Any, error: type[TransportError]) -> Any:
        num_calls = 0

        async def call(files: ScriptFiles, *words: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls <= 2:
                failures.append(error.__name__)
                raise error("it starts again")
            return await original(files, *words)

        return call

    monkeypatch.setattr(ScriptFiles, "read_all", failing_twice(read_all, PeerLost))
    await shipped.bring_source(number)
    reader = SourceReader(tmp_path / "here", shipped.place)
    assert reader.prompts(number)[0] == {"prompt": "b"}
    monkeypatch.setattr(ScriptFiles, "list_run", failing_twice(list_run, StaleCall))
    here = RunFolder(tmp_path / "here").snapshot_path(1) / "engine"
    await shipped.bring_snapshot(here)
    assert (here / "snapshot.json").read_text() == "one"
    assert failures == ["PeerLost"] * 2 + ["StaleCall"] * 2


@pytest.mark.parametrize("outlives_script", [False, True])
async def test_workers_get_files_of_the_next_start_of_a_script_that_was_killed(
    script: Script,
    shipped: ShippedFiles,
    beside: FilesBeside,
    next_beside: FilesBeside,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    outlives_script: bool,
) -> None:
    """Where its process ends with the script, or lives on, but does nothing any more."""
    number = SourceRegistry(script.folder.path, "rollout").register_prompts([{"prompt": "b"}])
    assert beside._process is not None
    if outlives_script:
        os.kill(beside._process.child.pid, signal.SIGSTOP)
        monkeypatch.setattr("areal_sc.shipping.calls.PIECE_LIMIT_S", 0.5)
    else:
        await asyncio.to_thread(beside.close)
    waiting = asyncio.create_task(shipped.bring_source(number))
    address = await asyncio.to_thread(next_beside.address)
    assert not waiting.done()
    (tmp_path / "here" / ".files").write_text(address)  # as the agent does, which was told
    async with asyncio.timeout(LIMIT_S):
        await waiting
    assert SourceReader(tmp_path / "here", shipped.place).prompts(number)[0] == {"prompt": "b"}
    if outlives_script:
        os.kill(beside._process.child.pid, signal.SIGCONT)


async def test_a_snapshot_that_does_not_come_in_time_may_be_a_good_one(
    script: Script, beside: FilesBeside, shipped: ShippedFiles, tmp_path: Path
) -> None:
    script.snapshot(1, "one")
    here = RunFolder(tmp_path / "here").snapshot_path(1) / "engine"
    in_a_hurry = files_on_node(script, tmp_path, shipping_timeout_s=0.5)
    assert beside._process is not None
    os.kill(beside._process.child.pid, signal.SIGSTOP)
    with pytest.raises(WaitTimeout, match=r"within 0\.5 s"):
        await in_a_hurry.bring_snapshot(here)
    os.kill(beside._process.child.pid, signal.SIGCONT)
    await shipped.bring_snapshot(here)
    assert (here / "snapshot.json").read_text() == "one"


async def test_a_node_without_room_for_a_snapshot_says_so(
    script: Script, shipped: ShippedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.snapshot(1, "one")

    async def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ScriptFiles, "read_file", fail)
    with pytest.raises(ConfigError, match=r"No space left on device; set scheduler\.node_folder"):
        await shipped.bring_snapshot(RunFolder(tmp_path / "here").snapshot_path(1) / "engine")


async def test_a_snapshot_comes_and_another_one_of_the_same_step_in_its_place(
    script: Script, shipped: ShippedFiles, tmp_path: Path
) -> None:
    here = RunFolder(tmp_path / "here").snapshot_path(2) / "engine"
    await shipped.bring_snapshot(here)  # there is none: whoever loads it says so
    assert not here.exists()
    for step, text in ((1, "old"), (2, "one"), (2, "two"), (2, "two")):
        script.snapshot(step, text)
        at = RunFolder(tmp_path / "here").snapshot_path(step) / "engine"
        await asyncio.gather(*(shipped.bring_snapshot(at) for _ in "ab"))
        assert {it.name: it.read_text() for it in at.iterdir()} == {
            "rank-0.safetensors": text,
            "snapshot.json": text,
        }
    assert len(RunFolder(tmp_path / "here").snapshots()) == 1, "a node keeps one"
    other = here.with_name("engine-critic")
    other.mkdir()
    script.snapshot(3, "three")
    await shipped.bring_snapshot(RunFolder(tmp_path / "here").snapshot_path(3) / "engine")
    assert other.exists(), "another role's"
    assert not here.exists()


async def test_what_a_worker_wrote_is_in_the_run_folder_and_no_longer_on_the_node(
    script: Script, shipped: ShippedFiles, tmp_path: Path
) -> None:
    partial = ".step-000004.partial"
    here = tmp_path / "here" / "checkpoints" / partial / "engine"
    here.mkdir(parents=True)
    for name in ("rank-0.safetensors", "rank-1.safetensors", "snapshot.json"):
        (here / name).write_text(name)
    (script.folder.checkpoints / partial).mkdir()
    await shipped.bring_back(here, ["rank-1.safetensors"])
    await shipped.bring_back(here, ["rank-0.safetensors", "snapshot.json"])
    there = script.folder.checkpoints / partial / "engine"
    assert {it.name: it.read_text() for it in there.iterdir()} == {
        name: name for name in ("rank-0.safetensors", "rank-1.safetensors", "snapshot.json")
    }
    assert shipped.script_path(here) == str(there)
    assert os.listdir(tmp_path / "here" / "checkpoints") == []
    await shipped.bring_back(here, ())  # another rank, which has nothing of its own


def record(store: RecordStore, numbers: range) -> Recorder:
    recorder = Recorder(store, "train/0", RecordsConfig())
    for number in numbers:
        recorder.add_group(played(number, [trajectory(number)]))
        add_span(recorder, "episode", 1000.0 + number, 0.5, lane=2)
    return recorder


async def test_records_come_home_as_a_worker_there_writes_them(
    script: Script, shipped: ShippedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_S", LIMIT_S)  # all is packed at the end
    at_home, large = FilesOfProcess(tmp_path / "home", "train/0", 32 * MEBI), trajectory(9, 300_000)
    for store in (shipped.record_store("train/0", 32 * MEBI), at_home):
        recorder = record(store, range(1, 7))
        for number in (9, 10, 16):
            recorder.add_group(played(number, [large]))
        await asyncio.to_thread(recorder.close)
    came, written = (
        {it.path.name: it.path.read_bytes() for it in record_files(folder)}
        for folder in (script.folder.records, tmp_path / "home")
    )
    assert came == written
    assert len(came) == 4, "rows have two files, as one has no room for two of the large ones"
    assert min(map(len, came.values())) < PIECE_BYTES < max(map(len, came.values()))
    assert len(list(rows(script.folder.path))) == 9


async def test_records_go_on_where_another_process_takes_them(
    script: Script,
    beside: FilesBeside,
    shipped: ShippedFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they come from is not held up meanwhile, and the files keep to their limit."""
    monkeypatch.setattr(worker_side, "ANSWER_LIMIT_S", NO_SERVICE_S)
    store = shipped.record_store("train/0", MEBI)
    with closing(record(store, range(1, 3))) as recorder:
        await until(lambda: list(spans(script.folder.path)))
        assert beside._process is not None
        os.kill(beside._process.child.pid, signal.SIGKILL)
        large = trajectory(0, 10_000)
        for number in range(3, 60):
            recorder.add_group(played(number, [large]))
        await until(lambda: 59 in {it.group for it in rows(script.folder.path)})
        await asyncio.to_thread(recorder.close)
    found = [it.group for it in rows(script.folder.path)]
    assert len(found) == len(set(found)), "none came twice"
    assert {16, 32, 48} <= set(found), "they go last"
    assert 3 not in found
    files = record_files(script.folder.records)
    assert sum(it.path.stat().st_size for it in files) <= MEBI
    assert {it.process for it in files} == {"train/0"}
    assert [it.took_s for it in spans(script.folder.path)] == [0.5, 0.5]


async def test_records_of_a_script_that_is_away_hold_up_no_worker(
    script: Script,
    beside: FilesBeside,
    shipped: ShippedFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recorder_module, "_CLOSE_LIMIT_S", 0.1)
    await asyncio.to_thread(beside.close)
    recorder = record(shipped.record_store("train/0", MEBI), range(1, 3))
    await asyncio.to_thread(recorder.close)
    assert [it.levelname for it in caplog.records if "ends before" in it.getMessage()] == [
        "WARNING"
    ]
    assert not script.folder.records.exists()


async def test_records_are_taken_of_workers_alone_in_pieces_that_are_small(script: Script) -> None:
    sent = SentRecords(1, Series.rows, b"x", 1, MEBI)
    connection = script.transport.connect(script.where, "files", ANY_INCARNATION)
    await connection.call(SEND_RECORDS, replace(sent, number=0, content=b""), timeout_s=LIMIT_S)
    wrong = (
        replace(sent, content=bytes(PIECE_BYTES + 1)),
        replace(sent, max_bytes=0),
        replace(sent, series="../x"),  # type: ignore[arg-type]
    )
    for it in wrong:
        with pytest.raises(TransportError):
            await connection.call(SEND_RECORDS, it, timeout_s=LIMIT_S)
    of_script = ZmqTransport(client=CurveClient.of_controller(script.keys))
    controller = of_script.connect(script.where, "files", ANY_INCARNATION)
    with pytest.raises(NotPermitted):
        await controller.call(SEND_RECORDS, sent, timeout_s=LIMIT_S)
    await of_script.close()
    assert not script.folder.records.exists()
    for _ in range(2):  # its answer was lost
        await connection.call(SEND_RECORDS, sent, timeout_s=LIMIT_S)
    [file] = record_files(script.folder.records)
    assert (file.process, file.path.read_bytes()) == ("train/0", b"x")


def test_what_a_process_that_is_gone_had_written_is_neither_doubled_nor_torn(
    tmp_path: Path,
) -> None:
    def process() -> ReceivedRecords:
        return ReceivedRecords(tmp_path, lambda key: "train/0")

    block = SentRecords(1, Series.rows, b"block", 5, MEBI)
    process().write(block, "key")
    process().write(block, "key")  # its answer went with the first process
    beginning = SentRecords(2, Series.rows, b"begin", 8, MEBI)
    process().write(beginning, "key")
    successor, rest = process(), SentRecords(3, Series.rows, b"end", 0, MEBI)
    with pytest.raises(StaleCall):
        successor.write(rest, "key")
    successor.write(replace(beginning, number=4), "key")
    successor.write(replace(rest, number=5), "key")
    contents = [it.path.read_bytes() for it in record_files(tmp_path)]
    assert contents == [b"block", b"begin", b"beginend"]


async def test_each_life_of_a_worker_writes_files_of_its_own(
    script: Script, shipped: ShippedFiles, passes: Passes
) -> None:
    """The first one is killed in the midst of a block."""
    await asyncio.to_thread(record(shipped.record_store("train/0", MEBI), range(1, 3)).close)
    whole = record_files(script.folder.records)[0].path.read_bytes()
    half = SentRecords(1000, Series.rows, whole[: len(whole) // 3], len(whole), MEBI)
    connection = script.transport.connect(script.where, "files", ANY_INCARNATION)
    await connection.call(SEND_RECORDS, half, timeout_s=LIMIT_S)
    transport = ZmqTransport(client=CurveClient.of_worker(passes.issue("train/0", Caller.train)))
    shipped._transport = transport
    await asyncio.to_thread(record(shipped.record_store("train/0", MEBI), range(3, 5)).close)
    await transport.close()
    assert [it.group for it in rows(script.folder.path)] == [1, 2, 3, 4]
    assert [it.began for it in spans(script.folder.path)] == [1001.0, 1002.0, 1003.0, 1004.0]
    with pytest.raises(NotPermitted):
        await connection.call(SEND_RECORDS, half, timeout_s=LIMIT_S)
