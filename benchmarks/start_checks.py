"""What the checks of a start refuse: planted faults, and rows whose tokens are drawn.

    make real-model
    python benchmarks/start_checks.py [--model FOLDER] [--quick] [--json FILE]

Each fault of `tests/planted_faults.py` is planted into the trainer's packed rows or into embedded
generation of the model, and of each tiny family that can show it; those of ranks into three ranks
that share the model's tensors, in float32, bfloat16 and float16. All have to be refused. Then the
checks run with rows of tokens that are drawn from the whole vocabulary, special ones among them, in
the place of text that the model finds likely: none may be refused. `largest_distance` is how far
apart sound ways of computing were there, in units of the rounding noise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import report
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import planted_faults  # noqa: E402
from integration.ranks import run_ranks  # noqa: E402
from planted_faults import GENERATION, LONGEST, TRAINER  # noqa: E402
from unit.engines.families import build  # noqa: E402

from areal_sc.engines.fsdp import ability_probe  # noqa: E402
from areal_sc.engines.fsdp.packed_model import PackedModel  # noqa: E402
from areal_sc.engines.likely_rows import LENGTHS  # noqa: E402
from areal_sc.engines.local import self_check  # noqa: E402
from areal_sc.engines.rounding import Expected  # noqa: E402
from areal_sc.engines.training.causal_lm import load_causal_lm  # noqa: E402
from areal_sc.errors import ModelError  # noqa: E402

REAL = ROOT / ".venv-models" / "SmolLM2-135M-Instruct"
RANK_FAULTS = ("order of ranks", "sum", "last layer")
DTYPES = ("float32", "bfloat16", "float16")
FAMILY = "llama"
"""The tiny family of the real model's kind: both show the same faults."""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=REAL, help="a Hugging Face folder")
    parser.add_argument("--starts", type=int, default=200, help="starts with drawn rows")
    parser.add_argument("--no-ranks", action="store_true", help="leave out the runs of three ranks")
    arguments = report.parse(parser, starts=2, no_ranks=True)
    if not arguments.quick and not arguments.model.exists():
        print(f"{arguments.model} is missing; run `make real-model`", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    load = functools.partial(load_causal_lm, arguments.model)
    make = functools.cache(functools.partial(build, FAMILY) if arguments.quick else load)
    metrics = {
        **planted("model", {FAMILY: make}),
        **planted("families", {} if arguments.quick else None),
        **drawn_rows(make, arguments.starts),
    }
    if not arguments.no_ranks:
        metrics |= ranks(arguments.model)
    model = f"tiny {FAMILY}" if arguments.quick else arguments.model.name
    settings = {"model": model, "starts": arguments.starts}
    report.print_metrics("What the checks of a start refuse", settings, metrics)
    report.write(metrics, arguments.json)


def planted(of: str, models: dict[str, Any] | None) -> report.Metrics:
    """Args: models: how each is made, by the family whose faults it shows; None: all families."""
    num_faults = num_refused = 0
    ways = (
        (TRAINER, planted_faults.is_refused),
        (GENERATION, planted_faults.generation_is_refused),
    )
    for faults, is_refused in ways:
        for name, family in ((n, f) for n, fault in faults.items() for f in fault.families):
            make = functools.partial(build, family) if models is None else models.get(family)
            if make is None:
                continue
            anew = make if models is None else functools.partial(fresh, make)
            refused = is_refused(anew, faults[name].plant)
            num_faults, num_refused = num_faults + 1, num_refused + refused
            if not refused:
                report.say(f"TAKEN: {of} {family}: {name}")
    return {f"{of}_faults": num_faults, f"{of}_taken": num_faults - num_refused}


def fresh(make: Any) -> Any:
    """The model with its own attention: checks leave theirs."""
    model = make()
    model.set_attn_implementation("sdpa")
    return model


@contextlib.contextmanager
def rows_of(generator: torch.Generator) -> Iterator[list[float]]:
    """Within it the checks try drawn tokens; gives the distances that they find."""
    distances, distance = list[float](), Expected.distance

    def draw(causal_lm: Any, lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
        vocabulary = causal_lm.get_input_embeddings().num_embeddings
        return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]

    def noted(self: Expected, found: torch.Tensor) -> float:
        distances.append(distance(self, found))
        return distances[-1]

    with (
        patch.object(ability_probe, "likely_rows", draw),
        patch.object(self_check, "likely_rows", draw),
        patch.object(Expected, "distance", noted),
    ):
        yield distances


def drawn_rows(make: Any, num_starts: int) -> report.Metrics:
    generator, num_refused, found = torch.Generator().manual_seed(0), 0, list[float]()
    for start in range(num_starts):
        with rows_of(generator) as distances:
            try:
                model = PackedModel(fresh(make), chunk_tokens=1024)
                abilities = ability_probe.probe_abilities(model, LONGEST).abilities
                self_check.check_generation(fresh(make), LONGEST)
                is_refused = not (abilities.packs and abilities.has_linear_head)
            except ModelError as error:
                report.say(f"REFUSED: start {start}: {error}")
                is_refused = True
        num_refused += is_refused
        found += distances
    return {"starts": num_starts, "starts_refused": num_refused, "largest_distance": max(found)}


def ranks(model: Path) -> report.Metrics:
    common = {"model": str(model), "world_size": 3, "parallel": {"tensor": 3}, "steps": []}
    scenarios = {
        f"{dtype} {fault}": {**common, "dtype": dtype, **({"spoilt": fault} if fault else {})}
        for dtype in DTYPES
        for fault in ("", *RANK_FAULTS)
    }
    metrics: report.Metrics = {}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for name, scenario in scenarios.items():  # one after the other, for the memory's sake
            results = run_ranks(Path(folder), {name: scenario})[name]
            errors = [rank.get("error", "") for rank in results]
            report.say(f"{name or 'sound'}: {errors[0][:200] or 'taken'}")
            key = name.replace(" ", "_").strip("_")
            metrics[f"ranks_{key}_refused"] = float(
                all("does not compute on" in it for it in errors)
            )
    return metrics


if __name__ == "__main__":
    main()
