"""areal_sc: asynchronous reinforcement learning of language models from one Python script.

The names below are resolved when they are first used, so that importing the package costs nothing
and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_sc.agents.command import AgentCommand as AgentCommand
    from areal_sc.agents.online import OnlineWorkflow as OnlineWorkflow
    from areal_sc.agents.workflow import AgentWorkflow as AgentWorkflow
    from areal_sc.config.schema import GRPOConfig as GRPOConfig
    from areal_sc.controller.rollout.evaluation import EvaluationSet as EvaluationSet
    from areal_sc.controller.rollout.rollout_controller import (
        RolloutController as RolloutController,
    )
    from areal_sc.controller.starting import start as start
    from areal_sc.controller.train.train_controller import TrainController as TrainController
    from areal_sc.engines.handles import FSDPPPOActor as FSDPPPOActor
    from areal_sc.engines.handles import FSDPSFTActor as FSDPSFTActor
    from areal_sc.engines.handles import LocalGenerator as LocalGenerator
    from areal_sc.engines.handles import SGLangEngine as SGLangEngine
    from areal_sc.engines.handles import VLLMEngine as VLLMEngine
    from areal_sc.engines.handles import make_actor as make_actor
    from areal_sc.engines.handles import make_generator as make_generator
    from areal_sc.engines.handles import make_model as make_model
    from areal_sc.metadata import BatchMetadata as BatchMetadata
    from areal_sc.metadata import ShardMetadata as ShardMetadata
    from areal_sc.preflight.load import load_config as load_config
    from areal_sc.records.trackers.base import Tracker as Tracker
    from areal_sc.schedulers.factory import make_scheduler as make_scheduler
    from areal_sc.schedulers.local import LocalScheduler as LocalScheduler
    from areal_sc.sources.load_prompts import load_prompts as load_prompts
    from areal_sc.sources.load_prompts import load_rows as load_rows
    from areal_sc.sources.prompts import JsonlPrompts as JsonlPrompts
    from areal_sc.sources.prompts import Prompts as Prompts
    from areal_sc.token_fields import TensorMetadata as TensorMetadata
    from areal_sc.trainer.checkpoints import Checkpoints as Checkpoints
    from areal_sc.trainer.evaluation.evaluations import Evaluations as Evaluations
    from areal_sc.trainer.failure import run_script as run_script
    from areal_sc.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from areal_sc.trainer.row_trainer import DPOTrainer as DPOTrainer
    from areal_sc.trainer.row_trainer import RewardModelTrainer as RewardModelTrainer
    from areal_sc.trainer.row_trainer import SFTTrainer as SFTTrainer
    from areal_sc.trainer.run import Run as Run
    from areal_sc.workflows.base import Trajectory as Trajectory
    from areal_sc.workflows.base import Workflow as Workflow
    from areal_sc.workflows.chat import Conversation as Conversation
    from areal_sc.workflows.single_turn import SingleTurnWorkflow as SingleTurnWorkflow

_NAMES = {
    "agents.command": "AgentCommand",
    "agents.online": "OnlineWorkflow",
    "agents.workflow": "AgentWorkflow",
    "config.schema": "GRPOConfig",
    "controller.rollout.evaluation": "EvaluationSet",
    "controller.rollout.rollout_controller": "RolloutController",
    "controller.starting": "start",
    "controller.train.train_controller": "TrainController",
    "engines.handles": "FSDPPPOActor FSDPSFTActor LocalGenerator SGLangEngine "
    "VLLMEngine make_actor make_generator make_model",
    "metadata": "BatchMetadata ShardMetadata",
    "preflight.load": "load_config",
    "records.trackers.base": "Tracker",
    "schedulers.factory": "make_scheduler",
    "schedulers.local": "LocalScheduler",
    "sources.load_prompts": "load_prompts load_rows",
    "sources.prompts": "JsonlPrompts Prompts",
    "token_fields": "TensorMetadata",
    "trainer.checkpoints": "Checkpoints",
    "trainer.evaluation.evaluations": "Evaluations",
    "trainer.failure": "run_script",
    "trainer.ppo_trainer": "PPOTrainer",
    "trainer.row_trainer": "DPOTrainer RewardModelTrainer SFTTrainer",
    "trainer.run": "Run",
    "workflows.base": "Trajectory Workflow",
    "workflows.chat": "Conversation",
    "workflows.single_turn": "SingleTurnWorkflow",
}
"""Module -> the public names that it has."""

_HOMES = {name: f"areal_sc.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
