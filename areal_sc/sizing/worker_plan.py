"""The workers that a run would start, and about how much memory each needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from areal_sc.config.schema import Dtype

HOST = "host"
GENERATING_ROLES = ("rollout", "server")

PROCESS_BYTES = 256 << 20
"""Host memory of a worker that has imported torch and transformers: measured 246 MiB, of which a
process forked after the imports shares more than half."""

DTYPE_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


@dataclass(frozen=True)
class WorkerPlan:
    """One process and its estimated memory, in bytes.

    Attributes:
        role: `train`, `rollout`, or `server` for one rank of an inference server.
        device: `cpu`, or `cuda:<n>`, numbered as this process sees them.
        parameter_bytes: parameters, and their gradients where they are trained.
        optimizer_bytes: optimizer state.
        gathered_bytes: of other ranks' parameters and gradients, at most in a training step.
        activation_bytes: of the largest micro-batch, logits included, at most in a training step.
        layer_input_bytes: what is kept in host memory of that micro-batch, beside a GPU.
        kv_bytes: KV cache when every slot is filled to the longest context; of a server
            all that it takes for it beforehand.
        picture_bytes: of pictures that it has seen, at most: so much of their pixels, in host
            memory, and so much of their features.
        store_bytes: most that the worker's tensor store holds; always in host memory.
        copy_bytes: of a snapshot or export while it is written, in host memory.
        snapshot_bytes: of its snapshots in the node's shared memory, where its store is, too.
        is_offloaded: what it has all the time lies in host memory, wherever it computes.
    """

    role: str
    index: int
    device: str
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    gathered_bytes: int = 0
    activation_bytes: int = 0
    layer_input_bytes: int = 0
    kv_bytes: int = 0
    picture_bytes: int = 0
    store_bytes: int = 0
    copy_bytes: int = 0
    snapshot_bytes: int = 0
    is_offloaded: bool = False

    @property
    def memory(self) -> dict[str, int]:
        """Bytes needed by place: `host`, or the name of a CUDA device."""
        needed = Counter({HOST: PROCESS_BYTES})
        for (place, _), num_bytes in self.parts.items():
            needed[place] += num_bytes
        return dict(needed)

    @property
    def parts(self) -> dict[tuple[str, str], int]:
        """Bytes by place and by what they are for, as the plan calls it; without the process."""
        parts = {
            (self.held_place, "parameters"): self.parameter_bytes,
            (self.held_place, "optimizer"): self.optimizer_bytes,
            (self.place, "gathered"): self.gathered_bytes,
            (self.place, "activations"): self.activation_bytes,
            (self.held_place, "KV cache"): self.kv_bytes,
            (HOST, "store up to"): self.store_bytes,
            (HOST, "snapshots"): self.copy_bytes + self.snapshot_bytes,
        }
        if self.layer_input_bytes:
            parts[HOST, "activations"] = self.layer_input_bytes
        if self.picture_bytes:
            parts[HOST, "pixels"] = parts[self.place, "features"] = self.picture_bytes
        return parts

    @property
    def place(self) -> str:
        """Where it computes."""
        return HOST if self.device == "cpu" else self.device

    @property
    def held_place(self) -> str:
        """Where that is which it has all the time."""
        return HOST if self.is_offloaded else self.place

    @property
    def generates(self) -> bool:
        return self.role in GENERATING_ROLES

    @property
    def held_bytes(self) -> int:
        """What it has all the time."""
        return self.parameter_bytes + self.optimizer_bytes + self.kv_bytes


@dataclass(frozen=True)
class RunPlan:
    """The workers of a run and the memory that they are going to share.

    Attributes:
        available_bytes: memory of each place; None where it is unknown.
        takes_turns: workers that train and those that generate use a GPU one after the other.
        is_model_known: False when there is no model at `actor.path` yet, so that parameters and
            KV cache are counted as 0.
    """

    workers: tuple[WorkerPlan, ...]
    available_bytes: dict[str, int | None]
    is_model_known: bool
    takes_turns: bool = False

    @property
    def needed_bytes(self) -> dict[str, int]:
        """Bytes needed by place, all workers together."""
        training, generation = self.needed_by_sides
        if not self.takes_turns:
            return dict(training + generation)
        needed = {place: max(training[place], generation[place]) for place in training | generation}
        # what training has on GPUs is in host memory while generation has its turn
        trainers = (it for it in self.workers if not it.generates and it.held_place != HOST)
        needed[HOST] = training[HOST] + generation[HOST] + sum(it.held_bytes for it in trainers)
        return needed

    @property
    def needed_by_sides(self) -> tuple[Counter[str], Counter[str]]:
        sides = Counter[str](), Counter[str]()
        for worker in self.workers:
            sides[worker.generates].update(worker.memory)
        return sides

    @property
    def fits(self) -> bool:
        return not self.short_places

    @property
    def short_places(self) -> list[str]:
        """Places whose known memory is less than what is needed."""
        known = {place: count for place, count in self.available_bytes.items() if count is not None}
        needed = self.needed_bytes
        return [place for place in needed if needed[place] > known.get(place, needed[place])]

    def largest_part(self, place: str) -> tuple[str, str, int]:
        """What needs most of a place: the role, what it is for, and bytes of all its workers."""
        parts: Counter[tuple[str, str]] = Counter()
        for worker in self.workers:
            for (at, what), num_bytes in worker.parts.items():
                parts[worker.role, what] += num_bytes if at == place else 0
        (((role, what), num_bytes),) = parts.most_common(1)
        return role, what, num_bytes

    def lines(self) -> list[str]:
        """The plan as text, one line a worker and one a place."""
        names = dict.fromkeys(what for worker in self.workers for _, what in worker.parts)
        heads = "".join(f"{name:>12}" for name in names)
        lines = [f"{'worker':<12}{'device':<8}{heads}"]
        for worker in self.workers:
            by_use = Counter[str]()
            for (_, what), num_bytes in worker.parts.items():
                by_use[what] += num_bytes
            cells = (f"{format_bytes(by_use[name]):>12}" for name in names)
            lines.append(f"{f'{worker.role}/{worker.index}':<12}{worker.device:<8}{''.join(cells)}")
        for place, needed in sorted(self.needed_bytes.items()):
            available = self.available_bytes.get(place)
            of = "an unknown amount" if available is None else format_bytes(available)
            short = " TOO LITTLE" if place in self.short_places else ""
            lines.append(f"{place}: needs about {format_bytes(needed)} of {of}{short}")
        lines.append("not counted: what CUDA and libraries take for themselves")
        if not self.is_model_known:
            lines.append("not counted: the model, which is not there yet")
        return lines


def format_bytes(count: int) -> str:
    """`1.5 GiB`, in the largest unit that leaves at least 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
