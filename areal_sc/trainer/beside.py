"""What goes on beside training, and has to know when a run leaves its present."""

from __future__ import annotations

from abc import ABC, abstractmethod

from areal_sc.records.metrics_log import History


class BesideTraining:
    """Base of what a `Run` tells so; by itself it does nothing about it."""

    def take_over(self, history: History) -> None:
        """The run goes on where an earlier start was; `history` is what that one has recorded."""

    def before_going_back(self) -> None:
        """The run is about to go back to a snapshot: what reads or writes later steps ends."""

    def gone_back(self, step: int) -> None:
        """The run has gone back to a step."""


class KeepsSnapshots(BesideTraining, ABC):
    """Base of what writes the snapshots of a `Run`."""

    @abstractmethod
    def finish(self) -> None:
        """Leaves a snapshot of the present step; returns when it is on the disk."""

    @abstractmethod
    def collect(self, *, wait: bool = True) -> None:
        """Ends with what was begun; without `wait`, with what is complete."""

    @abstractmethod
    def export(self) -> None:
        """Begins to write the present step's model to `models/step-<n>`, if nothing did yet."""

    @abstractmethod
    def has_model(self, step: int) -> bool:
        """Whether the model of a step is there, as a whole."""
