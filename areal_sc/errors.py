"""Every error that areal_sc raises on purpose, at a glance.

ArealError                    exit code 1
|- ConfigError                exit code 2   a setting is unknown, of the wrong type, or impossible
|- RunFolderError             exit code 3   the run folder is in use, finished, or cannot be resumed
|  |- NoRunFolder             exit code 2   it cannot be made where it is to be
|  `- StaleTerm               exit code 11  another start of the script has taken the run over
|- MetadataError              exit code 4   metadata operations with arguments that do not fit
|- TransportError             exit code 4   talking to another process failed
|  |- RpcTimeout                            no reply before the call's deadline
|  |- PeerLost                              the other side is gone
|  |- PeerSilent                            the other side gives no sign of life
|  |- NotPermitted                          the caller is none that may call this
|  |- IncarnationMismatch                   the call was meant for an earlier life of the worker
|  |- ProtocolError                         a frame that no correct peer sends
|  |- ServerBusy                            it runs as much as it takes; a later call may succeed
|  |- RemoteError                           the worker's method raised; carries the remote traceback
|  |- StaleCall                             the call expected another policy version
|  |- ShardGone                             the tensor store no longer holds the shard
|  `- StoreFull                             the tensor store has reached its byte limit
|- WorkerError                exit code 5   a worker process failed
|  |- WorkerStartError                      it did not come up
|  |- WorkerLost                            it died or stopped answering
|  |- EngineFailed                          its engine failed
|  `- CrashLoop               exit code 10  it dies again and again, and was given up
|     `- NodeLost                           the agent of its node cannot be started again
|- SandboxError               exit code 5   a program could not be run apart; says nothing of it
|- StepLost                   exit code 5   a training step cannot be ended as it was begun
|  |- BatchLost                             rows of its batch are gone: it begins anew
|  `- StepsLost                             its beginning is gone, too: the run goes back
|- SchedulerSilent            exit code 5   SLURM gave no answer, so nothing is known
|- ModelError                 exit code 6   a model folder or checkpoint that cannot be used
|- WorkflowError              exit code 7   the user's workflow, reward or dataset cannot be used
|  |- RewardError                            a reward raised, gave no finite number, or timed out
|  |  `- AgentError                          an agent did, or its process ended
|  |- NeverWorks                            no other row or try changes it: the first ends the run
|  |- PromptTooLong                         it leaves no room for an answer
|  `- TooManyRejections                     the share of rejected groups passed its limit
|- CheckpointError            exit code 8   a snapshot could not be written or read
|- WaitTimeout                exit code 9   nothing changed for longer than anything may take
|- CommandError               exit code 2   `python -m areal_sc` was asked for something impossible
`- LedgerError                exit code 1   a group was asked for a change that it cannot make
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

UNEXPECTED: Final = 1
INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    0: "it came to its end",
    UNEXPECTED: "an unexpected error",
    2: "a wrong setting or word",
    3: "the run folder cannot be used",
    4: "processes cannot talk to each other",
    5: "a worker failed",
    6: "the model cannot be used",
    7: "workflow, reward or prompts fail",
    8: "a snapshot or model cannot be written or read",
    9: "something was waited for in vain",
    10: "a worker dies again and again",
    11: "a later start has taken the run over",
    129: "SIGHUP: the terminal was closed",
    INTERRUPTED: "Ctrl-C",
    131: "SIGQUIT: Ctrl-\\",
    143: "SIGTERM",
}
"""Exit codes of scripts. docs/troubleshooting.md says what to do about each."""


class ArealError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        exit_code: ends the process of a script.
        title: heads what the script then shows.
    """

    exit_code = 1
    title = "The run failed"


class ConfigError(ArealError, ValueError):
    """A setting is unknown, of the wrong type, or impossible together with another."""

    exit_code = 2
    title = "The configuration cannot be used"


class RunFolderError(ArealError):
    """The run folder is in use, already finished, or cannot be resumed."""

    exit_code = 3
    title = "The run folder cannot be used"


class NoRunFolder(RunFolderError):
    """There is no run folder, and none can be made where it is to be."""

    exit_code = 2


class StaleTerm(RunFolderError):
    """A later start of the script has taken the run over; this one changes nothing any more."""

    exit_code = 11
    title = "The run goes on elsewhere"


class MetadataError(ArealError, ValueError):
    """A metadata operation was given arguments that do not fit together."""

    exit_code = 4
    title = "Metadata do not fit together"


class TransportError(ArealError):
    """Talking to another process failed."""

    exit_code = 4
    title = "Talking to a worker failed"


class RpcTimeout(TransportError, TimeoutError):
    """No reply came before the call's deadline.

    Attributes:
        silent: the worker that gave none; "" where it is another process that tells of it.
    """

    def __init__(self, message: str, *, silent: str = "") -> None:
        super().__init__(message)
        self.silent = silent


class PeerLost(TransportError):
    """The other side closed, died or cannot be reached."""


class PeerSilent(TransportError):
    """The other side is not known to be gone, but gives no sign of life."""


class NotPermitted(TransportError):
    """The caller is of the run, and not one of those that may call the method."""


class IncarnationMismatch(TransportError):
    """The call named an incarnation of the worker that is not the one running."""


