"""The files of the folder that a run lives in, all of which survive a crash.

run.json         marks the folder as a run's, with its format and newest settings; only such a
                 folder is emptied. `.run.json` is its copy: see `run_marker`
config.yaml      the resolved settings of the newest start, for people
begun.json       what the run was begun with: settings, datasets, code, models
summary.json     written last: the run is finished
status.json      what the run does now, for `python -m areal_sc status`
metrics.jsonl    one line a training step
records/         rows with all their tokens, and what each process did when: see `record_files`
tokenizer.json   of the model that generates: with it the tokens of the records become text
histories/       where each trained model is: see `controller.model_place`
ledger/          the journal of every group's life: what was trained, when, and only once
learning_curve.png, model/
logs/            <role>-<index>.log
checkpoints/     step-<number>/: a snapshot; one that is being written has another name
exports/<role>/  models that are being written
keys.json        the keys of the run, as long as it lives; its owner's alone
agents.json      where agents outside find the run, and their key, as long as it lives; its
                 owner's alone: see `AgentsFile`
agents/          where its agents can be reached: see `agent_files`
.jobs            what it has in SLURM: see `schedulers.slurm.jobs`
.join            where its script takes in agents of other machines
.joined          those of them that do not see the folder, and so have no file in `agents/`
.nonce           who reads it shares the folder: see `nodes.node_folder`
sources/         how workers build the user's datasets and workflows
serving/         key and journal of `python -m areal_sc serve`, and the models that clients saved
previous/<n>/    what an earlier start left that had no snapshot to go on from
rollout_workers  how many there are, once their number has changed
tracker_id       names the run for trackers; it keeps it when it is resumed
.lineage         number of the newest history of weights
.pause, .scale   what a person at a shell wants of the run: see `run_status`
.lock, .term     which process runs in the folder: see `run_owner`

On a node that does not see it another folder stands in for it, with `.join`, `sources/`, `logs/`,
`checkpoints/` and `exports/` as they are needed there, and
.files           where the script's files are served: see `shipping.server`
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from areal_sc.system.durable import without_pipes

_SNAPSHOT_PREFIX: Final = "step"


class RunFiles:
    """Where they lie.

    Attributes:
        path: absolute path of the folder. Others are those of what is in it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = without_pipes(Path(path).expanduser().absolute())
        self.config_path = self.path / "config.yaml"
        self.begun_path = self.path / "begun.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.records = self.path / "records"
        self.tokenizer_path = self.path / "tokenizer.json"
        self.summary_path = self.path / "summary.json"
        self.tracker_id_path = self.path / "tracker_id"
        self.learning_curve_path = self.path / "learning_curve.png"
        self.keys_path = self.path / "keys.json"
        self.agents_path = self.path / "agents.json"
        self.status_path = self.path / "status.json"
        self.jobs_path = self.path / ".jobs"
        self.join_path = self.path / ".join"
        self.joined_path = self.path / ".joined"
        self.files_path = self.path / ".files"
        self.nonce_path = self.path / ".nonce"
        self.lineage_path = self.path / ".lineage"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.pause_path = self.path / ".pause"
        self.scale_path = self.path / ".scale"
        self.rollout_workers_path = self.path / "rollout_workers"
        self.ledger = self.path / "ledger"
        self.serving = self.path / "serving"
        self.histories = self.path / "histories"
        self.exports = self.path / "exports"
        self.sources = self.path / "sources"

    def log_path(self, name: str) -> Path:
        """Path of the log of a process such as `train/0`."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def snapshot_path(self, step: int) -> Path:
        """Where the snapshot after `step` training steps lies once it is whole."""
        return self.checkpoints / f"{_SNAPSHOT_PREFIX}-{step:06d}"

    def snapshots(self) -> list[Path]:
        """Whole snapshots, oldest first.

        Raises: OSError: their folder cannot be read.
        """
        found = []
        folders = self.checkpoints.iterdir() if self.checkpoints.exists() else ()
        for folder in folders:  # not glob, which finds nothing where it may not look
            prefix, _, step = folder.name.rpartition("-")  # one being written has another name
            if prefix == _SNAPSHOT_PREFIX and step.isdecimal() and folder.is_dir():
                found.append((int(step), folder))
        return [folder for _, folder in sorted(found)]
