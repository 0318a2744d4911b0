"""What a workflow may ask of an engine: all else is the workflow's fault, not the engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.engines.request_checks import check_prompt
from areal_sc.errors import WorkflowError


@pytest.mark.parametrize("prompt", ["text", None, 7, [1, None], [0.5], [[1, 2]], [], [99], [1] * 9])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(WorkflowError, match="prompt"):
        check_prompt(prompt, vocab_size=10, max_context_tokens=8)


@pytest.mark.parametrize("prompt", [[1, 2], (1,), np.array([1, 2]), torch.tensor([1, 2])])
def test_any_integers_are_token_ids(prompt: Any) -> None:
    check_prompt(prompt, vocab_size=10, max_context_tokens=8)
