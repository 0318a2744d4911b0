"""Which model is kept as the best, and when training ends because there is no better one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_evaluation
from unit.trainer.conftest import shown

from areal_sc.errors import ConfigError
from areal_sc.records.metrics import EvaluationResult
from areal_sc.records.metrics_log import read_metrics
from areal_sc.trainer.beside import KeepsSnapshots
from areal_sc.trainer.evaluation.best_model import BestModel
from areal_sc.trainer.run import Run


class Models(KeepsSnapshots):
    """Writes models when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.unwritten: set[int] = set()

    def finish(self) -> None:
        self.collect()

    def collect(self, *, wait: bool = True) -> None:
        for step in self.unwritten:
            self.write(step)
        self.unwritten = set()

    def export(self) -> None:
        self.unwritten.add(self.step)

    def has_model(self, step: int) -> bool:
        return (self.folder / f"step-{step}").exists()

    def write(self, step: int) -> None:
        (self.folder / f"step-{step}").mkdir(parents=True, exist_ok=True)

    @property
    def there(self) -> set[str]:
        return {it.name for it in self.folder.iterdir()} if self.folder.exists() else set()


@pytest.fixture
def models(run: Run) -> Models:
    run.checkpoints = models = Models(run.folder.path / "models")
    run.config.checkpoint.keep_best = "accuracy"
    return models


def result(step: int, accuracy: float, name: str = "periodic", **others: Any) -> EvaluationResult:
    return make_evaluation(name, step=step, reward=accuracy, accuracy=accuracy, **others)


@pytest.fixture
def evaluate(models: Models) -> Callable[..., None]:
    """An evaluation of a step, from its begin to the step after its end."""

    def play(best: BestModel, step: int, accuracy: float, name: str = "periodic") -> None:
        models.step = step
        best.begin()
        best.settle()
        best.note_results([result(step, accuracy, name)])
        models.collect()
        best.settle()

    return play


