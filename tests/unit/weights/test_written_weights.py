"""Weights of old policies go, and nobody else's."""

from __future__ import annotations

from pathlib import Path

from areal_sc.weights.rank_weights import remove_before


def test_of_runs_with_one_folder_each_deletes_its_own_weights(tmp_path: Path) -> None:
    names = [f"policy-{run}-{lineage}-{n}" for run in "ab" for lineage in (1, 2) for n in (9, 10)]
    for name in (*names, "policy-a-mine", "models"):
        (tmp_path / name).mkdir()
    remove_before(tmp_path, "policy-a-", [2, 10])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*names[3:], "policy-a-mine", "models"])
