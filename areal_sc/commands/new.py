"""`new FOLDER`: a script, its settings and its test, to be run at once and then changed.

The files of `project/` are links to an example. They are copied under the names of a project of
one's own.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

from areal_sc.errors import CommandError

_NAME: Final = "train"
SCRIPT: Final = f"{_NAME}.py"
SETTINGS: Final = f"{_NAME}.yaml"
TEST: Final = f"test_{_NAME}.py"

_NAME_OF_THE_EXAMPLE: Final = "first_project"
_FOLDERS_OF_THE_EXAMPLE: Final = ("examples/", "configs/")

_NEXT_STEPS: Final = """\
{folder} holds a task that a small new model learns in a minute:
  {script:<15}prompts, reward and model; PPOTrainer has the loop
  {settings:<15}the settings; `python {script} --help` explains all of them
  {test:<15}tests of the reward, and of a short run

Run it:
  cd {folder}
  python {script} --config {settings} --dry-run
  python {script} --config {settings}
  python -m areal_sc samples {run_dir}
  python -m unittest {test}
Curve and model lie in {run_dir}; after Ctrl-C the same command goes on.

Make it yours, in three places:
  prompts  {prompts:<15}a list of dicts: "prompt", and what the reward needs
  reward   {reward:<15}a number for the answer to a prompt
  model    {model:<15}a folder, or a name of the Hugging Face hub such as
                          Qwen/Qwen2.5-0.5B-Instruct: then leave make_model out,
                          and set lr and max_new_tokens, too
"""

COMMAND: Final = dict(
    help="write a first script with its settings and a test",
    description=f"Writes {SCRIPT}, {SETTINGS} and {TEST} to a new or empty folder: a small "
    "task that is learned in a minute on two CPU cores, to be changed into your own.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new or empty folder")


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: the folder is not empty, or cannot be written."""
    files, folder = project_files(), arguments.folder.expanduser()
    write_project(folder, files)
    sys.stdout.write(next_steps(folder, files))


def project_files() -> dict[str, str]:
    """Name -> content of each file of a project."""
    return {
        _renamed(template.name.removesuffix(".template")): _renamed(template.read_text())
        for template in resources.files("areal_sc.commands").joinpath("project").iterdir()
    }


def write_project(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files to a folder that is new or empty.

    Raises: CommandError: it is not, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(entry.name for entry in folder.iterdir())
        if found:
            more = ", ..." if len(found) > 3 else ""
            raise CommandError(
                f"{folder} is not empty ({', '.join(found[:3])}{more}), so nothing was written; "
                "name a new folder"
            )
        for name, content in files.items():
            (folder / name).write_text(content)
    except OSError as error:
        raise CommandError(
            f"cannot write a project to {folder}: {error.strerror}; name another folder"
        ) from error


def next_steps(folder: Path, files: Mapping[str, str]) -> str:
    """What to do with a project that was written: run it, and change it in three places."""
    return _NEXT_STEPS.format(
        folder=shlex.quote(str(folder)),
        script=SCRIPT,
        settings=SETTINGS,
        test=TEST,
        run_dir=f"runs/{_NAME}",
        prompts=_place(files, SCRIPT, "PROMPTS ="),
        reward=_place(files, SCRIPT, "def reward("),
        model=_place(files, SETTINGS, "  path:"),
    )


def _renamed(text: str) -> str:
    """A text of the example as it stands in a project, whose files lie in one folder."""
    for folder in _FOLDERS_OF_THE_EXAMPLE:
        text = text.replace(folder, "")
    return text.replace(_NAME_OF_THE_EXAMPLE, _NAME)


def _place(files: Mapping[str, str], name: str, start: str) -> str:
    """File and number of the line that begins so, as editors open it."""
    lines = files[name].splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if line.startswith(start))
    return f"{name}:{number}"
