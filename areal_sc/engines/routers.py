"""The routers of a model with experts: what they choose, and how they take what was chosen.

A router scores all experts for each token, takes the best k by `torch.topk`, and makes weights of
their scores. Within its forward that `topk` is another one: it notes the choice, and may be told
which experts it is to give, with the scores that the router has for them now. So the weights and
their gradients are the model's own, in whichever way its family makes them.
Source: Rollout Routing Replay, arXiv:2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from areal_sc.engines.training.streamed_layers import decoder_layers
from areal_sc.errors import ModelError
from areal_sc.sizing.routed_experts import RoutedExperts


class Routers:
    """Those of a model, whose forwards are replaced.

    Attributes:
        sizes: of the model's layers.
        given: [T, L, k] integers, the experts that the tokens of the next forward go through, until
            its backward is done; see `RoutedExperts.field`. None: the routers choose.
        chosen: by layer, [T, k] int64 what its router would have chosen in the last forward.
    Raises: ModelError: the model has no experts, or does not name its routers.
    """

    def __init__(self, causal_lm: Any) -> None:
        self.sizes = RoutedExperts.of(causal_lm.config.get_text_config().to_dict())
        self.given: torch.Tensor | None = None
        self.chosen: dict[int, torch.Tensor] = {}
        self._tried = set[int]()
        recorded = [
            (module._can_record_outputs or {}).get("router_logits")
            for module in causal_lm.modules()
            if isinstance(module, PreTrainedModel)
        ]
        kinds = tuple({getattr(it, "target_class", it) for it in recorded if it is not None})
        layers = decoder_layers(causal_lm)
        routers = [
            (number, module)
            for number, layer in enumerate(layers)
            for module in layer.modules()
            if isinstance(module, kinds)
        ]
        if len(dict(routers)) != len(routers) or not routers:
            raise _refusal(causal_lm, f"names {len(routers)} routers in {len(layers)} layers")
        if len(layers) != self.sizes.num_layers:
            raise _refusal(causal_lm, f"has {len(layers)} layers of {self.sizes.num_layers}")
        for number, router in routers:
            router.forward = partial(self._route, number, type(router).__name__, router.forward)

    def routes(self) -> torch.Tensor:
        """[T, L, k] what the routers have chosen in the last forward, in the field's type."""
        first = next(iter(self.chosen.values()))
        none, field = torch.zeros_like(first), self.sizes.field
        of_layers = [self.chosen.get(number, none) for number in range(self.sizes.num_layers)]
        return torch.stack(of_layers, dim=1).to(getattr(torch, field.dtype))

    def num_others(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, layers] how many of the given experts the routers would not have chosen in the last
        forward, and [T, layers] how many were given."""
        assert self.given is not None
        given = self.given[:, list(self.chosen)].long()
        chosen = torch.stack(list(self.chosen.values()), dim=1)
        is_given = _are_known(given)
        others = (given[..., None] != chosen[..., None, :]).all(-1).sum(-1)
        return others * is_given, is_given * self.sizes.per_token

    def _route(self, number: int, name: str, forward: Callable[..., Any], *args: Any, **named: Any):
        def route(given: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
            with _Choice(self.sizes, given) as choice:
                outputs = forward(*args, **named)
            if len(choice.own) != 1:
                raise _refusal(name, f"calls torch.topk {len(choice.own)} times to choose experts")
            return choice.own[0], outputs

        if number not in self._tried:
            self._try(name, route)
            self._tried.add(number)
        self.chosen[number], outputs = route(None if self.given is None else self.given[:, number])
        return outputs

    @torch.no_grad()
    def _try(self, name: str, route: Callable[..., tuple[torch.Tensor, Any]]) -> None:
        """Raises: ModelError: the router does not make weights of whichever experts it is given."""
        own, outputs = route(None)
        turned = own.flip(-1)
        every = self.sizes.num_experts // self.sizes.per_token
        spread = torch.arange(self.sizes.per_token, device=own.device).expand_as(own) * every
        before = self._weights(name, own, outputs)
        after = self._weights(name, turned, route(turned)[1])
        of_spread = self._weights(name, spread, route(spread)[1])
        if not torch.allclose(after, before.flip(-1), rtol=0.01) or not bool(of_spread.all()):
            raise _refusal(name, "makes its weights of more than the scores of the chosen experts")

    def _weights(self, name: str, given: torch.Tensor, outputs: Any) -> torch.Tensor:
        of_k = [it for it in outputs if it.shape[-1] == given.shape[-1]]
        weights = [it for it in of_k if it.is_floating_point()]
        if len(of_k) != 2 or len(weights) != 1 or not any(it.equal(given) for it in of_k):
            raise _refusal(name, "does not return the experts and their weights")
        return weights[0]


class _Choice(TorchFunctionMode):
    """Within it the choice of experts, by `torch.topk` of [T, experts], is noted or replaced."""

    def __init__(self, sizes: RoutedExperts, given: torch.Tensor | None) -> None:
        super().__init__()
        self.own: list[torch.Tensor] = []
        self._sizes = sizes
        self._given = given

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or not args or args[0].ndim != 2:
            return found
        sizes = args[0].shape[-1], found.indices.shape[-1]
        if sizes != (self._sizes.num_experts, self._sizes.per_token):
            return found
        self.own.append(found.indices.detach())
        if self._given is None:
            return found
        given = self._given.long()
        given = torch.where(_are_known(given)[:, None], given, found.indices)
        return torch.return_types.topk((args[0].gather(1, given), given))


def _are_known(given: torch.Tensor) -> torch.Tensor:
    """[...] bool of routes [..., k]."""
    return given[..., 0] != given[..., 1]


def _refusal(model: Any, what: str) -> ModelError:
    name = model if isinstance(model, str) else type(model).__name__
    return ModelError(f"actor.routing_replay: {name} {what}; expected false for this model")
