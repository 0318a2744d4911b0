"""Fields that are computed from others: advantages a token, say. No torch.

A token function is `(tokens, **settings) -> [N]`, of the trained tokens of whole rows. It goes by
its import path, `package.module:function`, and runs on the ranks, where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_sc.algorithms.named_loss import folder_of_module
from areal_sc.errors import ConfigError
from areal_sc.user_code import user_code, user_function

if TYPE_CHECKING:
    import torch

    from areal_sc.algorithms.loss_tokens import RowTokens

_EXPECTED = "package.module:function, of a file beside the script or an installed package"


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
        found = folder_of_module(self.name)
        if found is None:
            raise ConfigError(f"token function: expected {_EXPECTED}, got {self.name!r}")
        return found

    def load(self) -> Callable[[RowTokens], torch.Tensor]:
        """The function with its settings.

        Raises: ConfigError: there is no such function, or it has other settings. The function
            itself raises a WorkflowError with its line, whatever it raised.
        """
        named = self.name, "tokens", self.settings
        found = user_function(*named, what="token function", expected=_EXPECTED)

        def compute(tokens: RowTokens) -> torch.Tensor:
            with user_code(f"token function {self.name!r}"):
                returned: torch.Tensor = found(tokens, **self.settings)
            return returned

        return compute
