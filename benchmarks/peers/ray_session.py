"""A Ray of this process's own, on loopback, with its files in a folder that goes away with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

OBJECT_STORE_BYTES = 2 << 30


@contextmanager
def ray_session() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home folder
    import ray

    # the path of a socket in it may have 107 characters
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=8,  # a count of slots: TransferQueue's actors ask for one each
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
