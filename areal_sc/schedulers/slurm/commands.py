"""SLURM's own commands, as far as they are used here, up to the end of all of a run's jobs.

A command that cannot reach slurmctld has said nothing: neither that a job failed, nor that a
submission was not accepted.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from areal_sc.errors import ConfigError, SchedulerSilent

COMMAND_TIMEOUT_S: Final = 60.0
"""A command gives a hung slurmctld up by itself, after 18 s at most."""

ENDED_STATES: Final = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
    )
)
HOPELESS_REASONS: Final = re.compile(
    r"Partition(Node|Time)Limit|BadConstraints|DependencyNeverSatisfied|Invalid(Account|QOS)"
    r"|(Account|QOS)NotAllowed|(Assoc|QOS)\w*(PerJob|WallDurationPerJob)Limit"
)
"""Reasons for which a job waits for ever, unless someone changes it or the cluster."""

_SILENT: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were"
    r"|Unexpected message received|[Cc]ontroller (is )?in standby mode"
    r"|Communication (connection|shutdown) failure|Message (send|receive) failure"
)
_SUBMITTED: Final = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)
"""What `sbatch --parsable` says; a site's wrapper may say more."""
_LOOKS_S: Final = 120.0
_LOOK_AGAIN_S: Final = 1.0
_REGISTER_S: Final = 30.0
"""A slurmctld that was started again does not know its nodes until they have told of themselves."""
END_LIMIT_S: Final = 60.0
"""After the grace; what is left then is left to its agents."""
CANCEL_AGAIN_S: Final = 10.0
"""A slurmctld that dies may have forgotten by its next start what it was told last."""
_LOOK_S: Final = 0.2
"""Between looks at what ends."""
MAX_ADDRESSES: Final = 8
MAX_SHOWN: Final = 12
"""Kinds of nodes, to someone who has asked for others."""

logger = logging.getLogger(__name__)


@dataclass
class _ClusterSilence:
    """Whether slurmctld gave this process no answer, and when it answered again.

    Attributes:
        back_s: `time.monotonic()` of the first answer after the last silence.
    """

    is_silent: bool = False
    back_s: float = float("-inf")

    def note_answer(self, *, is_silent: bool) -> None:
        if self.is_silent and not is_silent:
            self.back_s = time.monotonic()
        self.is_silent = is_silent

    @property
    def is_just_over(self) -> bool:
        return time.monotonic() < self.back_s + _REGISTER_S


_silence: Final = _ClusterSilence()

_UNKNOWN_JOB: Final = "Invalid job id"
FORGOTTEN: Final = "SLURM has forgotten it"
"""Reason of a job that SLURM does not know: it ended long ago, or slurmctld has lost it."""


@dataclass(frozen=True)
class JobState:
    """One look at a job.

    Attributes:
        state: in SLURM's words, such as `PENDING`.
        nodes: those that it has now.
        reason: why it waits, or how it ended.
        start: when it is expected to start, or has started; `N/A`: not known.
    """

    state: str
    nodes: frozenset[str] = frozenset()
    reason: str = ""
    start: str = "N/A"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES


def environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without what SLURM has told it of a job, which `sbatch` and `srun` obey."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    return own | dict(further or {})


