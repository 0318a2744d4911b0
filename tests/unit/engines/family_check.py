"""What both engines make of a family of models: exactly what transformers gives, or a refusal.

The reference is transformers' own forward in float64 of one row at a time, with plain attention
and plain experts, and AdamW by its formula. Rows are shorter and longer than every limit of the
family (`families.LIMIT`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from unit.engines.families import LIMIT, VOCABULARY

from areal_sc.algorithms.losses import LossTokens, Metrics
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ActorConfig, OptimizerConfig, RolloutConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.local.generator import Finished, SlotGenerator
from areal_sc.engines.local.model import LocalModel, read_weights
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.training.streamed_layers import decoder_layers
from areal_sc.errors import ConfigError, ModelError
from areal_sc.transport.packed_rows import PackedRows

TOLERANCE = 1e-4  # nats; of gradients: of their norm
EXACT = "exact"

ROW_LENGTHS = (LIMIT - 2, 1, 3 * LIMIT + 1, 4, 2 * LIMIT, LIMIT, LIMIT + 1)
PROMPTS = (3, 1, 3 * LIMIT + 1, 4, LIMIT + 2, 3, LIMIT)
"""So many first tokens of each row are those of the longest one."""
PROMPT_LENGTHS = (3, 3 * LIMIT, LIMIT + 1)
NEW_TOKENS = LIMIT + 4
MAX_CONTEXT = 64
WRITE_TIMEOUT_S = 60.0
LR, EPS = 1e-2, 0.1  # with a large eps, rounding of a small gradient does not turn its step
MIN_CHANGE = 100 * TOLERANCE  # of log-probabilities by the update
BONUS = 0.3


REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """What was found; each attribute is a column of the table of models.

    Attributes:
        architecture: transformers' class.
        rows: `shared`, `packed` or `padded`: how a micro-batch goes through the model; "" if
            refused.
        logits: `in chunks`, or `in chunks, by the model`; "" if refused.
        logprobs, update, export: `exact` or `refused`: of the trainer.
        generation: the same, of LocalEngine.
        refusals: the errors' messages.
    """

    architecture: str
    rows: str
    logits: str
    logprobs: str
    update: str
    export: str
    generation: str
    refusals: str


class _SharingEngine(FSDPEngine):
    """Rows of a few tokens share, too."""

    @property
    def _min_saved_tokens(self) -> float:
        return min(1.0, super()._min_saved_tokens) if self._model.abilities.shares else math.inf


class Tokenizer:
    """As much of a tokenizer as the engine needs."""

    eos_token_id = None


def load_reference(folder: Path, attention: str) -> Any:
    """In float64, with transformers' attention of that name and plain products of experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation=attention,
        experts_implementation="eager",
    ).eval()


def make_rows() -> PackedRows:
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(ROW_LENGTHS)
    input_ids = torch.randint(VOCABULARY, (num_tokens,), generator=generator).int()
    rows = torch.split(input_ids, list(ROW_LENGTHS))
    for row, num_shared in zip(rows, PROMPTS, strict=True):
        row[:num_shared] = max(rows, key=len)[:num_shared].clone()
    fields = {
        "input_ids": input_ids,
        "loss_mask": torch.cat([torch.arange(length) > 0 for length in ROW_LENGTHS]),
        "temperatures": 0.5 + torch.rand(num_tokens, generator=generator),
    }
    return PackedRows(fields, ROW_LENGTHS)


