"""A scheduler of your own: agents on a list of hosts, started by ssh; hosts left over stand by.

    python examples/letter_sort.py --config configs/letter_sort.yaml \
        scheduler.type=ssh_scheduler:SshScheduler \
        'scheduler.settings={hosts: [gpu1, gpu2, gpu3], nodes: 2}'

The hosts see the run folder, the model and the Python environment under the same paths, and ssh
asks for no password. One that stands by takes the place of one that is lost. `scheduler.settings`
may name another `command` that runs a shell command on a host. If the script is killed, the same
command takes its agents over.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import ExitStack, suppress
from subprocess import PIPE

from areal_sc.schedulers.agents_elsewhere import AgentsElsewhere, AgentStart, StartCommand
from areal_sc.system.process import exit_text

ANSWER_LIMIT_S = 10.0
"""A host that does not answer by then is taken for lost."""
NO_CONNECTION = 255
"""What ssh ends with when it has lost its host: nobody knows what became of the agent."""


class Host:
    """Runs shell commands."""

    def __init__(self, name: str, command: str) -> None:
        self.name = name
        self.words = [word.format(host=name) for word in shlex.split(command)]
        self.left = "true"  # ends what is left of an agent that could not be reached

    def run(self, text: str, limit_s: float = ANSWER_LIMIT_S) -> bool:
        """False: it does not answer, or the command has failed."""
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run([*self.words, text], timeout=limit_s).returncode == 0
        return False


class SshAgent:
    """An agent on a host.

    Args:
        process: the ssh that has started it; None: it was another script's.
    """

    def __init__(
        self, start: AgentStart, host: Host, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.start, self._host, self._process = start, host, process

    def how_it_ended(self) -> str | None:
        code = None if self._process is None else self._process.poll()
        return exit_text(code) if code is not None and 0 <= code < NO_CONNECTION else None

    def end(self, grace_s: float, pid: int) -> bool:
        is_agent = f"grep -qs areal:agent /proc/{pid}/comm"  # and no other process by now
        if grace_s:
            wait = f"timeout {grace_s} sh -c 'while {is_agent}; do sleep 0.1; done'"
            self._host.run(f"{is_agent} && kill -TERM {pid} && {wait}", grace_s + ANSWER_LIMIT_S)
        has_ended = self._host.run(f"! {is_agent} || kill -KILL {pid}")
        if not has_ended:  # where the host does not answer, the agent lives on
            self._host.left = f"{is_agent} && kill -KILL {pid}; true"
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0 if has_ended else 0.0)
            self._process.kill()
            self._process.communicate()
        return has_ended


class SshScheduler(AgentsElsewhere[SshAgent]):
    """Lends `nodes` of the `hosts`, which default to all of them."""

    def reach(self, undo: ExitStack) -> tuple[int, list[str]]:
        settings = self.config.settings
        command = settings.get("command", "ssh -o BatchMode=yes -o ConnectTimeout=5 {host}")
        self._hosts = {name: Host(name, command) for name in settings["hosts"]}
        return settings.get("nodes", len(self._hosts)), list(self._hosts)

    def idle_machine(self) -> str | None:
        used = [agent.start.machine for agent in self.agents]
        idle = (host for name, host in self._hosts.items() if name not in used)
        return next((host.name for host in idle if host.run(host.left)), None)

    def start_agent(self, start: AgentStart, command: StartCommand, invitation: bytes) -> SshAgent:
        host = self._hosts[start.machine]
        with start.log_path.open("ab") as log:
            words = [*host.words, command.shell_text]
            ssh = subprocess.Popen(words, stdin=PIPE, stdout=log, stderr=log, process_group=0)
        with suppress(BrokenPipeError):  # it has ended, and so it never joins
            os.write(ssh.stdin.fileno(), invitation)
        return SshAgent(start, host, ssh)

    def found_agent(self, start: AgentStart) -> SshAgent | None:
        host = self._hosts.get(start.machine)
        return None if host is None else SshAgent(start, host, None)