def run_command(
    words: Sequence[str],
    *,
    text: str = "",
    variables: Mapping[str, str] | None = None,
    advice: Callable[[str], str] = lambda text: "",
) -> str:
    """Standard output of a command; nothing of a job that SLURM has forgotten.

    Args:
        text: its standard input.
        variables: its further environment.
        advice: what follows SLURM's words, if it refuses this input.
    Raises:
        SchedulerSilent: slurmctld was not reached; the command may have been obeyed all the same.
        ConfigError: SLURM refuses, in its own words; or there is no such command.
    """
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not os.access(conf, os.R_OK):  # a command would look for it for a minute
        raise ConfigError(
            f"scheduler.type=slurm: SLURM_CONF={conf} cannot be read; set it to the cluster's "
            "slurm.conf, or unset it, or set scheduler.type=local"
        )
    try:
        done = subprocess.run(
            words,
            input=text,
            env=environment(variables),
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a site's filter may speak another encoding
            timeout=COMMAND_TIMEOUT_S,
        )
    except OSError as error:
        what = f"{words[0]} cannot be started ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            what = f"there is no command {words[0]} on PATH"
        raise ConfigError(
            f"scheduler.type=slurm: {what}; start the script on a login node of the cluster, or "
            "set scheduler.type=local"
        ) from error
    except subprocess.TimeoutExpired as error:
        _silence.note_answer(is_silent=True)
        raise SchedulerSilent(f"{words[0]} gave no answer in {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        _silence.note_answer(is_silent=bool(_SILENT.search(said)))
        if _silence.is_silent:
            raise SchedulerSilent(f"{words[0]}: {said}")
        if _silence.is_just_over:
            raise SchedulerSilent(f"{words[0]}, of a slurmctld that has just come back: {said}")
        if _UNKNOWN_JOB in said:
            return ""  # it has ended
        raise ConfigError(f"SLURM refuses `{' '.join(words)}`: {said}{advice(text)}")
    _silence.note_answer(is_silent=False)
    return done.stdout


def sbatch_words() -> dict[str, str]:
    """What of the user's environment sbatch obeys before the script."""
    return {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}


def run_patiently(words: Sequence[str], **arguments: Any) -> str:
    """Runs what may be run twice, like `run_command`; asks a silent slurmctld again for a while.

    Raises: SchedulerSilent: it was silent for `_LOOKS_S`. ConfigError.
    """
    give_up_s = time.monotonic() + _LOOKS_S
    while True:
        try:
            return run_command(words, **arguments)
        except SchedulerSilent as error:
            if time.monotonic() > give_up_s:
                raise
            logger.warning("slurmctld is asked again: %s", error)
        time.sleep(_LOOK_AGAIN_S)


def check_submission(script: str, variables: Mapping[str, str]) -> None:
    """Asks SLURM whether it would take a job; arguments: see `submit`.

    Raises: ConfigError: it refuses. SchedulerSilent: slurmctld cannot be reached.
    """
    if shown := sbatch_words():
        logger.warning("sbatch obeys the environment before the script: %s", shown)
    words = ["sbatch", "--test-only"]
    run_patiently(words, text=script, variables=variables, advice=what_to_change)


def submit(script: str, name: str, variables: Mapping[str, str]) -> str:
    """The id of a new job, which is submitted once, whatever the connection to slurmctld does.

    Args:
        name: no other job has it.
        variables: further environment of the job.
    Raises: ConfigError: SLURM refuses it. SchedulerSilent: slurmctld cannot be reached.
    """
    # SBATCH_EXPORT of the user, or of a site, would keep the invitation from the job
    words = ["sbatch", "--export=ALL", f"--job-name={name}", "--parsable"]
    give_up_s = time.monotonic() + _LOOKS_S
    while True:
        try:
            told = run_command(words, text=script, variables=variables, advice=what_to_change)
            if ids := _SUBMITTED.findall(told):
                return str(ids[-1])
            raise SchedulerSilent(f"sbatch does not tell the job's id, but {told.strip()!r}")
        except SchedulerSilent as error:
            logger.warning("the submission of job %s may have failed: %s", name, error)
            found = found_job(name, give_up_s)
            if found:
                return found
            if time.monotonic() > give_up_s:
                raise


def found_job(name: str, give_up_s: float | None = None) -> str:
    """The id that the submission of that name has got; "": there is none.

    A slurmctld that answers again may still have the submission before it: so it is asked twice.

    Args:
        give_up_s: `time.monotonic()` until which a silent one is asked again.
    Raises: SchedulerSilent.
    """
    give_up_s = time.monotonic() + _LOOKS_S if give_up_s is None else give_up_s
    num_looks = 0
    while True:
        try:
            words = ["squeue", "-h", "--me", "-t", "all", "-n", name, "-o", "%A"]
            listed = [it for it in _words(run_command(words)) if it[0].isdecimal()]
            num_looks += 1
            if listed or num_looks > 1:
                return next(iter(listed), "")
        except SchedulerSilent:
            num_looks = 0
            if time.monotonic() > give_up_s:
                raise
        time.sleep(_LOOK_AGAIN_S)


def named_jobs(names: Sequence[str]) -> dict[str, str]:
    """State of each job of these names that has not ended, by its id. Raises: SchedulerSilent."""
    if not names:
        return {}
    words = ["squeue", "-h", "--me", "-t", "all", "-n", ",".join(names), "-o", "%A|%T"]
    listed = _rows(run_command(words), 2)
    return {job: state for job, state in listed if state not in ENDED_STATES}


def look_at(jobs: Sequence[str], *, is_patient: bool = False) -> dict[str, JobState]:
    """The state of each job.

    Args:
        is_patient: a silent slurmctld is asked again for a while.
    Raises: SchedulerSilent: nothing is known now.
    """
    ask = run_patiently if is_patient else run_command
    states = dict.fromkeys(jobs, JobState("COMPLETED", reason=FORGOTTEN))
    words = ["squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", "%A|%T|%r|%S|%N"]
    for job, state, reason, start, nodes in _rows(ask(words) if jobs else "", 5):
        states[job] = JobState(state, frozenset(host_names(nodes)), reason, start)
    return states


def _words(told: str) -> list[str]:
    """Lines of one word; a site's wrapper may say more."""
    return re.findall(r"^[ \t]*(\w\S*)[ \t]*$", told, re.MULTILINE)


def _rows(told: str, num_columns: int) -> list[list[str]]:
    """Lines of so many columns, likewise."""
    rows = (line.strip().split("|", num_columns - 1) for line in told.splitlines())
    return [row for row in rows if len(row) == num_columns]


def num_restarts(job: str) -> int:
    """How often SLURM has put a job back to those that wait. Raises: SchedulerSilent."""
    told = _words(run_command(["squeue", "-h", "-t", "all", "-j", job, "-O", "RestartCnt:9"]))
    return max((int(count) for count in told if count.isdecimal()), default=0)


def host_names(hosts: str) -> list[str]:
    """`node[1-3]` as node1, node2, node3."""
    if not hosts or not re.search(r"[\[,]", hosts):
        return [hosts] if hosts else []
    return _words(run_command(["scontrol", "show", "hostnames", hosts]))


def steps_of(job: str, name: str) -> list[str]:
    """Ids of the job's running steps of that name. Raises: SchedulerSilent."""
    listed = run_command(["squeue", "-h", "--steps", "-j", job, "-o", "%i|%j"])
    return [step for step, its_name in _rows(listed, 2) if its_name == name]


def cancel(words: Sequence[str]) -> None:
    """Ends jobs or steps. Those that have ended already are none of its business.

    Raises: SchedulerSilent. ConfigError: SLURM refuses.
    """
    run_command(["scancel", *words])


def end_jobs(
    names: Sequence[str],
    steps: Sequence[tuple[str, str]],
    grace_s: float,
    *,
    are_told: bool,
) -> bool:
    """Returns when SLURM says that all has ended; False: it has not, or that is not known.

    A slurmctld that gives no answer, or refuses, is asked again.

    Args:
        names: of jobs.
        steps: the job and the name of each step.
        grace_s: after which agents that were told are asked by SIGTERM, or, in a job that goes on,
            killed.
        are_told: all agents were told to end.
    """
    begun_s, is_any_cancelled, num_ends = time.monotonic(), False, 0
    grace_end_s = begun_s + grace_s
    cancel_s = grace_end_s if are_told else begun_s  # when what runs is cancelled next
    while time.monotonic() < grace_end_s + END_LIMIT_S:
        is_late = time.monotonic() > grace_end_s
        try:
            states = named_jobs(names)
            running = [it for job, name in steps for it in steps_of(job, name)]
            # slurmctld may hear late of the end of jobs whose agents were told; what had to be
            # cancelled was told nothing, as a job that began meanwhile
            is_known = are_told and is_late and not is_any_cancelled
            are_ending = is_known and set(states.values()) <= {"COMPLETING"}
            has_ended = not running and (not states or are_ending)
            num_ends = num_ends + 1 if has_ended else 0
            # a slurmctld that answers again may still have a submission before it
            if num_ends >= (2 if is_just_back() else 1):
                return True
            waiting = [job for job, state in states.items() if state == "PENDING"]
            if waiting:
                run_command(["scancel", "--state=PENDING", *waiting])
            elif not has_ended and time.monotonic() >= cancel_s:
                # without a signal the tasks of a step are killed at once; a job's are asked
                signal = [] if is_late else ["--signal=TERM"]
                alive = [job for job, state in states.items() if state != "COMPLETING"]
                is_any_cancelled |= bool(alive)  # also if no answer tells so
                for words in (alive, [*signal, *running] if running else []):
                    if words:
                        run_command(["scancel", *words])
                cancel_s = max(grace_end_s, time.monotonic() + CANCEL_AGAIN_S)
        except (ConfigError, SchedulerSilent) as error:
            logger.warning("the end of the run's jobs is not known: %s", error)
            time.sleep(_LOOK_AGAIN_S)
        time.sleep(_LOOK_AGAIN_S if num_ends else _LOOK_S)
    return False


def what_to_change(script: str = "") -> str:
    """For whoever has asked for what there is not, by a job's script if it was one."""
    kept = r"^#SBATCH (--(?!output|chdir|ntasks|no-|requeue).*)$"
    asked = re.findall(kept, script, re.MULTILINE)
    advice = "\nchange scheduler.slurm (--dry-run shows the script)"
    advice += f"; asked for: {' '.join(asked)}" if asked else ""
    try:
        told = run_command(["sinfo", "-h", "-o", "  %R: %D nodes of %c CPUs, %m MB, %G; time %l"])
    except (ConfigError, SchedulerSilent):
        return advice
    partitions = told.rstrip("\n").splitlines()
    others = ["  …"] if len(partitions) > MAX_SHOWN else []
    return "\n".join([f"{advice}; what there is:", *partitions[:MAX_SHOWN], *others])


def is_just_back() -> bool:
    """Whether slurmctld answers again after a silence, and may not know all yet."""
    return _silence.is_just_over


def is_silent(node: str) -> bool:
    """Whether slurmctld does not hear the node, or takes it for down. Raises: SchedulerSilent."""
    state = run_command(["sinfo", "-h", "-N", f"--nodes={node}", "-o", "%T"])
    return any(it.endswith("*") or it.startswith("down") for it in _words(state))


def node_addresses(partitions: Collection[str], hosts: str = "") -> list[str]:
    """Where nodes are reached: some of the partitions, or, where one has no name, of any.

    Args:
        hosts: of these nodes alone, `node[1-3]` say.
    Raises: ConfigError: there are none.
    """
    named = "" if hosts or "" in partitions else ",".join(sorted(partitions))
    flags = {"--partition": named, "--nodes": hosts}
    words = [f"{flag}={value}" for flag, value in flags.items() if value]
    addresses = _words(run_patiently(["sinfo", "-h", "-N", "-o", "%o", *words]))[:MAX_ADDRESSES]
    if not addresses:
        what = f"scheduler.slurm.partition={named!r}: SLURM lists no node of it"
        raise ConfigError(what + what_to_change())
    return addresses
