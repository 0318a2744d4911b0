"""The job that is submitted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import job_plans
from areal_sc.config.slurm_script import COMES_BACK, JOIN_SECRET, job_script, step_lines
from areal_sc.config.slurm_settings import SlurmConfig


def test_what_is_not_set_is_left_to_the_cluster() -> None:
    [plan] = job_plans(SlurmConfig())
    script = job_script(SchedulerConfig(run_dir="/r"), Path("/r"), plan)
    flags = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    assert flags == [
        *("--nodes=1", "--ntasks-per-node=1", "--output=/dev/null", "--chdir=/"),
        *("--no-requeue", "--no-kill"),
    ]


def test_all_settings_are_in_the_script_and_bash_reads_it() -> None:
    slurm = SlurmConfig(
        nodes=4,
        gpus_per_node=8,
        cpus_per_node=32,
        memory_per_node="64G",
        time_limit="1:00",
        partition="p",
        account="a",
        constraint="a100&nvlink",
        extra_flags=["--exclusive"],
        setup=["module load cuda"],
    )
    [plan] = job_plans(slurm)
    script = job_script(SchedulerConfig(run_dir="/r", slurm=slurm), Path("/a folder"), plan)
    flags = {line for line in script.splitlines() if line.startswith("#SBATCH")}
    assert flags > {
        *("#SBATCH --gpus-per-node=8", "#SBATCH --mem=64G", "#SBATCH --exclusive"),
        "#SBATCH --constraint='a100&nvlink'",
    }
    assert script.index("module load cuda") < script.index("  srun ")
    assert "--cpus-per-task=32" in script[script.index("  srun ") :]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_each_node_of_a_job_gets_an_agent_with_the_jobs_invitation(tmp_path: Path) -> None:
    slurm = SlurmConfig(nodes=2)
    config = SchedulerConfig(run_dir=str(tmp_path), slurm=slurm, node_folder=str(tmp_path))
    stand_ins = {
        "scontrol": 'shift 2; echo "$@"',
        "srun": f'echo "$(cat) ${{{JOIN_SECRET}-no more}} $*" >>{tmp_path}/agents',
    }
    for name, does in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a b",
        "SLURM_SUBMIT_DIR": "/",
        JOIN_SECRET: "key one",
    }
    [plan] = job_plans(slurm)
    (tmp_path / "script").write_text(job_script(config, tmp_path, plan))
    subprocess.run(["bash", str(tmp_path / "script")], check=True, env=variables)
    agents = sorted((tmp_path / "agents").read_text().splitlines())
    told = [re.findall(r"^(key \w+ no more) .*nodelist=(\w) ", it) for it in agents]
    assert told == [[("key one no more", "a")], [("key one no more", "b")]]


def test_agents_of_nodes_that_are_replaced_do_not_ask_the_run_to_end() -> None:
    slurm = SlurmConfig(gang=False)
    config = SchedulerConfig(run_dir="/r", slurm=slurm)
    train, rollout = (job_script(config, Path("/r"), plan) for plan in job_plans(slurm))
    assert f"export {COMES_BACK}=1" in rollout
    assert COMES_BACK not in train


@pytest.mark.parametrize("has_run_folder", [True, False])
def test_a_job_has_its_log_in_the_run_folder_or_else_on_its_node(
    tmp_path: Path, has_run_folder: bool
) -> None:
    run_dir, node_folder = tmp_path / "a run", tmp_path / "a node"
    if has_run_folder:
        (run_dir / "logs").mkdir(parents=True)
    slurm = SlurmConfig(setup=["echo set up in $PWD; exit"])
    config = SchedulerConfig(run_dir=str(run_dir), slurm=slurm, node_folder=str(node_folder))
    [plan] = job_plans(slurm)
    script = job_script(config, run_dir, plan)
    variables = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path / "not there")}
    subprocess.run(["bash", "-c", script], input="\n", text=True, check=True, env=variables)
    [log] = tmp_path.rglob("slurm-7.log")
    assert log.read_text() == "set up in /\n"
    below = run_dir if has_run_folder else node_folder / f"areal_sc-{os.geteuid()}"
    assert log.parent == below / "logs"
    assert has_run_folder or below.stat().st_mode & 0o777 == 0o700


def test_the_arguments_of_agents_come_from_the_environment() -> None:
    [plan] = job_plans(SlurmConfig())
    config = SchedulerConfig(run_dir="/r")
    lines = step_lines(config, Path("/r"), plan, ["node1"], [], before="true; ")
    shown = "\n".join(lines).replace("exec srun", "echo").replace("exec /", "echo /")
    variables = {f"AREAL_SC_AGENT_{i}": word for i, word in enumerate(["id", '{"a": "b c"}', "x"])}
    done = subprocess.run(
        ["bash", "-c", shown], capture_output=True, text=True, check=True, env=variables
    )
    assert '"$AREAL_SC_AGENT_1"' in done.stdout, "the shell of the node expands it"
    assert "b c" not in done.stdout


@pytest.mark.parametrize("nodes", [["a;touch x"], ["a;touch x", "$(touch x)"]])
def test_names_of_nodes_which_agents_have_told_are_no_commands(
    tmp_path: Path, nodes: list[str]
) -> None:
    [plan] = job_plans(SlurmConfig())
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$*" >>agents\n')
    (tmp_path / "srun").chmod(0o755)
    lines = step_lines(SchedulerConfig(run_dir="/r"), Path("/r"), plan, nodes, [])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "-c", "\n".join(lines)]
    subprocess.run(words, input=b"key\n", check=True, cwd=tmp_path, env=path)
    assert sorted(os.listdir(tmp_path)) == ["agents", "srun"]
    told = (tmp_path / "agents").read_text()
    assert all(f"--nodelist={node} bash" in told for node in nodes)


@pytest.mark.parametrize(
    ("container", "command"),
    [
        (["apptainer", "exec", "--nv", "/a b.sif"], "exec apptainer exec --nv '/a b.sif' python3"),
        (["--container-image=a.sqsh", "--container-mounts=/r"], "exec python3"),
    ],
)
def test_a_container_is_around_the_agent_and_not_around_slurms_commands(
    container: list[str], command: str
) -> None:
    slurm = SlurmConfig(container=container, python="python3", requeue=True)
    [plan] = job_plans(slurm)
    script = job_script(SchedulerConfig(run_dir="/r", slurm=slurm), Path("/r"), plan)
    assert "#SBATCH --requeue\n" in script
    [line] = [line.strip() for line in script.splitlines() if line.startswith("  srun ")]
    words = shlex.split(line)
    assert f"; {command} -P -m areal_sc.nodes.agent" in words[words.index("-c") + 1]
    flags = words[: words.index("bash")]
    assert [it for it in flags if it in container] == [it for it in container if it[:4] == "--co"]
