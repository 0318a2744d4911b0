"""Everything that has to be measured on a GPU, in one call.

    python benchmarks/gpu.py [--quick] [--json FILE] [--device cuda|cpu] [--sections A,B]
                             [--sglang-python PATH]

Each section is a process of its own with its own time limit, so that none can take another's
memory, time or result. Its output is shown as it comes; `--json` is written anew after each. On a
CPU the models are tiny and the numbers mean nothing: that is for trying the script.

- letter_sort: the main job with FSDP and LocalEngine in bfloat16; does it learn?
- train: tokens/s and share of the bfloat16 peak, against a loop written by hand
- generate: tokens/s of LocalEngine at 64 and 256 slots, against a static batch loop
- publish: seconds, bytes and memory of new weights, by pull and by disk
- sglang: the jobs of `generate` through an SGLang server; only with `--sglang-python`

`<section>_status` is 0 for a section that ran, else its exit code, 124 when its time was up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import report
import torch
from gpu_common import Setting

TIMED_OUT = 124


@dataclass(frozen=True)
class Section:
    """Time limits in seconds."""

    quick_s: float
    full_s: float


SECTIONS: Mapping[str, Section] = {
    "train": Section(150, 400),
    "generate": Section(120, 300),
    "publish": Section(150, 300),
    "letter_sort": Section(300, 900),
    "sglang": Section(300, 600),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--sections", default="", help=f"of {','.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--sglang-python", default="", metavar="PATH", help="interpreter that has SGLang"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in a section's own process
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch finds no CUDA device here; --device cpu tries the script"
        )
    if arguments.section:
        return run_section(arguments, device)
    names = [name for name in arguments.sections.split(",") if name] or [
        name for name in SECTIONS if name != "sglang" or arguments.sglang_python
    ]
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        parser.error(f"--sections: there is no {unknown[0]}; there are {', '.join(SECTIONS)}")
    metrics: dict[str, tuple[float, str]] = {}
    for name in names:
        metrics |= start_section(name, arguments, device)
        report.write(metrics, arguments.json)
    print()
    for key, (value, unit) in metrics.items():
        print(f"{key} = {value:.6g} {unit}")
    return int(any(metrics[f"{name}_status"][0] for name in names))


def limit_of(name: str, is_quick: bool) -> float:
    return SECTIONS[name].quick_s if is_quick else SECTIONS[name].full_s


def run_section(arguments: argparse.Namespace, device: str) -> int:
    """Measures one section in this process."""
    setting = Setting(
        device,
        arguments.quick,
        limit_of(arguments.section, arguments.quick),
        arguments.sglang_python,
    )
    if device == "cpu":
        torch.set_num_threads(1)
    report.write(_measurement(arguments.section)(setting), arguments.json)
    return 0


def _measurement(name: str) -> Callable[[Setting], report.Metrics]:
    """Imported late: a section that cannot be imported is the only one that fails."""
    if name == "letter_sort":
        from gpu_letter_sort import measure
    elif name == "train":
        from gpu_train import measure
    elif name == "generate":
        from gpu_generate import measure
    elif name == "publish":
        from gpu_publish import measure
    else:
        from gpu_generate import measure_sglang as measure
    return measure


def start_section(
    name: str, arguments: argparse.Namespace, device: str
) -> dict[str, tuple[float, str]]:
    """Runs one section in a process of its own; what is left of it at its limit is killed."""
    limit_s = limit_of(name, arguments.quick)
    print(f"\n{time.strftime('%H:%M:%S')} {name}: at most {limit_s:.0f} s", flush=True)
    # all that the section leaves goes with the folder, also when it is killed
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--section", name, "--device", device]
        command += ["--json", str(result), "--sglang-python", arguments.sglang_python]
        command += ["--quick"] if arguments.quick else []
        started = time.monotonic()
        environment = {**os.environ, "TMPDIR": folder}
        child = subprocess.Popen(command, start_new_session=True, env=environment)
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"{name}: its {limit_s:.0f} s are up", flush=True)
            status = TIMED_OUT
        finally:
            _kill_session(child)
        content = json.loads(result.read_text()) if result.is_file() else {}
    metrics = {key: (entry["value"], entry["unit"]) for key, entry in content.items()}
    metrics[f"{name}_status"] = (float(status), "code")
    metrics[f"{name}_section_s"] = (time.monotonic() - started, "s")
    return metrics


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """The section and whatever it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(main())
