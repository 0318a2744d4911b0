"""A run that is evaluated on several sets, and keeps the best model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integration.run_process import SCRIPTS, tiny_run
from transformers import AutoModelForCausalLM


@pytest.mark.slow
def test_each_set_is_evaluated_and_the_best_model_stays(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "letters.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{it}=", "gate": ""}) + "\n" for it in "abc"))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS), prepend=":")
    one = f"{{name: letters, prompts: '{prompts}', answer_key: '', reward: 'judged:no_vowels', "
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        f"evaluation.sets=[{one} num_samples: 4}}]",
        *("evaluation.every_steps=1", "generation.cut_answers=judged"),
        "checkpoint.keep_best=letters/pass@2",
    ) as run:
        run.finish()
        records = run.records("evaluation")
        names = {record["name"] for record in records}
        kinds = ("before", "periodic", "after", "greedy")
        assert names == {f"{of}{kind}" for of in ("letters/", "held_out/", "") for kind in kinds}
        at = {(record["name"], record["step"]): record for record in records}
        for name, step in at:
            if "/" not in name:
                both = [at[f"{of}/{name}", step]["accuracy"] for of in ("letters", "held_out")]
                assert at[name, step]["accuracy"] == pytest.approx(sum(both) / 2)
        letters = [it for it in records if it["name"] in ("letters/periodic", "letters/after")]
        assert {it["num_samples"] for it in letters} == {4}
        assert {it["num_prompts"] for it in letters} == {3}
        best = max(letters, key=lambda it: it["pass_at"]["2"])
        models = run.run_dir / "models"
        assert {it.name for it in models.iterdir()} == {f"step-{best['step']}", "best"}
        assert run.events("best")[-1]["step"] == best["step"]
        AutoModelForCausalLM.from_pretrained(models / "best")
