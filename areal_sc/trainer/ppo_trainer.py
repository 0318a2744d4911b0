"""PPOTrainer: a run whose training loop is written already.

    for each policy version:
        rollout.prepare_batch            waits for generation           wait_s
        compute                          what the models beside the policy say of the tokens
        compute_advantages
        compute_proximal_logprobs
        ppo_update                       trains                         train_s
        update                           the critic, if there is one
        publish_weights                  version += 1                   sync_s

Generation never waits for this loop; it is limited by the staleness bound alone. Evaluations,
snapshots and exports go on beside it. A section of the settings that names a model, `reference`
say, is a model beside the policy: what it says is a field of the batch, for advantages and loss.
"""

from __future__ import annotations

from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError, StepLost
from areal_sc.preflight.idle_settings import ScriptFacts, idle_in_script
from areal_sc.records.metrics import Summary
from areal_sc.sources.row_file import PromptSource
from areal_sc.trainer.checkpoints import Checkpoints
from areal_sc.trainer.evaluation.evaluation_sets import Given
from areal_sc.trainer.evaluation.evaluations import Evaluations
from areal_sc.trainer.models_beside import ModelsBeside
from areal_sc.trainer.run import Run
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.single_turn import SingleTurnWorkflow


class PPOTrainer(Run):
    """Trains one model by asynchronous PPO.

    Use it as a context manager when something runs before `fit` in the same run, a warm start
    say; `fit` alone opens and closes it by itself.
    """

    def fit(
        self,
        workflow: Workflow,
        prompts: PromptSource,
        *,
        evaluation_prompts: Given = None,
        evaluation_workflow: Workflow | None = None,
    ) -> Summary:
        """Trains for `total_steps` steps and leaves the model in `<run_dir>/model`.

        Args:
            workflow: the episode; run `rollout.group_size` times a prompt.
            prompts: a dataset, a list of dicts, or a stream of dicts.
            evaluation_prompts: held-out prompts, beside those of `evaluation.sets`; or several
                sets by name, each of them prompts or an `EvaluationSet`.
            evaluation_workflow: of sets that have none of their own; None: that of training.
        Returns: the numbers of `summary.json`.
        Raises: ConfigError: the policy is to be trained with dropout, or beside other ones.
        """
        lora = self.config.actor.lora
        if self.config.actor.has_adapter and lora.dropout:
            raise ConfigError(
                f"actor.lora.dropout: expected 0 with PPOTrainer, got {lora.dropout:g}: the policy "
                "that is trained must be the one that was sampled from; SFT and DPO may have it"
            )
        if self.config.actor.has_adapter and lora.places > 1:
            raise ConfigError(
                f"actor.lora.places: expected 1 with PPOTrainer, got {lora.places}: it publishes "
                "one policy; a loop of your own trains adapters beside each other"
            )
        with self.opened():
            actor = TrainController(make_actor(self.config.actor), self.scheduler)
            rollout = RolloutController(make_generator(self.config.rollout), self.scheduler)
            with self.display.phase("datasets"):  # what is wrong shows before a worker is started
                rollout.register(prompts, workflow)
                evaluations = Evaluations(
                    self, rollout, evaluation_prompts, evaluation_workflow or workflow
                )
            facts = ScriptFacts(
                has_agents=type(workflow) is not SingleTurnWorkflow,
                evaluates=evaluation_prompts is not None,
            )
            for warning in idle_in_script(self.config, facts):
                self.display.warning(warning)
            beside = ModelsBeside(self.config, self.scheduler, workflow.fields)
            others = beside.controllers.values()
            checkpoints = Checkpoints(self, actor, rollout, *others)
            with self.training(actor, rollout, *others) as steps:
                if actor.version == 0:
                    evaluations.begin("before")
                for step in steps:
                    if evaluations.has_enough:
                        break
                    try:
                        with step.timed("wait"):
                            batch = rollout.prepare_batch(prompts, workflow)
                        with step.timed("train"):
                            batch = beside.compute(batch, actor)
                            batch = beside.compute_advantages(batch, actor)
                            batch = actor.compute_proximal_logprobs(batch)
                            stats = actor.ppo_update(batch)
                            stats |= beside.update(batch, actor.version)
                        # the first one: nobody has its policy any more, once there is another
                        evaluations.collect(wait=step.number == 1)
                        with step.timed("sync"):
                            actor.publish_weights(rollout)
                    except StepLost as error:  # its rows went with the memory of a node
                        step.lose(error)
                        continue
                    step.record(batch, stats)
                    checkpoints.after_step()
                    evaluations.after_step()
                evaluations.finish()
                return self.finish(actor, rollout)
