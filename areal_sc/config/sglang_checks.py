"""What can be said about the settings of SGLang servers before anything is started."""

from __future__ import annotations

import shutil
from dataclasses import replace
from urllib.parse import urlsplit

from areal_sc.config.schema import SGLangConfig
from areal_sc.errors import ConfigError

_MAX_PORT = 65535


def check_sglang_config(config: SGLangConfig) -> None:
    """Raises ConfigError for what cannot be, naming the setting; starts nothing."""
    if config.urls:
        _check_urls(config)
    else:
        _check_servers(config)


def _check_urls(config: SGLangConfig) -> None:
    for url in config.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(url):
            raise ConfigError(f"sglang.urls: expected http://host:port, got {url!r}")
    if len({url.rstrip("/") for url in config.urls}) != len(config.urls):
        raise ConfigError(f"sglang.urls names a server twice: {', '.join(config.urls)}")


def _check_servers(config: SGLangConfig) -> None:
    if config.python and shutil.which(config.python) is None:
        raise ConfigError(
            f"sglang.python: {config.python!r} is no program; name the interpreter of the "
            "environment that SGLang is installed in"
        )
    if config.ports and len(config.ports) != config.num_servers:
        raise ConfigError(
            f"sglang.ports has {len(config.ports)} ports for {config.num_servers} servers; give "
            "one a server, or none for free ones"
        )
    for port in config.ports:
        if not 0 < port <= _MAX_PORT:
            raise ConfigError(f"sglang.ports: expected 1 to {_MAX_PORT}, got {port}")
    if len(set(config.ports)) != len(config.ports):
        raise ConfigError(f"sglang.ports names a port twice: {config.ports}")
    if min(config.devices, default=0) < 0:
        raise ConfigError(f"sglang.devices: expected indices of at least 0, got {config.devices}")
    num_devices = config.num_servers * config.tp_size
    if config.devices and len(config.devices) != num_devices:
        raise ConfigError(
            f"sglang.devices has {len(config.devices)} devices; {config.num_servers} servers of "
            f"tp_size {config.tp_size} need {num_devices}"
        )
    for first in range(0, len(config.devices), config.tp_size):
        own = config.devices[first : first + config.tp_size]
        if len(set(own)) != len(own):
            raise ConfigError(f"sglang.devices gives one server the same device twice: {own}")


def _has_port(url: str) -> bool:
    """Whether the port of a URL is one; none is the scheme's."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def sglang_of_worker(config: SGLangConfig, index: int, num_workers: int) -> SGLangConfig:
    """The settings of one worker of several: the servers in `urls` are dealt out.

    Raises: ConfigError: they cannot be, or all workers would listen on the same ports.
    """
    if num_workers == 1:
        return config
    if config.ports:
        raise ConfigError(
            f"sglang.ports cannot be given for rollout.num_workers={num_workers}: leave it empty "
            "for free ports"
        )
    if 0 < len(config.urls) < num_workers:
        raise ConfigError(
            f"sglang.urls names {len(config.urls)} servers for rollout.num_workers={num_workers}: "
            "every worker needs one at least"
        )
    return replace(config, urls=config.urls[index::num_workers])
