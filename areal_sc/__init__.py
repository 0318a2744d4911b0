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
    from areal_sc.preflight.load import load_config as load_config
    from areal_sc.records.trackers.base import Tracker as Tracker
    from areal_sc.schedulers.factory import make_scheduler as make_scheduler
    from areal_sc.sources.load_prompts import load_prompts as load_prompts
    from areal_sc.sources.load_prompts import load_rows as load_rows
    from areal_sc.sources.prompts import JsonlPrompts as JsonlPrompts
    from areal_sc.sources.prompts import Prompts as Prompts
    from areal_sc.token_fields import TensorMetadata as TensorMetadata
    from areal_sc.trainer.checkpoints import Checkpoints as Checkpoints
    from areal_sc.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from areal_sc.trainer.evaluation.evaluations import Evaluations as Evaluations
    from areal_sc.trainer.failure import run_script as run_script
    from areal_sc.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from areal_sc.trainer.reward_model_trainer import RewardModelTrainer as RewardModelTrainer
    from areal_sc.trainer.run import Run as Run
    from areal_sc.trainer.sft_trainer import SFTTrainer as SFTTrainer
    from areal_sc.workflows.base import Trajectory as Trajectory
    from areal_sc.workflows.base import Workflow as Workflow
    from areal_sc.workflows.chat import Conversation as Conversation
    from areal_sc.workflows.single_turn import SingleTurnWorkflow as SingleTurnWorkflow

_HOMES = {
    "AgentCommand": "areal_sc.agents.command",
    "AgentWorkflow": "areal_sc.agents.workflow",
    "Checkpoints": "areal_sc.trainer.checkpoints",
    "Conversation": "areal_sc.workflows.chat",
    "DPOTrainer": "areal_sc.trainer.dpo_trainer",
    "EvaluationSet": "areal_sc.controller.rollout.evaluation",
    "Evaluations": "areal_sc.trainer.evaluation.evaluations",
    "RewardModelTrainer": "areal_sc.trainer.reward_model_trainer",
    "Run": "areal_sc.trainer.run",
    "Tracker": "areal_sc.records.trackers.base",
    "FSDPPPOActor": "areal_sc.engines.handles",
    "FSDPSFTActor": "areal_sc.engines.handles",
    "GRPOConfig": "areal_sc.config.schema",
    "JsonlPrompts": "areal_sc.sources.prompts",
    "LocalGenerator": "areal_sc.engines.handles",
    "OnlineWorkflow": "areal_sc.agents.online",
    "PPOTrainer": "areal_sc.trainer.ppo_trainer",
    "Prompts": "areal_sc.sources.prompts",
    "RolloutController": "areal_sc.controller.rollout.rollout_controller",
    "SFTTrainer": "areal_sc.trainer.sft_trainer",
    "SGLangEngine": "areal_sc.engines.handles",
    "VLLMEngine": "areal_sc.engines.handles",
    "SingleTurnWorkflow": "areal_sc.workflows.single_turn",
    "TensorMetadata": "areal_sc.token_fields",
    "TrainController": "areal_sc.controller.train.train_controller",
    "Trajectory": "areal_sc.workflows.base",
    "Workflow": "areal_sc.workflows.base",
    "load_config": "areal_sc.preflight.load",
    "load_prompts": "areal_sc.sources.load_prompts",
    "load_rows": "areal_sc.sources.load_prompts",
    "make_scheduler": "areal_sc.schedulers.factory",
    "make_actor": "areal_sc.engines.handles",
    "make_generator": "areal_sc.engines.handles",
    "make_model": "areal_sc.engines.handles",
    "run_script": "areal_sc.trainer.failure",
    "start": "areal_sc.controller.starting",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
