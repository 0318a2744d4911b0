"""The models beside the policy, which a run's settings name: what they compute, and the critic.

    for each policy version:
        compute      a field of the batch from each of them       before updates
        rewards      the reward model's score, less the KL
        advantages   of tokens, from the critic's values          else of rows, from their rewards
        update       those that are trained, on the same batch    after the policy's own updates

A model that is trained makes its next version at once, and the policy makes its own when the step
ends. So one may be a version ahead, where a step is done again: it is not trained twice then.
"""

from __future__ import annotations

from statistics import fmean

from areal_sc.algorithms.named_advantage import critic_fields, explained_variance, kl_of_row
from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.ppo_settings import GAE, PPOConfig
from areal_sc.config.schema import FURTHER_MODELS, GRPOConfig, further_models
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.base import BASE_LOGPROBS, SCORES
from areal_sc.engines.handles import make_model
from areal_sc.errors import ConfigError
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler
from areal_sc.token_fields import TOP_LOGPROBS, Declared


class ModelsBeside:
    """The controllers of these models.

    The reference of a policy with a new adapter is the model under the adapter, unless a section
    names another one: the policy's own ranks compute its field.

    Args:
        given: fields that the rows have of their workflow, as a teacher behind a URL gives them.

    Attributes:
        controllers: by role.
    Raises: ConfigError: the algorithm needs a model of a section without `path`, compares pairs of
        rows, or gives a critic nothing to learn; or a field is given twice.
    """

    def __init__(
        self, config: GRPOConfig, scheduler: Scheduler, given: Declared | None = None
    ) -> None:
        ppo, models = config.actor.ppo, further_models(config)
        if loss_of(ppo).compares_rows:
            raise ConfigError(
                f"actor.ppo.loss: expected a loss of single rows with PPOTrainer, got {ppo.loss}, "
                "which compares pairs; DPOTrainer and RewardModelTrainer have them"
            )
        learns_returns = any(
            not each.is_frozen and each.ppo.loss == "value" for each in models.values()
        )
        if learns_returns and ppo.advantage != GAE:
            raise ConfigError(
                f"actor.ppo.advantage: expected {GAE} with critic.path and critic.ppo.loss=value "
                f"(a critic learns the returns that it gives), got {ppo.advantage}"
            )
        needed = _needed_fields(ppo)
        lora, field = config.actor.lora, FURTHER_MODELS["reference"].field
        is_new = lora.rank > 0 and not lora.path
        self._is_under_adapter = is_new and field in needed and "reference" not in models
        if self._is_under_adapter:
            del needed[field]
        given, self._top_k = given or {}, loss_of(ppo).top_k
        for role, each in FURTHER_MODELS.items():
            field = TOP_LOGPROBS if role == "teacher" and TOP_LOGPROBS in needed else each.field
            if field in needed and role not in models and field not in given:
                raise ConfigError(
                    f"{role}.path: no value, but actor.ppo needs {field} of such a model "
                    f"({needed[field]}); name one, actor.path say (docs/several-models.md)"
                )
            if role in models and field in given:
                raise ConfigError(
                    f"{role}.path: the workflow gives rows their {field} already; name no model, "
                    "or take the workflow without its teacher"
                )
        if TOP_LOGPROBS in given and given[TOP_LOGPROBS].sizes[0] < self._top_k:
            raise ConfigError(
                f"actor.ppo.loss_settings.top_k: expected at most {given[TOP_LOGPROBS].sizes[0]}, "
                f"the tokens of the workflow's teacher, got {self._top_k}"
            )
        self._of_rewards = dict[str, float]()
        self.controllers = {
            role: TrainController(make_model(config, role), scheduler, role=role) for role in models
        }

    def compute(self, batch: BatchMetadata, actor: TrainController) -> BatchMetadata:
        """The batch with a field of each model, and with the rewards that they have a part in.

        Raises: BatchLost: rows are gone.
        """
        if self._is_under_adapter:
            field = FURTHER_MODELS["reference"].field
            batch = actor.compute(batch, BASE_LOGPROBS, field=field)
        for role, model in self.controllers.items():
            output, field = FURTHER_MODELS[role]
            if role == "teacher" and self._top_k:
                batch = model.compute_top_logprobs(batch, self._top_k)
            elif field:
                batch = model.compute(batch, output, field=field)
        return self._add_rewards(batch, actor)

    def _add_rewards(self, batch: BatchMetadata, actor: TrainController) -> BatchMetadata:
        """The reward model's score, and what the KL to the reference takes where it is a part of
        the reward of rows; `gae` takes it from each token."""
        ppo, self._of_rewards = actor.config.ppo, {}
        if model := self.controllers.get("reward_model"):
            scores = model.score(batch, SCORES)
            batch = batch.add_rewards(scores)
            self._of_rewards["reward_model_score"] = fmean(scores)
        if beta := ppo.reward_kl_coefficient:
            kls = actor.score(batch, kl_of_row(ppo))
            if ppo.advantage != GAE:
                batch = batch.add_rewards([-beta * kl for kl in kls], is_shaping=True)
            num_tokens = sum(row.num_loss_tokens for row in batch.rows)
            self._of_rewards["reference_kl"] = sum(kls) / num_tokens
        return batch

    def compute_advantages(self, batch: BatchMetadata, actor: TrainController) -> BatchMetadata:
        """The batch with the advantages of `actor.ppo.advantage`.

        With `gae` they are of tokens, and the critic's returns another field.
        Raises: BatchLost: rows are gone.
        """
        ppo = actor.config.ppo
        if ppo.advantage != GAE:
            return actor.compute_advantages(batch)
        for field, function in critic_fields(ppo).items():
            batch = actor.compute(batch, function, field=field)
        return batch

    def update(self, batch: BatchMetadata, version: int) -> dict[str, float]:
        """Trains those that are not frozen.

        Args:
            version: of the policy, from which the step begins.
        Returns: their metrics, each with the role before its name; of rewards the means
            `reward_model_score` of a row and, in nats a token, `reference_kl`.
        Raises: BatchLost: rows are gone.
        """
        metrics = dict(self._of_rewards)
        for role, model in self.controllers.items():
            if model.config.is_frozen or model.version != version:
                continue
            ppo = model.config.ppo
            found = model.update(batch, loss_of(ppo), num_minibatches=ppo.num_minibatches)
            if ppo.loss == "value":
                found["explained_variance"] = explained_variance(found)
            metrics |= {f"{role}_{name}": number for name, number in found.items()}
        return metrics


def _needed_fields(ppo: PPOConfig) -> dict[str, str]:
    """Fields that a policy's loss and advantages read, and what reads them."""
    needed = {field: f"loss {ppo.loss}" for field in loss_of(ppo).fields or ()}
    if ppo.advantage == GAE:
        needed["values"] = "advantage gae"
    if ppo.reward_kl_coefficient:
        needed["reference_logprobs"] = "kl_coefficient"
    return needed
