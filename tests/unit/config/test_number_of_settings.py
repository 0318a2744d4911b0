"""How many settings there are: each one is something that a user has to read past."""

from __future__ import annotations

from areal_sc.config.fields import TEMPLATE, is_section, schema_fields
from areal_sc.config.schema import GRPOConfig

MAX_OWN = 193
"""Most settings that have a value of their own. `actor.routing_replay` is one: replay costs room in
stores, which dense models, and mixtures in float32, do not need to pay. `actor.lora.places` is
another: each place costs the memory of an adapter and its moments, whether it is used or not. So
is `actor.train_vision_tower`: a tower that is trained costs its moments and its activations.
`generation.min_new_tokens` and `actor.optimizer.type` have no value that would do for all."""
MAX_PLACES = 277
"""Most places in a run's YAML, also those where a value is taken from elsewhere unless given."""


def test_there_are_no_more_settings_than_before() -> None:
    found = schema_fields(GRPOConfig, also_shared=True)
    leaves = [(key, field) for key, field, annotation in found if not is_section(annotation)]
    apart = {key for key, field, _ in schema_fields(GRPOConfig) if TEMPLATE in field.metadata}
    own = [key for key, _, annotation in schema_fields(GRPOConfig) if not is_section(annotation)]
    assert len(set(own) - apart) <= MAX_OWN
    assert len(leaves) <= MAX_PLACES