def loss_with_bonus(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Cross entropy, less a share of the distributions' entropy."""
    return -(tokens.logprobs + BONUS * tokens.entropy).sum() / tokens.num_loss_tokens, {}


LOSS = NamedLoss(f"{__name__}:{loss_with_bonus.__name__}")


def row_distributions(model: Any, rows: PackedRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each row [T] log-probabilities and entropies [T - 1] of its tokens but the first."""
    found = []
    for index in range(rows.num_rows):
        fields = rows.take([index]).fields
        token_ids = fields["input_ids"].long()
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = (logits / fields["temperatures"][1:, None]).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        found.append((logprobs.gather(1, token_ids[1:, None])[:, 0], entropy))
    return found


def row_logprobs(model: Any, rows: PackedRows) -> list[torch.Tensor]:
    return [logprobs for logprobs, _ in row_distributions(model, rows)]


def check(model: Any, folder: Path, attention: str = "eager") -> Verdict:
    """Tries everything on a model in float32, whose weights change; writes to `folder`.

    Args:
        attention: of the reference.
    Raises: AssertionError: an engine takes the model, and gives something else than transformers.
    """
    source = folder / "source"
    model.save_pretrained(source)
    engine = _SharingEngine(
        ActorConfig(
            path=str(source),
            device="cpu",
            max_tokens_per_micro_batch=2 * max(ROW_LENGTHS),
            logprob_chunk_tokens=5,
            optimizer=OptimizerConfig(lr=LR, eps=EPS, max_grad_norm=0.0),
        )
    )
    before = load_reference(source, attention)
    after = copy.deepcopy(before)
    refusals, rows, logits, trained = [], "", "", REFUSED
    published: list[tuple[str, torch.Tensor]] | None = None
    try:
        engine.initialize(0, 1, "")
    except ModelError as refusal:
        refusals.append(str(refusal))
    else:
        abilities = engine._model.abilities
        rows = "shared" if abilities.shares else "packed" if abilities.packs else "padded"
        logits = "in chunks" if abilities.has_linear_head else "in chunks, by the model"
        assert len(decoder_layers(engine._model.causal_lm)) == model.config.num_hidden_layers
        check_training(engine, model, after)
        check_export(engine, after, folder / "export")
        published = [named for bucket in engine.gather_weights(1000) for named in bucket]
        trained = EXACT
    finally:
        engine.close()
    generated = EXACT
    if refusal := check_generation(model, source, before, after, published):
        refusals.append(refusal)
        generated = REFUSED
    return Verdict(
        *(type(model).__name__, rows, logits, trained, trained, trained, generated),
        refusals="; ".join(dict.fromkeys(refusals)),
    )


def check_training(engine: FSDPEngine, model: Any, reference: Any) -> None:
    """Log-probabilities before and after an update; the reference is updated, too."""
    rows = make_rows()
    expected, entropies = zip(*row_distributions(reference, rows), strict=True)
    assert_close("the model before it was saved", row_logprobs(model, rows), expected)
    assert_close("forward", engine_logprobs(engine, rows), expected)

    entropy = torch.cat(entropies).mean()
    loss = -torch.cat(expected).mean() - BONUS * entropy
    loss.backward()
    squares = 0.0
    with torch.no_grad():
        for parameter in reference.parameters():
            gradient = parameter.grad
            if gradient is not None:  # the first step of Adam
                squares += float(gradient.square().sum())
                parameter -= LR * gradient / (gradient.abs() + EPS)
    metrics = engine.update([rows], LOSS, step=0)
    assert (metrics["shared_token_share"] > 0) == engine._model.abilities.shares
    norm = math.sqrt(squares)
    assert abs(metrics["grad_norm"] - norm) <= TOLERANCE * norm, (metrics, norm)
    assert abs(metrics["entropy"] - entropy) <= TOLERANCE, (metrics, entropy)
    with torch.no_grad():
        changed = row_logprobs(reference, rows)
    assert (
        max((a - b).abs().max() for a, b in zip(changed, expected, strict=True) if len(a))
        > MIN_CHANGE
    )
    assert_close("forward after the update", engine_logprobs(engine, rows), changed)


def check_export(engine: FSDPEngine, reference: Any, folder: Path) -> None:
    """What transformers loads from the written folder is the updated model."""
    engine.begin_save_hf(folder).result(WRITE_TIMEOUT_S)
    exported, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    rows = make_rows()
    with torch.no_grad():
        found = row_logprobs(exported.eval(), rows)
        assert_close("export", found, row_logprobs(reference, rows))


def check_generation(
    model: Any,
    source: Path,
    before: Any,
    after: Any,
    published: list[tuple[str, torch.Tensor]] | None,
) -> str:
    """Answers across a publication and one by the folder, greedy and sampled.

    Args:
        model: with the weights in `source`; they change.
        before, after: references of the weights in `source`, and of `published`.
        published: new weights, as trainers give them; None: none.
    Returns: "", or the refusal.
    """
    tokenizer: Any = Tokenizer()
    config = RolloutConfig(path="", max_context_tokens=MAX_CONTEXT, seed=0)
    try:
        LocalEngine(config, (model, tokenizer))
    except (ModelError, ConfigError) as refusal:
        return str(refusal)
    table = SlotTable(10, MAX_CONTEXT, 2 * LIMIT, seed=5)
    generator = SlotGenerator(LocalModel(model), table, MAX_CONTEXT)
    references = {0: before}
    finished = generate(generator, 0, (0.0, 1.0), num_steps=LIMIT // 2)
    if published is not None:
        references[1] = after
        generator.update_weights(1, published)
        finished += generate(generator, 100, (0.0,), num_steps=LIMIT // 2)
        references[2] = before
        generator.update_weights(2, read_weights(source, generator.weight_names))
    finished += generate(generator, 200, (1.0,))
    for request, completion in finished:
        row = torch.tensor([*request.prompt.tolist(), *completion.token_ids])
        first = len(request.prompt) - 1
        for version in set(completion.versions):
            logits = references[version](input_ids=row[None], use_cache=False).logits[0, first:-1]
            logprobs = logits.log_softmax(-1).detach()
            chosen = logprobs.gather(1, row[first + 1 :, None])[:, 0].numpy()
            at = np.array(completion.versions) == version
            error = np.abs(np.array(completion.logprobs) - chosen)[at].max()
            assert error <= TOLERANCE, f"generation: {error:.2g} nats, version {version}"
            if request.temperature == 0:
                lost = (logprobs.max(-1).values.numpy() - chosen)[at].max()
                assert lost <= TOLERANCE, f"greedy: {lost:.2g} nats below the best token"
    return ""


def generate(
    generator: SlotGenerator,
    first_id: int,
    temperatures: Sequence[float],
    num_steps: int | None = None,
) -> Finished:
    """Adds a request for each prompt and temperature; runs some steps, or until the end."""
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = (np.arange(length) * 7 + 3 * index + first_id) % VOCABULARY
        for number, temperature in enumerate(temperatures):
            generator.table.add(
                SlotRequest(
                    first_id + 10 * index + number,
                    prompt,
                    length + NEW_TOKENS,
                    "length",
                    temperature=temperature,
                    prefix_group=f"{first_id} {index}",
                )
            )
    finished: Finished = []
    while generator.table.has_work and num_steps != 0:
        finished += generator.step()
        num_steps = None if num_steps is None else num_steps - 1
    return finished


def engine_logprobs(engine: FSDPEngine, rows: PackedRows) -> list[torch.Tensor]:
    found = engine.forward(rows, "logprobs")
    return [row[1:] for row in torch.split(found, list(rows.lengths))]


def assert_close(
    what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    for row, wanted in zip(found, expected, strict=True):
        if len(row):
            error = float((row - wanted).detach().abs().max())
            assert error <= TOLERANCE, f"{what}: {error:.2g} nats, rows of {len(row) + 1} tokens"