class ProtocolError(TransportError):
    """A frame was malformed, oversized or of another protocol version."""


class ServerBusy(TransportError):
    """The server runs as many requests as it takes; the call did nothing and may be repeated."""


class RemoteError(TransportError):
    """The called method raised in the other process.

    Attributes:
        error_type: class name of the remote exception.
        remote_traceback: formatted traceback of the other process.
        remote_exit_code: `exit_code` of the remote exception (1 when it is not an ArealError).
    """

    title = "A worker reported an error"

    def __init__(
        self, message: str, *, error_type: str, remote_traceback: str, remote_exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.remote_traceback = remote_traceback
        self.exit_code = remote_exit_code


class StaleCall(TransportError):
    """A state-changing call expected another policy version than the worker is at."""


class ShardGone(TransportError):
    """The tensor store no longer holds the shard."""


ROWS_GONE: Final = (ShardGone, PeerSilent)
"""How a pull ends whose owner has died, or is gone with its whole machine, which says nothing."""


class StoreFull(TransportError):
    """The tensor store has reached its byte limit."""


class WorkerError(ArealError):
    """A worker process failed.

    Attributes:
        log_path: the worker's log, or None.
        log_tail: its last lines.
    """

    exit_code = 5
    title = "A worker failed"

    def __init__(
        self, message: str, *, log_path: str | None = None, log_tail: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.log_path = log_path
        self.log_tail = tuple(log_tail)

    @classmethod
    def with_log(cls, what: str, log_path: Path | str, log_tail: Sequence[str]) -> Self:
        """One whose message also names the log."""
        return cls(f"{what}; its log is {log_path}", log_path=str(log_path), log_tail=log_tail)


class WorkerStartError(WorkerError):
    """A worker process did not come up."""


class WorkerLost(WorkerError):
    """A worker process died or stopped answering."""


class EngineFailed(WorkerError):
    """The engine in a worker failed; that says nothing about the episodes it ran."""


class CrashLoop(WorkerError):
    """A worker died more often in a row than `scheduler.max_deaths` allows, and was given up."""

    exit_code = 10
    title = "A worker dies again and again"


class NodeLost(CrashLoop):
    """The agent of a node cannot be started again, so no worker can be."""


class SandboxError(ArealError):
    """A program could not be run in a sandbox, which says nothing about the program."""

    exit_code = 5
    title = "A sandbox cannot be had"


class StepLost(ArealError):
    """The training step that goes on cannot be ended as it was begun; see `Step.lose`."""

    exit_code = 5
    title = "A training step was lost"


class BatchLost(StepLost):
    """Rows of the batch that is being trained are gone with their worker and its memory.

    The weights are those before the step. `prepare_batch` forms the batch anew.
    """


class StepsLost(StepLost):
    """Train workers were started again, and there is no snapshot of the version that they were at.

    The steps since the newest snapshot on the disk are lost. The workers are alive, and do nothing
    before `TrainController.load_snapshot`. A `Run` goes back by itself.
    """


class SchedulerSilent(ArealError):
    """The cluster's own scheduler gave no answer: what was asked of it may have happened or not."""

    exit_code = 5
    title = "The cluster's scheduler did not answer"


class ModelError(ArealError):
    """A model folder or checkpoint cannot be used."""

    exit_code = 6
    title = "The model cannot be used"


class WorkflowError(ArealError):
    """The user's workflow, reward, loss or dataset cannot be used."""

    exit_code = 7
    title = "The workflow, the reward, the loss or the dataset cannot be used"


class RewardError(WorkflowError):
    """A reward function raised, returned no finite number, or passed its time limit.

    Attributes:
        kind: which of these, as `RejectionKind` names them.
        error_type: class of what it raised, "" if it raised nothing.
        place: `file.py:line` of the user's code that is to blame, "" if that is not known.
        frames: the last frames of the traceback, "" if it raised nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "reward_error",
        error_type: str = "",
        place: str = "",
        frames: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.error_type = error_type
        self.place = place
        self.frames = frames


class AgentError(RewardError):
    """An agent raised, returned no finite number, passed its time limit, or its process ended."""


class NeverWorks(WorkflowError):
    """It would be the same with every row and at every try, so the first episode ends the run."""


class PromptTooLong(WorkflowError):
    """A prompt leaves no room for an answer in `rollout.max_context_tokens`."""


class TooManyRejections(WorkflowError):
    """The share of rejected groups passed `rollout.max_rejection_rate`."""


class CheckpointError(ArealError):
    """A snapshot could not be written or read."""

    exit_code = 8
    title = "A checkpoint failed"


class CommandError(ArealError):
    """A command of `python -m areal_sc` was asked for something impossible."""

    exit_code = 2
    title = "The command cannot be carried out"


class LedgerError(ArealError):
    """A group was asked for a change of state that it cannot make."""


class WaitTimeout(ArealError, TimeoutError):
    """Nothing changed for longer than anything may take; the message says what was waited for."""

    exit_code = 9
    title = "The run waited in vain"


def exit_code_of(error: BaseException | None) -> int:
    """What a script ends with that this error ends; 0 without one."""
    if error is None:
        return 0
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    default = INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNEXPECTED
    return int(getattr(error, "exit_code", default))
