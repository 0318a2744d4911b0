"""What a run records of its rows and its processes agrees with its ledger and its metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from integration.run_process import tiny_run

from areal_sc.page.group_book import GroupBook
from areal_sc.records.reading import evaluated_answers, rows, spans, steps, trained_rows
from areal_sc.run.run_folder import RunFolder


def test_a_run_records_what_it_does(tmp_path: Path, tiny_model_folder: Path) -> None:
    with tiny_run(tmp_path / "run", tiny_model_folder, "total_steps=5") as run:
        run.finish()
        run_dir = run.run_dir
    recorded = {(it.group, it.attempt, it.episode): it for it in rows(run_dir)}
    book = GroupBook(RunFolder(run_dir).ledger)
    of_script = [it for it in spans(run_dir) if it.process == "script"]
    num_rows = 0
    lives = book.lives(set(range(20)))
    for life in lives.values():
        finished = [it for it in life["events"] if it["what"] == "finished"][-1]
        for row in finished["rows"]:
            kept = recorded[life["account"]["group"], finished["attempt"], row.episode]
            assert (kept.reward, len(kept.input_ids)) == (row.reward, row.num_tokens)
            assert kept.loss_mask.sum() == sum(count for _, count in row.versions)
            for version, count in row.versions:
                assert (kept.versions == version).sum() == count
            assert ((kept.behavior_logprobs < 0) <= kept.loss_mask).all()
            num_rows += 1
    assert num_rows == 5 * 4 * 2
    results = {(it["name"], it["step"]): it for it in run.records("evaluation")}
    answers = [it.answer for it in evaluated_answers(run_dir)]
    assert {(it.evaluation, it.step) for it in answers} == results.keys()
    for (name, step), result in results.items():
        its = [it for it in answers if (it.evaluation, it.step) == (name, step)]
        assert len(its) == result["num_prompts"]
        assert np.mean([it.rows[0].reward for it in its]) == pytest.approx(result["reward"])
        assert len({it.index for it in its}) == len(its)
    traced = list(trained_rows(run_dir))
    assert sorted((it.group, it.episode) for it, _ in traced) == [
        (g, e) for g in (0, 16) for e in (0, 1)
    ]
    for it, tokens in traced:
        sampled = recorded[it.group, it.attempt, it.episode]
        versions = sampled.versions[sampled.loss_mask]
        assert len(tokens.gaps) == len(versions)
        assert it.step == lives[it.group]["account"]["step"]
        rewards = [row.reward for row in recorded.values() if row.group == it.group]
        assert np.sign(tokens.advantages).tolist() == [
            np.sign(sampled.reward - np.mean(rewards))
        ] * len(versions)
        assert (np.isnan(tokens.gaps) == (tokens.advantages == 0)).all(), (
            "they go through no forward"
        )
        assert (np.isnan(tokens.gaps) == np.isnan(tokens.entropies)).all()
        # the policy that begins a step has sampled those
        of_same = np.abs(tokens.gaps[(versions == it.step - 1) & (tokens.advantages != 0)])
        assert (of_same < 1e-3).all()
    measured = list(steps(run_dir))
    assert [it.about for it in of_script if it.kind == "train"] == [str(m.step) for m in measured]
    for step in measured:
        its = {it.kind: it.took_s for it in of_script if it.about == str(step.step)}
        assert its["wait"] == step.wait_s
    found = list(spans(run_dir))
    of_worker = [it for it in found if it.process == "rollout/0"]
    kinds = {it.kind for it in of_worker}
    assert kinds >= {"serving", "start-up", "episode", "generation", "updating weights", "ending"}
    versions = [it.first_version for it in of_worker if it.kind == "updating weights"]
    assert versions == sorted(set(versions))
    assert max(versions) == 5
    updates = [it.first_version for it in found if it.kind == "update"]
    assert updates == [0, 1, 2, 3, 4]
    episodes = [it for it in of_worker if it.kind == "episode" and it.about[0].isdigit()]
    answers = [it for it in of_worker if it.kind == "generation" and it.about[0].isdigit()]
    assert len(episodes) >= num_rows
    by_lane = {lane: [it for it in episodes if it.lane == lane] for lane in range(64)}
    for lane, its in by_lane.items():
        assert not its or lane == 0 or by_lane[lane - 1], "the lowest free lane is taken"
    for answer in answers:
        assert any(
            it.lane == answer.lane and it.about == answer.about and it.began <= answer.began
            for it in episodes
        )
