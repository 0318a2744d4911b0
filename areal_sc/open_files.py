"""How many files and sockets a process may have open at one time (`ulimit -n`)."""

from __future__ import annotations

import errno
import logging
import os
import resource
from typing import Final

MAX_OPEN_FILES: Final = 1 << 20
"""Linux allows no more by default. A higher limit slows programs that try every descriptor."""

logger = logging.getLogger(__name__)


def raise_limit() -> None:
    """Raises this process's limit, and that of its later children, to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # forbidden, in a sandbox say
            logger.warning("the limit of open files stays at %d: %s", soft, error)


def advice_on(error: BaseException | None) -> str | None:
    """What to do about an error that the limit caused; None for any other error."""
    while error is not None:
        is_limit = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        # that of a worker comes as text: its message, or the end of its log
        told = f"{error} {getattr(error, 'log_tail', '')}"
        if is_limit or os.strerror(errno.EMFILE) in told:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"this process and each worker may have {soft} files and sockets open at one time, "
                f"and the hard limit is {hard} (ulimit -Hn); raise it (`nofile` in "
                "/etc/security/limits.conf, docker run --ulimit nofile=65536), or use fewer workers"
            )
        error = error.__cause__ or error.__context__
    return None
