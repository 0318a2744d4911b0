from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from areal_sc.config.loading.plain import to_plain
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import (
    ActorConfig,
    Dtype,
    GenerationConfig,
    OptimizerConfig,
    RolloutConfig,
    RolloutEngine,
    WeightUpdateConfig,
)
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.handle_names import handle_from_plain, own_code
from areal_sc.engines.handles import (
    FSDPPPOActor,
    FSDPSFTActor,
    LocalGenerator,
    SGLangEngine,
    make_actor,
    make_generator,
)
from areal_sc.errors import ConfigError

EXAMPLES = str(Path(__file__).parents[3] / "examples")


def test_building_gives_the_worker_side_engine() -> None:
    from areal_sc.engines.fsdp.engine import FSDPEngine

    config = ActorConfig(path="model")
    for handle in (FSDPPPOActor(config), FSDPSFTActor(config=config)):
        engine = handle.build()
        assert isinstance(engine, FSDPEngine)
        assert engine.config == config
        engine.close()


def test_names_are_resolved_from_a_fixed_list() -> None:
    config = ActorConfig(
        path="model",
        dtype=Dtype.bfloat16,
        seed=3,
        optimizer=OptimizerConfig(total_steps=5),
        ppo=PPOConfig(clip_low=0.5),
        weight_update=WeightUpdateConfig(folder="weights"),
    )
    for handle in (FSDPPPOActor(config), FSDPSFTActor(config)):
        assert handle_from_plain(type(handle).__name__, to_plain(config)) == handle
    assert LocalGenerator.worker_class == "areal_sc.engines.local.engine:LocalEngine"
    generation = RolloutConfig(
        path="model",
        generation=GenerationConfig(),
        dtype=Dtype.float32,
        seed=3,
        sglang=SGLangConfig(args={"mem_fraction_static": 0.5}),
        weight_update=WeightUpdateConfig(folder="weights"),
    )
    for kind, handle in (
        (RolloutEngine.local, LocalGenerator),
        (RolloutEngine.sglang, SGLangEngine),
    ):
        made = make_generator(replace(generation, engine=kind))
        assert isinstance(made, handle)
        assert handle_from_plain(handle.__name__, to_plain(made.config)) == made
    with pytest.raises(ConfigError, match=r"no engine handle is called 'os\.system'; there are F"):
        handle_from_plain("os.system", {})


def test_handles_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        FSDPPPOActor(ActorConfig(path="model")).config = None  # type: ignore[assignment, misc]


def test_nothing_of_it_imports_torch() -> None:
    program = (
        "import sys, areal_sc.engines.handles, areal_sc.algorithms.packing\n"
        "import areal_sc.algorithms.advantages as a\n"
        "a.normalized_advantages([1.0, 2.0], [0, 0])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_generator_takes_the_longest_sequence_of_its_model(tmp_path: Path) -> None:
    generator = LocalGenerator(RolloutConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"max_context_tokens: 0 takes the limit of the model in"):
        generator.with_context()
    (tmp_path / "config.json").write_text('{"n_positions": 70}')
    settled = generator.with_context()
    assert settled.config.max_context_tokens == 70
    assert settled.with_context() is settled


def test_every_life_of_a_worker_has_random_streams_of_its_own() -> None:
    """Life: the script's term, and how often that has started the worker again."""
    handles = [make_generator(RolloutConfig(path="x", seed=seed)) for seed in (0, 1)]
    lives = [(term, number) for term in (1, 2) for number in (0, 1, 2)]
    seeds = [handle.in_life(*life).config.seed for handle in handles for life in lives]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = [handle.in_life(*life).config.seed for handle in handles for life in lives]
    assert again == seeds  # a run repeats what it did


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "rollout.engine: expected local, sglang, vllm, or package.module:Handle, got"),
        ("plain_engine:Nothing", "'plain_engine:Nothing': AttributeError"),
        ("muon:Muon", "a class derived from GeneratorHandle; got 'muon:Muon'"),
        ("moon:Muon", "'moon:Muon': ModuleNotFoundError"),
    ],
)
def test_an_engine_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_generator(RolloutConfig(path="model", engine=name))


def test_workers_find_an_engine_and_an_optimizer_of_a_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    generator = make_generator(RolloutConfig(path="m", engine="plain_engine:PlainGenerator"))
    name, folders = own_code(generator)
    assert (name, folders) == ("plain_engine:PlainGenerator", [EXAMPLES])
    assert handle_from_plain(name, to_plain(generator.config)) == generator
    config = ActorConfig(path="m", optimizer=OptimizerConfig(type="muon:Muon"))
    assert own_code(make_actor(config)) == ("FSDPPPOActor", [EXAMPLES])
    assert own_code(make_actor(config, is_frozen=True)) == ("FSDPPPOActor", [])
    with pytest.raises(ConfigError, match="there is no module 'moon'"):
        make_actor(replace(config, optimizer=OptimizerConfig(type="moon:Muon"))).check(None)
    with pytest.raises(ConfigError, match="derived from TrainHandle; got 'plain_engine:Plain"):
        make_actor(replace(config, engine="plain_engine:PlainGenerator"))
