"""What clients sample from: adapters in folders, or the one set of weights of a whole model.

consumes     requests for completions, checked
waits for    rollout workers; of a whole model, for the end of a publication
unblocked by them
"""

from __future__ import annotations

import asyncio
from typing import Final

from tinker import types

from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.engines.base import Completion
from areal_sc.serving.journal import ApiAnswer
from areal_sc.serving.saved_weights import SavedFolders
from areal_sc.serving.trained_model import ManyOrOne
from areal_sc.serving.wire import (
    RequestRefused,
    RowLimits,
    sample_output,
    sampling_of,
    wants_prompt,
)

KEPT_SAMPLERS: Final = 2
"""Of a model, sets of weights for sampling that have no name; earlier ones end."""


class Samplers:
    """Weights that clients sample from, by the id of a sampling session, or by a path.

    They are the folder of an adapter ("": the base model). Where whole models are trained, they
    are the number of the model and the version of the policy, of which the newest ones are served.

    Args:
        limits: of prompts.
        publishes: whole models are trained: one has its weights in the rollout workers.

    Attributes:
        by_name: the weights.
        saved: has the adapters.
        users: of the weights of a whole model; who changes them is alone.
    """

    def __init__(
        self,
        rollout: RolloutController,
        saved: SavedFolders,
        limits: RowLimits,
        *,
        publishes: bool,
    ) -> None:
        self.by_name: dict[str, str] = {}
        self.users = ManyOrOne()
        self._rollout = rollout
        self.saved = saved
        self._limits = limits
        self._publishes = publishes
        self._num_begun = 0  # models, where all parameters are trained

    def begin_model(self) -> None:
        """Another whole model is trained: nobody samples from the one before."""
        self._num_begun += 1
        self.by_name.clear()

    def add(self, name: str, adapter: str) -> None:
        """A folder; where whole models are trained, the newest weights that were published."""
        self.by_name[name] = self._at(self._rollout.version) if self._publishes else adapter

    def _at(self, version: int) -> str:
        return f"{self._num_begun}/{version}"

    def open(self, session: str, path: str | None) -> None:
        """Args: path: None: the base model. Raises: RequestRefused: there are no such weights."""
        if not self._publishes:
            weights = "" if path is None else self.saved.find(path)
        elif path is None:
            weights = self._at(0)
        elif path in self.by_name:
            weights = self.by_name[path]
        else:
            raise RequestRefused(f"model_path: there are no weights {path!r:.200}", 404)
        self._check_present(weights)
        self.by_name[session] = weights

    def check(self, session: str) -> None:
        """Raises: RequestRefused: there is no such session."""
        if session not in self.by_name:
            raise RequestRefused(f"there is no sampling session {session!r:.200}", 404)

    async def sample(self, asked: types.SampleRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: what it asks for is not served."""
        if known is not None:
            return known
        generation = self._rollout.engine.config.generation
        prompt, sampling = sampling_of(asked, self._limits, generation)
        weights = self.by_name[asked.sampling_session_id or ""]
        async with self.users.among_many():
            self._check_present(weights)
            has_adapter = weights and not self._publishes
            futures = [
                self._rollout.begin_generate(
                    prompt,
                    sampling,
                    prefix_group=f"{asked.sampling_session_id}:{asked.seq_id}",
                    adapter=self.saved.folder / weights if has_adapter else "",
                    prompt_logprobs=wants_prompt(asked) and not number,
                    top_k_logprobs=max(asked.topk_sample_logprobs, asked.topk_prompt_logprobs),
                )
                for number in range(asked.num_samples)
            ]
            found: list[Completion] = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return sample_output(asked, found)

    def _check_present(self, weights: str) -> None:
        gone = "these weights are served no more: "
        if self._publishes:
            if weights != self._at(self._rollout.version):
                raise RequestRefused(
                    f"{gone}newer ones were saved for sampling, or another model was begun; a "
                    "server of whole models has one set of weights for sampling"
                )
        elif weights and not (self.saved.folder / weights).is_dir():
            raise RequestRefused(
                f"{gone}a model has its {KEPT_SAMPLERS} newest sets without a name; "
                "save_weights_for_sampler(name) keeps others"
            )