def test_the_best_model_stays_and_worse_ones_go(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    best = BestModel(run, {"": 1})
    evaluate(best, 10, 0.5)
    evaluate(best, 20, 0.75)
    assert models.there == {"step-20", "best"}
    evaluate(best, 30, 0.75)
    assert (models.folder / "best").resolve().name == "step-20", "the first one of equals"
    run.config.checkpoint.export_every_steps = 40
    evaluate(best, 40, 0.25)
    assert models.there == {"step-20", "step-40", "best"}, "that one is wanted anyway"
    evaluate(best, 50, 1.0, "after")
    best.finish()
    assert (models.folder / "best").resolve().name == "step-50"
    assert "best model: step 50 (accuracy 1), in models/best" in shown(run)
    events = [it for it in read_metrics(run.folder.metrics_path) if it["kind"] == "event"]
    assert [(it["name"], it["step"], it["value"]) for it in events] == [
        ("best", 10, 0.5),
        ("best", 20, 0.75),
        ("best", 50, 1.0),
    ]


def test_a_model_is_not_deleted_before_the_better_one_is_written(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    best = BestModel(run, {"": 1})
    evaluate(best, 10, 0.5)
    models.step = 20
    best.begin()
    best.note_results([result(20, 1.0)])
    best.settle()
    assert (models.folder / "best").resolve().name == "step-10"
    models.collect()
    best.settle()
    assert models.there == {"step-20", "best"}


def test_a_loss_is_better_when_it_is_lower(run: Run, models: Models) -> None:
    run.config.checkpoint.keep_best = "loss"
    best = BestModel(run, {"": 1})
    for step, loss in ((1, math.nan), (2, 1.0), (3, 3.0)):
        found = result(step, 0.0)
        best.note_results(
            [EvaluationResult.from_record({**found.to_record(), "workflow": {"loss": loss}})]
        )
    assert best.best is not None
    assert best.best.step == 2


def test_other_evaluations_do_not_count(run: Run, models: Models) -> None:
    run.config.checkpoint.keep_best = "hard/pass@2"
    best = BestModel(run, {"hard": 4, "easy": 1})
    wanted = result(4, 0.1, "hard/periodic", pass_at={"1": 0.1, "2": 0.2, "4": 0.4})
    best.note_results([result(4, 1.0), result(4, 1.0, "easy/periodic"), wanted])
    best.note_results(
        [result(9, 1.0, "hard/greedy"), result(0, 1.0, "hard/before", pass_at={"2": 1.0})]
    )
    assert best.best == wanted


def test_training_ends_after_so_many_evaluations_without_a_better_one(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    run.config.evaluation.stop_after = 2
    best = BestModel(run, {"": 1})
    for step, accuracy in ((10, 0.2), (20, 0.5), (30, 0.4)):
        evaluate(best, step, accuracy)
        assert not best.has_enough
    evaluate(best, 40, 0.5)
    assert best.has_enough
    said = "2 evaluations had no better accuracy than 0.5 of step 20: training ends"
    assert said in shown(run)

    resumed = BestModel(run, {"": 1})
    resumed.remember(best.results)
    assert resumed.has_enough
    resumed.remember(best.results, 30)
    assert not resumed.has_enough, "the run went back behind the last one"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("pass@8", "expected pass@1 or pass@2 or pass@4, since each prompt has 4 answers"),
        ("hard/pass@3", "expected pass@1 or pass@2 or pass@4 or pass@8 or pass@16"),
        ("odd/accuracy", "there is no evaluation set 'odd'; there is easy, hard"),
    ],
)
def test_a_number_that_there_cannot_be_is_told_before_the_start(
    run: Run, models: Models, number: str, message: str
) -> None:
    run.config.checkpoint.keep_best = number
    with pytest.raises(ConfigError, match=message):
        BestModel(run, {"easy": 4, "hard": 16})


def test_a_metric_may_have_a_slash(run: Run, models: Models) -> None:
    run.config.checkpoint.keep_best = "reward/right"
    best = BestModel(run, {"easy": 4, "hard": 16})
    record = result(4, 0.5).to_record()
    found = EvaluationResult.from_record({**record, "workflow": {"reward/right": 0.5}})
    best.note_results([found])
    assert best.best == found
    run.config.checkpoint.keep_best = "hard/reward/right"
    best = BestModel(run, {"easy": 4, "hard": 16})
    of_set = EvaluationResult.from_record({**found.to_record(), "name": "hard/periodic"})
    best.note_results([found, of_set])
    assert best.best == of_set


def test_evaluations_without_a_vote_have_no_majority(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    run.config.checkpoint.keep_best = "majority"
    run.config.evaluation.stop_after = 1
    best = BestModel(run, {"": 4})
    evaluate(best, 10, 0.5)
    best.finish()
    assert (best.best, best.has_enough) == (None, False)
    voted = result(20, 0.5, majority=0.25)
    best.note_results([voted])
    evaluate(best, 30, 0.5)
    resumed = BestModel(run, {"": 4})
    resumed.remember(best.results, 30)
    resumed.settle()
    assert (resumed.best, resumed.has_enough) == (voted, True)


def test_a_number_that_a_later_evaluation_lacks_ends_nothing(run: Run, models: Models) -> None:
    best = BestModel(run, {"": 1})
    first = result(10, 0.0)
    without = EvaluationResult.from_record({**result(20, 1.0).to_record(), "workflow": {"a": 1.0}})
    best.note_results([first, without])
    assert best.best == first
    resumed = BestModel(run, {"": 1})
    resumed.remember([result(0, 0.5, "before")], 0)
    resumed.note_results([without])
    assert resumed.best is None


def test_a_run_that_goes_on_from_before_its_best_model_has_the_one_before(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    run.folder.snapshot_path(30).mkdir(parents=True)
    best = BestModel(run, {"": 1})
    evaluate(best, 10, 0.25)
    evaluate(best, 20, 0.5)
    assert models.there == {"step-20", "best"}, "the newest snapshot is not older than this one"
    evaluate(best, 40, 0.75)
    assert models.there == {"step-20", "step-40", "best"}

    resumed = BestModel(run, {"": 1})
    resumed.remember(best.results, 30)
    assert models.there == {"step-20", "step-40"}, "best led to a model that is none of the run's"
    resumed.settle()
    evaluate(resumed, 40, 0.25)
    resumed.finish()
    assert (models.folder / "best").resolve().name == "step-20"
    assert "best model: step 20 (accuracy 0.5), in models/best" in shown(run)

    run.folder.snapshot_path(50).mkdir()
    evaluate(resumed, 60, 0.75)
    run.folder.snapshot_path(60).mkdir()
    resumed.settle()
    assert models.there == {"step-60", "best"}


def test_a_best_model_that_is_gone_is_not_said_to_be_there(
    run: Run, models: Models, evaluate: Callable[..., None]
) -> None:
    best = BestModel(run, {"": 1})
    evaluate(best, 10, 0.5)
    best.note_results([result(20, 0.75)])
    best.finish()
    said = "best model: step 20 (accuracy 0.75), but its model is not there any more"
    assert said in shown(run)
    assert "models/best is of step 10" in shown(run)


def test_a_number_that_no_evaluation_has(run: Run, models: Models) -> None:
    run.config.checkpoint.keep_best = "acuracy"
    with pytest.raises(ConfigError, match="has no such number; it has reward, accuracy"):
        BestModel(run, {"": 1}).note_results([result(0, 0.5, "before")])


def test_without_a_number_nothing_is_kept(run: Run, models: Models) -> None:
    run.config.checkpoint.keep_best = ""
    best = BestModel(run, {"": 1})
    best.begin()
    best.note_results([result(1, 0.5)])
    best.finish()
    assert (best.best, models.unwritten) == (None, set())
