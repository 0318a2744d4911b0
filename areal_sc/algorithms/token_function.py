"""Fields that are computed from others: advantages a token, say. No torch.

A token function is `(tokens, **settings) -> [N]`, of the trained tokens of whole rows. It goes by
its import path, `package.module:function`, and runs on the ranks, where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_sc.user_code import folder_of_module, user_function

if TYPE_CHECKING:
    import torch

    from areal_sc.algorithms.loss_tokens import RowTokens

_EXPECTED = "package.module:function"


@dataclass(frozen=True, slots=True)
class TokenFunction:
    """A token function and its settings, as plain data.

    Attributes:
        name: its import path.
        settings: keyword arguments of the function.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def search_path(self) -> str:
        """The folder that a process needs on `sys.path` to import the function.

        Raises: ConfigError: the caller could not import it either.
        """
        return folder_of_module(self.name, "token function", _EXPECTED)

    def load(self) -> Callable[[RowTokens], torch.Tensor]:
        """The function with its settings, from `user_function`.

        Raises: ConfigError: there is no such function, or it has other settings.
        """
        named = self.name, "tokens", self.settings
        return user_function(*named, what="token function", expected=_EXPECTED)
