"""Watch a training program from outside: its steps, the owners of its memory, its FLOPs and collectives.

A step lasts from the end of one `optimizer.step()` to the end of the next, of the optimizer that steps first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ultrascale.measure.rehearse_tracker import OperatorCounter
from ultrascale.measure.rehearse_world import QuickFakeTensorMode
from ultrascale.parallel.torch_private import (
    SHARDING_PROPAGATION,
    ShardingPropagator,
    fsdp_gathered_parameters,
    fsdp_kept_gradients,
    in_backward,
)
from ultrascale.train.memory import UNLABELLED

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
GROUPS = {
    "default_pg": "world",
    "undefined": "group",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep and tp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert tp",
    "EXPERT_DATA_PARALLEL_GROUP": "expert dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
}
"""what torch and megatron-core call groups"""
AFTER_BACKWARD = "after backward"
"""until the next module runs or the optimizer steps: norms, and gradients that are reduced late"""


class Watcher(OperatorCounter):  # type: ignore[no-untyped-call]
    def __init__(self, fake: QuickFakeTensorMode | None, steps: int, done: Callable[[Watcher], None]) -> None:
        """Calls `done` at the end of the last of `steps` steps, which is the one that is counted."""
        super().__init__(fake)
        if fake is not None:
            for name in SHARDING_PROPAGATION:
                setattr(ShardingPropagator, name, self._unwatched(getattr(ShardingPropagator, name), fake))
        self.steps, self.done, self.completed = steps, done, 0
        self.optimizers: dict[int, Optimizer] = {}
        self._optimized: dict[int, Tensor] = {}
        """parameters of optimizers when they step: DeepSpeed takes them away in between"""
        self.phase, self._after_backward = "", False
        self.steps_by_hand = False
        """the program says when a step ends, rather than its optimizer"""
        self.step_s: float | None = None
        """on a real GPU"""
        self._names: dict[int, str] = {}
        self._hooked: set[int] = set()
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        self._hook_modules()
        fsdp_kept_gradients(lambda gradient: self.track([gradient], "gradients"))

    def _hook_modules(self) -> None:
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave)

    def _unwatched(self, inner: Callable[..., Any], fake: QuickFakeTensorMode) -> Callable[..., Any]:
        """DTensor runs operators on whole shapes, only to know the shape of their result."""

        def outer(*args: Any, **kwargs: Any) -> Any:
            watcher, fake.watcher = fake.watcher, None
            try:
                return inner(*args, **kwargs)
            finally:
                fake.watcher = watcher

        return outer

    def technique_of(self, group: dist.ProcessGroup) -> str:
        """The axis of a DeviceMesh, or what its creator calls the group."""
        name = str(group.group_desc)
        return GROUPS.get(name, name.removeprefix("mesh_"))

    def where(self, place: int | None) -> str:
        if self.phase:
            return self.phase
        if in_backward():
            self._after_backward = True
            return "backward"
        return AFTER_BACKWARD if self._after_backward else "forward"

    @property
    def moment(self) -> str:
        at = self.peak_position
        return f"{at.phase}, {at.layer}" if at.layer and at.phase not in ("optimizer", AFTER_BACKWARD) else at.phase

    @property
    def position(self) -> Any:
        return super().position._replace(phase=self.where(None))

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.phase = "optimizer"
        self.optimizers.setdefault(id(optimizer), optimizer)
        self._optimized |= {id(one): one for group in optimizer.param_groups for one in group["params"]}

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.phase, self._after_backward = "", False
        if not self.steps_by_hand and id(optimizer) == next(iter(self.optimizers)):
            self.end_step()

    def end_step(self) -> None:
        self.completed += 1
        self._end_step()

    def _end_step(self) -> None:
        if self.completed == self.steps:
            self.done(self)
        elif self.completed == self.steps - 1:
            self._begin_step()

    def _begin_step(self) -> None:
        gc.collect()
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        self._name(modules)
        for tracked in list(self._tracked.values()):
            if tracked.owner == UNLABELLED:  # it outlives the step
                self.track_storage(tracked(), "buffers")  # type: ignore[arg-type]
        parameters = {id(one): one for module in modules for one in module.parameters(recurse=False)}
        parameters |= cast(dict[int, nn.Parameter], self._optimized)
        shards = [getattr(one, "ds_tensor", None) for one in parameters.values()]  # DeepSpeed's, of ZeRO-3
        parameters |= {id(one): one for one in shards if one is not None}
        for root in modules:
            if isinstance(root, FSDPModule):
                for gathered in _gathered(cast(nn.Module, root)):
                    parameters.pop(id(gathered), None)
                    self.track([gathered], "buffers")
                    self._label_gradient(gathered, "buffers")
        self.track(parameters.values(), "parameters")
        for parameter in parameters.values():
            self._label_gradient(parameter, "gradients")
        sums = [getattr(one, "main_grad", None) for one in parameters.values()]  # megatron-core's gradients
        self.track([one for one in sums if one is not None], "gradients")
        for optimizer in self.optimizers.values():
            self.track(_tensors_of(list(optimizer.state.values())), "optimizer")
        self.flops.clear()
        self.calls.clear()
        self.most.clear()
        self.reset_peak()

    def _label_gradient(self, parameter: Tensor, owner: str) -> None:
        def label(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.track([parameter.grad], owner)

        label(parameter)
        if parameter.requires_grad and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(label)  # type: ignore[no-untyped-call]

    def _name(self, modules: list[nn.Module]) -> None:
        """Names of layers: the elements of a model's lists, and its other direct parts."""
        inner = {id(child) for module in modules for child in module.children()}
        for root in (module for module in modules if id(module) not in inner):
            found = dict(root.named_modules())
            top = root
            while len(children := list(top.children())) == 1 and not isinstance(children[0], (nn.ModuleList, nn.ModuleDict)):
                top = children[0]
            parts = {id(child) for child in top.children()}
            lists = [one for one in found.values() if isinstance(one, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
            parts |= {id(child) for one in lists for child in one.children()}
            for name, module in found.items():
                if id(module) in parts:
                    for wrapper in WRAPPERS:
                        name = name.replace(wrapper, "")
                    self._names.setdefault(id(module), name)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not in_backward():  # where it recomputes
            self._after_backward = False
        name = self._names.get(id(module))
        if name is not None:
            self.layer = name

    def _leave(self, module: nn.Module, _: Any, out: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return

        def back(_: Tensor) -> None:
            self.layer = name

        for tensor in _tensors_of(out):
            if tensor.requires_grad:
                tensor.register_hook(back)  # type: ignore[no-untyped-call]
                return


def _gathered(module: nn.Module) -> list[nn.Parameter]:
    try:
        return fsdp_gathered_parameters(module)
    except AttributeError:  # no root, or not yet run
        return []


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_of(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_of(one)
