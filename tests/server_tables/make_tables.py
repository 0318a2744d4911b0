"""Writes what each supported version of SGLang and vLLM has: flags, routes, fields of requests.

    pip download --no-deps --dest wheels sglang==0.5.11 ... vllm==0.32.0
    python tests/server_tables/make_tables.py wheels

The wheels' sources are read, and nothing of them is run. `sglang.txt` and `vllm.txt` beside this
file hold names by the versions that have them; `tests/unit/engines/servers/test_server_tables.py`
looks there for all that is used.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple
from zipfile import ZipFile

HERE = Path(__file__).parent
_METHODS: Final = {"get", "post", "put", "delete", "patch", "api_route", "route"}


class Sources(NamedTuple):
    """Where a server has its names, in patterns of files; `*` goes through folders.

    Attributes:
        flags: classes whose fields are flags, and calls of `add_argument`.
        routes: decorators of routes.
        requests: classes of requests.
        classes: those of them whose fields are listed.
    """

    flags: tuple[str, ...]
    routes: tuple[str, ...]
    requests: tuple[str, ...]
    classes: tuple[str, ...]


SOURCES: Final = {
    "sglang": Sources(
        ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py"),
        ("sglang/srt/entrypoints/*.py",),
        ("sglang/srt/managers/io_struct.py", "sglang/srt/sampling/sampling_params.py"),
        (
            *("GenerateReqInput", "SamplingParams", "AbortReq", "PauseGenerationReqInput"),
            *("ContinueGenerationReqInput", "UpdateWeightVersionReqInput"),
            *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromTensorReqInput"),
            *("UpdateWeightsFromDistributedReqInput", "InitWeightsUpdateGroupReqInput"),
            *("DestroyWeightsUpdateGroupReqInput", "BeginWeightUpdateReqInput"),
            "EndWeightUpdateReqInput",
        ),
    ),
    "vllm": Sources(
        (
            "vllm/engine/arg_utils.py",
            "vllm/entrypoints/*cli_args.py",
        ),
        ("vllm/entrypoints/*.py",),
        ("vllm/sampling_params.py", "vllm/entrypoints/scale_out/token_in_token_out/protocol.py"),
        ("GenerateRequest", "SamplingParams"),
    ),
}


def modules(wheel: ZipFile, patterns: tuple[str, ...]) -> Iterator[ast.Module]:
    for name in sorted(wheel.namelist()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            yield ast.parse(wheel.read(name))


def fields_of(class_: ast.ClassDef) -> set[str]:
    """Its annotated names, and the arguments of its `__init__`."""
    found = set[str]()
    for node in class_.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return found - {"self"}


def classes(module: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))


def flags(wheel: ZipFile, sources: Sources) -> set[str]:
    found = set[str]()
    for module in modules(wheel, sources.flags):
        for class_ in classes(module):
            found |= fields_of(class_)
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                found.add(str(node.value)[2:].replace("-", "_"))
    return {name for name in found if name.isidentifier()}


def routes(wheel: ZipFile, sources: Sources) -> set[str]:
    found = set[str]()
    for module in modules(wheel, sources.routes):
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    first = call.args[0] if call.args else None
                    if call.func.attr in _METHODS and isinstance(first, ast.Constant):
                        found.add(str(first.value))
    return {name for name in found if name.startswith("/")}


def requests(wheel: ZipFile, sources: Sources) -> set[str]:
    """`Class.field`, with the fields of base classes in the same files."""
    own, bases = dict[str, set[str]](), dict[str, list[str]]()
    for module in modules(wheel, sources.requests):
        for class_ in classes(module):
            own[class_.name] = fields_of(class_)
            bases[class_.name] = [it.id for it in class_.bases if isinstance(it, ast.Name)]

    def whole(name: str) -> set[str]:
        return own.get(name, set()).union(*map(whole, bases.get(name, [])))

    return {f"{name}.{field}" for name in sources.classes for field in whole(name)}


READERS: Final = {"flags": flags, "routes": routes, "requests": requests}


def write_table(name: str, wheels: dict[str, Path]) -> None:
    """Groups of names, each below its kind and the versions that have them all."""
    versions = list(wheels)
    text = [f"# what {name} has; made by make_tables.py", f"versions: {' '.join(versions)}"]
    for kind, read in READERS.items():
        having: dict[str, list[str]] = defaultdict(list)
        for version, path in wheels.items():
            with ZipFile(path) as wheel:
                for found in sorted(read(wheel, SOURCES[name])):
                    having[found].append(version)
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for found, in_versions in sorted(having.items()):
            groups[tuple(in_versions)].append(found)
        for in_versions, names in sorted(groups.items(), key=lambda pair: -len(pair[0])):
            having_them = "all" if len(in_versions) == len(versions) else " ".join(in_versions)
            text += ["", f"{kind} of {having_them}:"]
            text += textwrap.wrap(
                " ".join(names), 100, break_long_words=False, break_on_hyphens=False
            )
    (HERE / f"{name}.txt").write_text("\n".join(text) + "\n")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.replace("post", "").split("."))


def main() -> None:
    folder = Path(sys.argv[1])
    for name in SOURCES:
        paths = {path.name.split("-")[1]: path for path in folder.glob(f"{name}-*.whl")}
        write_table(name, {version: paths[version] for version in sorted(paths, key=_order)})


if __name__ == "__main__":
    main()
