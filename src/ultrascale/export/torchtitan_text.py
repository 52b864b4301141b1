"""torchtitan's files as text: TOML for 0.2, a Python module for 0.3; the latter is read as a syntax tree and never run."""

from __future__ import annotations

import ast
import tomllib
from typing import Any

from ultrascale.export import header
from ultrascale.export.common import File
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

MODULE, FUNCTION = "ultrascale_config.py", "plan"
NOTHING = "none"  # how a None of a Python configuration is read
_DATA = "Data is torchtitan's own c4_test: name yours, and the folder of your tokenizer."
_SECTIONS = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
_SECTIONS |= {"ActivationCheckpointConfig": "activation_checkpoint"}  # before 0.3
_FP8_GATHER = "enable_fsdp_float8_all_gather"
_FAMILIES = ("llama3", "qwen3", "deepseek_v3")
_MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def toml_files(job: Job, layout: Layout, settings: dict[str, dict[str, Any]], comments: list[str]) -> tuple[File, ...]:
    groups = {name: dict(group) for name, group in settings.items() if name != "float8"}
    if settings["float8"]["enable"]:
        groups["model"]["converters"] = ["quantize.linear.float8"]
    groups["training"]["dataset"] = "c4_test"
    if layout.recompute == "selective":
        groups["activation_checkpoint"]["selective_ac_option"] = "op"
    lines = [header.commented("torchtitan 0.2 (TOML)", comments, _DATA)]
    for name, group in groups.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in group.items()]
        lines.append("")
    return (File("config.toml", "\n".join(lines)),)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)  # no text here has a quote in it


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where} is not TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    except RecursionError:
        raise SpecError(f"{where} is nested too deeply: expected groups of settings") from None


_TEMPLATE = """{head}from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{converter_import}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
{recompute_import}from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{module} import model_registry
from torchtitan.trainer import Trainer


def {function}() -> Trainer.Config:
    model_spec = model_registry({flavor!r}{backend}{converters})
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        ),
        model_spec=model_spec,
        hf_assets_path="./tests/assets/tokenizer",
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=default_adamw(lr={lr!r}),
        lr_scheduler=LRSchedulersContainer.Config({lr_scheduler}),
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compiled}),
    )
"""


def python_files(job: Job, layout: Layout, settings: dict[str, dict[str, Any]], comments: list[str]) -> tuple[File, ...]:
    eight = settings["float8"]["enable"]
    parallelism = dict(settings["parallelism"])
    backend = parallelism.pop("expert_parallel_comm_backend", None)
    block = {"full": "FullAC", "selective": "SelectiveAC"}.get(layout.recompute)
    text = _TEMPLATE.format(
        head=header.commented("torchtitan 0.3 (Python)", comments, _DATA),
        converter_import="from torchtitan.components.quantization import Float8LinearConverter\n" if eight else "",
        recompute_import=f"from torchtitan.distributed.activation_checkpoint import {block}\n" if block else "",
        module=settings["model"]["name"],
        flavor=settings["model"]["flavor"],
        function=FUNCTION,
        backend=f", moe_comm_backend={backend!r}" if backend not in (None, "standard") else "",
        converters=", converters=[Float8LinearConverter.Config(model_compile_enabled=True)]" if eight else "",
        lr=settings["optimizer"]["lr"],
        lr_scheduler=", ".join(f"{name}={value!r}" for name, value in settings["lr_scheduler"].items()),
        training=_arguments(settings["training"]),
        parallelism=_arguments(parallelism),
        recompute=f"{block}.Config()" if block else "None",
        compiled=settings["compile"]["enable"],
    )
    return (File(MODULE, text),)


def _arguments(group: dict[str, Any]) -> str:
    return "\n".join(f"            {name}={None if value == NOTHING else value!r}," for name, value in group.items())


def parse_python(text: str, where: str) -> dict[str, dict[str, Any]]:
    """The settings that calls of torchtitan's classes give as plain values."""
    file, _, function = where.partition(":")
    try:
        found = _collected(_chosen(ast.parse(text), file, function), function)
    except SpecError:
        raise
    except SyntaxError as error:
        raise SpecError(f"{where} is not Python: {error.msg} at line {error.lineno}") from None
    except (ValueError, RecursionError, MemoryError):
        raise SpecError(f"{where} is not Python that can be read: expected a module with a configuration") from None
    if "parallelism" not in found and "training" not in found:
        raise SpecError(f"{where} holds no configuration of torchtitan: expected TrainingConfig(…) or ParallelismConfig(…)")
    return found


def _chosen(tree: ast.Module, file: str, function: str) -> ast.Module:
    """The module with one of its configurations: the one of that name, or the only one."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _configures(node)]
    names = [node.name for node in found]
    if function and function not in names:
        known = ", ".join(names[:20])
        raise SpecError(f"{file} has no configuration '{function:.60}' with settings of its own: it has {known:.400}")
    if len(names) > 1 and not function:
        raise SpecError(f"{file} has {len(names)} configurations: name one, such as {file}:{names[0]:.60}")
    others = [node for node in tree.body if node not in found or node.name == (function or names[0])]
    return ast.Module(body=others, type_ignores=[])


def _configures(node: ast.FunctionDef) -> bool:
    calls = (ast.unparse(one.func).split(".")[-1] for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(name in ("TrainingConfig", "ParallelismConfig") for name in calls)


def _collected(tree: ast.Module, function: str) -> dict[str, dict[str, Any]]:
    """Where models come from a module beside the file, the function's name says which: `llama3_8b`."""
    found: dict[str, dict[str, Any]] = {"activation_checkpoint": {"mode": "selective"}}
    family = next((one for one in _FAMILIES if function.startswith(one)), None)
    if family is not None:
        found["model"] = {"name": family}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models."):
            if any(alias.name == "model_registry" for alias in node.names):
                found.setdefault("model", {})["name"] = str(node.module).split(".")[2]
        elif isinstance(node, ast.Call):
            _call(node, found)
        elif isinstance(node, ast.keyword) and node.arg == "activation_checkpoint" and _is_none(node.value):
            found["activation_checkpoint"]["mode"] = "none"
    return found


def _call(node: ast.Call, found: dict[str, dict[str, Any]]) -> None:
    name = ast.unparse(node.func)
    first, last = name.split(".")[0], name.split(".")[-1]
    if last in _SECTIONS:
        group = found.setdefault(_SECTIONS[last], {})
        for keyword in node.keywords:
            if keyword.arg is not None:
                group[keyword.arg] = _plain(keyword.value)
    elif first in _MODES and last == "Config":
        found["activation_checkpoint"]["mode"] = _MODES[first]
    elif last == "model_registry" and node.args and isinstance(node.args[0], ast.Constant):
        found.setdefault("model", {})["flavor"] = node.args[0].value
        for keyword in node.keywords:
            if keyword.arg == "moe_comm_backend":
                found.setdefault("parallelism", {})["expert_parallel_comm_backend"] = _plain(keyword.value)
    elif first == "Float8LinearConverter":
        given = {keyword.arg: _plain(keyword.value) for keyword in node.keywords}
        found["float8"] = {"enable": True, _FP8_GATHER: given.get(_FP8_GATHER, False)}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _plain(node: ast.expr) -> Any:
    """A literal; what a program computes stays as its text, which no number is read from."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.unparse(node)
    return NOTHING if value is None else value
