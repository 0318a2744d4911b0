"""The trackers that settings name."""

from __future__ import annotations

import importlib

from areal_sc.config.follow_settings import TrackerKind
from areal_sc.records.trackers.base import Tracker

_CLASSES = {
    TrackerKind.wandb: "WandbTracker",
    TrackerKind.tensorboard: "TensorBoardTracker",
    TrackerKind.trackio: "TrackioTracker",
}


def make_tracker(kind: TrackerKind) -> Tracker:
    """Raises: ConfigError: it cannot be used as things are."""
    module = importlib.import_module(f"areal_sc.records.trackers.{kind}")
    tracker = getattr(module, _CLASSES[kind])()
    assert isinstance(tracker, Tracker)
    return tracker
