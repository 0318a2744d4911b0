"""What SGLang names but never uses when it serves text and pictures on a CPU.

SGLang imports packages for GPUs, videos and constrained output at the top of its files, some of
them gigabytes large. Here an import of one that is not installed gives a stand-in: it can be
imported to any depth, named, subclassed and used as a decorator. Whatever would *run* raises
NotImplementedError, so nothing is computed wrongly in silence.

A server is three processes. Each would import all of SGLang, which takes eleven seconds of a core.
Here two of them are forks of the first, which has imported it and has no threads yet, and of all
models only those of the tests.

`install.sh` puts this file beside SGLang with a `.pth` line that imports it, which Python does in
every process of that environment, also in those that the server spawns.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import multiprocessing.context
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODELS = {"llama", "qwen2", "qwen2_5_vl", "qwen3_moe"}
"""Modules of SGLang with the models that tests serve; it imports those of the others, too."""

ABSENT = frozenset(
    {
        "triton",  # kernels
        "sgl_kernel",
        "torchvision",  # images and sound
        "soundfile",
        "compressed_tensors",  # other weight and tokenizer formats
        "gguf",
        "sentencepiece",
        "xgrammar",  # constrained output, tools
        "jsonschema",
        "IPython",  # notebooks, request dumps
        "zstandard",
    }
)

KERNELS = (
    "fused_input_proj_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Of `sgl_kernel`, beside those that SGLang asks whether they are there."""

UNKNOWN = frozenset({"triton.knobs"})
"""Asked for, and done without where it is missing."""


def refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not installed: this environment serves on a CPU")


class Kernel:
    """A function that a kernel decorator has taken: it may be kept, not launched or called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid: Any) -> NoReturn:
        refuse(f"the compiler of kernel {self.__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the compiler of kernel {self.__name__}")


class Inert:
    """A value that is made while kernels are defined, and never looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def kernel_decorator(*args: Any, **settings: Any) -> Any:
    """Serves bare (`@jit`) and with settings (`@autotune(configs=...)`)."""
    if len(args) == 1 and not settings:
        if isinstance(args[0], Kernel):
            return args[0]
        if isinstance(args[0], types.FunctionType):
            return Kernel(args[0])
    return kernel_decorator


VALUES: dict[str, Any] = {
    "triton.jit": kernel_decorator,
    "triton.autotune": kernel_decorator,
    "triton.heuristics": kernel_decorator,
    "triton.Config": Inert,
    "triton.language.constexpr": Inert,
    "triton.cdiv": lambda numerator, denominator: -(numerator // -denominator),
    "triton.next_power_of_2": lambda number: 1 << max(number - 1, 0).bit_length(),
    "triton.runtime.cache.triton_key": lambda: "none",
    "triton.compiler.compiler.triton_key": lambda: "none",
    "triton.__version__": "0",
    "torchvision.__version__": "0",
}
"""Used while modules are imported, so these have to work."""


class StandInClass(type):
    """Of a class that can be named, subclassed and asked for members, not instantiated."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__module__}.{cls.__qualname__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"{cls.__module__}.{cls.__qualname__}")

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Request models may have a field of this type, as long as nobody sets it."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(lambda value: cls())


class StandIn(types.ModuleType):
    """A module, or a function: which of the two a lower-case name is cannot be told."""

    __path__: Sequence[str] = ()  # so that its submodules are asked of the finder, too

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if full_name in VALUES:
            value = VALUES[full_name]
        elif name.startswith("__") or full_name in UNKNOWN:
            raise AttributeError(full_name)
        elif name[0].isupper():
            value = StandInClass(name, (), {"__module__": self.__name__})
        else:
            value = importlib.import_module(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self.__name__)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        package = name.partition(".")[0]
        if package not in ABSENT or name in UNKNOWN:
            return None
        # `importlib.util.find_spec` means "is it installed?", and the answer is no; but
        # transformers names its image processors only where it finds torchvision.
        if package != "torchvision" and _is_asked_by_importlib_util():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            # or torch would compile with it
            from torch.utils import _triton

            _triton.has_triton_package = lambda: False
            _triton.has_triton = lambda *args, **kwargs: False
            _pin_nothing()
            _name_kernels()


def _name_kernels() -> None:
    """Modules of models that are not served here look for these while they are imported."""
    import torch

    for name in KERNELS:
        setattr(torch.ops.sgl_kernel, name, refuse)


def _pin_nothing() -> None:
    """Adapters pin host memory, which torch refuses where there is no GPU to copy it to."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **settings: Any) -> Any:
            return make(*args, **settings)

        return made

    torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, *args: tensor


def _is_asked_by_importlib_util() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


_models = Path(__file__).with_name("sglang") / "srt" / "models"
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
    sorted({path.stem for path in _models.glob("*.py")} - MODELS)
)
gc.set_threshold(50_000, 20, 20)  # imports make hardly any garbage, and take a fifth less time so
sys.meta_path.append(StandInFinder())  # at the end: what is installed is found first
multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
