"""Worker and script are killed between two turns of agents outside, which play on.

    python benchmarks/session_kills.py --json session_kills.json      100 kills
    python benchmarks/session_kills.py --quick

Four agents outside play five turns each, with the local engine. Between two turns SIGKILL hits the
rollout worker, the script, or both, in turns; after every second kill the agents ask the same again
before they go on. The program ends with an error unless each repeated call has the same answer,
each episode is one row that was trained once, its tokens and log-probabilities are those that its
agent was told, bit for bit, and nothing is left in the memory of the run.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import report
from episode_kills import chat_model
from integration.outside_kills import BOOKED, EPISODES_A_STEP, SETTINGS, OutsideKills, end_turns
from integration.run_process import tiny_run
from transformers import AutoTokenizer

NUM_TURNS = 5


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    arguments = report.parse(parser, kills=4)
    num_steps = -(-arguments.kills // (NUM_TURNS - 1))
    folder = Path(tempfile.mkdtemp(prefix="session-kills-"))
    try:
        model, memory = chat_model(folder), folder / "memory"
        end_turns(model, ">")
        settings = model / "config.json"
        sizes = json.loads(settings.read_text()) | {"max_position_embeddings": 256}
        settings.write_text(json.dumps(sizes))
        overrides = *SETTINGS, f"total_steps={num_steps}", f"transport.shared_memory={memory}"
        kills = OutsideKills(
            lambda: tiny_run(folder / "run", model, *overrides, script=BOOKED),
            NUM_TURNS,
            "1",
            memory,
        )
        run = kills.play(num_steps, cycle(["worker", "script", "both"]))
        kills.check(run, AutoTokenizer.from_pretrained(model))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = {
        "num_kills": float(len(kills.took_s)),
        "num_episodes": float(len(kills.ended)),
        "num_tokens": float(sum(len(it.texts) for it in kills.ended)),
        "median_pause_s": statistics.median(kills.took_s),
        "longest_pause_s": max(kills.took_s),
    }
    told = {"turns": NUM_TURNS, "episodes a step": EPISODES_A_STEP}
    report.print_records("Agents outside, killed between two turns", told, [], {(): record})
    report.write(record, arguments.json)


if __name__ == "__main__":
    main()
