"""Agents and workers of another version of areal_sc are known as such."""

from __future__ import annotations

from msgspec import Raw, msgpack, to_builtins

from areal_sc.config.schema import SchedulerConfig
from areal_sc.nodes.spec import CALLS_FORMAT, DESCRIBE, NodeDescription, NodeFacts
from areal_sc.schedulers.open_run import settings_of_agents


def test_an_agent_of_another_format_is_as_one_with_other_settings() -> None:
    config = SchedulerConfig(run_dir="/run")
    facts = NodeFacts("host", "token", 0, "/dev/shm", "tcp://a", "life")
    own = NodeDescription(facts, config, [], CALLS_FORMAT)
    told = to_builtins(own)
    del told["calls_format"]  # the first version does not tell
    for said, is_like in ((to_builtins(own), True), (told, False)):
        found = DESCRIBE.read_reply(Raw(msgpack.encode(said)))
        settings = settings_of_agents(found.config, found.calls_format)
        assert (settings == settings_of_agents(config)) is is_like
