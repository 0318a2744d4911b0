"""The routers of a model with experts: what they choose, and how they take what was chosen.

A router scores all experts for each token, takes the best k by `torch.topk`, and makes weights of
their scores. Within its forward that `topk` is another one: it notes the choice, and may be told
which experts it is to give, with the scores that the router has for them now. So the weights and
their gradients are the model's own, in whichever way its family makes them.
Source: Rollout Routing Replay, arXiv:2510.11370.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from areal_sc.engines.training.streamed_layers import decoder_layers
from areal_sc.errors import ModelError
from areal_sc.sizing.routed_experts import RoutedExperts

_NUM_TRIED = 4
"""Tokens with which a router is tried."""
_FORWARD_ERRORS = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)


class Routers:
    """Those of a model, whose forwards are replaced.

    Attributes:
        sizes: of the model's layers.
        given: [T, L, k] integers, the experts that the tokens of the next forward go through, until
            its backward is done; see `RoutedExperts.field`. None: the routers choose.
        chosen: by layer, [T, k] int64 what its router would have chosen in the last forward.
    Raises: ModelError: the model has no experts, or a router does not make its weights of whichever
        experts `torch.topk` gives it.
    """

    def __init__(self, causal_lm: Any) -> None:
        config = causal_lm.config.get_text_config()
        self.sizes = RoutedExperts.of(config.to_dict())
        self.given: torch.Tensor | None = None
        self.chosen: dict[int, torch.Tensor] = {}
        models = [it for it in causal_lm.modules() if isinstance(it, PreTrainedModel)]
        named = [(it._can_record_outputs or {}).get("router_logits") for it in models]
        kinds = tuple({getattr(it, "target_class", it) for it in named if it is not None})
        layers = [list(layer.modules()) for layer in decoder_layers(causal_lm)]
        routers = [[it for it in layer if isinstance(it, kinds)] for layer in layers]
        if not any(routers) or max(map(len, routers)) > 1 or len(layers) != self.sizes.num_layers:
            raise ModelError(
                f"actor.routing_replay: {type(causal_lm).__name__} does not name one router a layer"
            )
        for number, its in enumerate(routers):
            for router in its:
                self._try(router, config.hidden_size)
                router.forward = partial(self._route, number, router.forward)

    def routes(self) -> torch.Tensor:
        """[T, L, k] what the routers have chosen in the last forward, in the field's type."""
        none = torch.zeros_like(next(iter(self.chosen.values())))
        of_layers = [self.chosen.get(number, none) for number in range(self.sizes.num_layers)]
        return torch.stack(of_layers, dim=1).to(getattr(torch, self.sizes.field.dtype))

    def count_others(self, places: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
        """[2] float32: how many of the experts that were given to some tokens of the last forward
        the routers would not have chosen, and how many were given.

        Args:
            places: [N] int64, of the tokens.
            is_counted: [N] bool, which of them count.
        """
        assert self.given is not None
        given = self.given[places][:, list(self.chosen)].long()
        chosen = torch.stack([its[places] for its in self.chosen.values()], dim=1)
        return count_other_experts(given, chosen, is_counted[:, None])

    def _route(self, number: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with ExpertChoice(
            self.sizes, None if self.given is None else self.given[:, number]
        ) as choice:
            outputs = forward(*args, **named)
        self.chosen[number] = choice.own[0]
        return outputs

    @torch.no_grad()
    def _try(self, router: nn.Module, width: int) -> None:
        """Raises: ModelError: a copy of the router does not take the experts that it is given."""
        tried = copy.deepcopy(router).to_empty(device="cpu").float()
        for tensor in (*tried.parameters(), *tried.buffers()):
            tensor.copy_(torch.arange(1.0, 1 + tensor.numel()).cos().view_as(tensor))
        num_experts, k = self.sizes.num_experts, self.sizes.per_token
        given = (torch.arange(k) * (num_experts // k)).expand(_NUM_TRIED, k)
        hidden = torch.arange(0.0, _NUM_TRIED * width).sin().view(_NUM_TRIED, width)
        further = len(inspect.signature(tried.forward).parameters) - 1  # numbers of experts
        with ExpertChoice(self.sizes, given) as choice, suppress(*_FORWARD_ERRORS):
            outputs = tried(hidden, *[torch.zeros(num_experts)] * further)
            weights, experts = (it for it in outputs if it.shape == given.shape)
            if len(choice.own) == 1 and experts.equal(given) and weights.all():
                return
        raise ModelError(
            f"actor.routing_replay: {type(router).__name__} does not make the weights of experts "
            "of nothing but its scores of those that one torch.topk gives; expected false"
        )


class ExpertChoice(TorchFunctionMode):
    """Within it the choice of experts, by `torch.topk` of [T, experts], is noted or replaced.

    Args:
        given: [T, k] integers, the experts that are chosen instead where they are known; None:
            nowhere.

    Attributes:
        own: [T, k] int64 of each choice, as it would have been.
    """

    def __init__(self, sizes: RoutedExperts, given: torch.Tensor | None) -> None:
        super().__init__()
        self.own: list[torch.Tensor] = []
        self._sizes = sizes.num_experts, sizes.per_token
        self._given = given

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2:
            return found
        if (args[0].shape[-1], found.indices.shape[-1]) != self._sizes:
            return found
        self.own.append(found.indices.detach())
        if self._given is None:
            return found
        given = self._given.long()
        given = torch.where(_are_known(given)[:, None], given, found.indices)
        return torch.return_types.topk((args[0].gather(1, given), given))


def count_other_experts(
    given: torch.Tensor, chosen: torch.Tensor, is_counted: torch.Tensor
) -> torch.Tensor:
    """[2] float32 of [..., k] given experts: those that are not among [..., k] chosen ones, and
    all of them; of [...] places that are counted and known."""
    is_other = (given[..., None] != chosen[..., None, :]).all(-1)
    is_given = (_are_known(given) & is_counted)[..., None].expand_as(given)
    return torch.stack([(is_other & is_given).sum(), is_given.sum()]).float()


def _are_known(given: torch.Tensor) -> torch.Tensor:
    """[...] bool of routes [..., k]: no router chooses an expert twice."""
    return given[..., 0] != given[..., 1]
