"""torch.compile without a GPU: code is captured and partitioned as on one, and its kernels' buffers are counted.

Dynamo, AOTAutograd, Inductor's decompositions and its min-cut partitioner run as on a GPU: they decide what is saved for
backward and what is computed again. Instead of generated kernels, the graphs run operator by operator, and only buffers that
Inductor would allocate are counted:

- the result of an operator that it does not fuse (matmul, attention, collectives, complex numbers), and of a reduction;
- the result of a fused one that is an output of the graph or is read by an operator that is not fused. Other readers compute it
  again, so that they read its operands.

A fused operator writes into an operand of the same size that nothing reads later.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks

from ultrascale.measure.foreign.request import COMPILED, NOT_COMPILED
from ultrascale.measure.rehearse_world import QuickFakeTensorMode
from ultrascale.parallel.torch_private import (
    compile_with_inductor,
    fused_operators,
    recompute_with_any_random_state,
    unset_fake_temporarily,
)
from ultrascale.train.memory import tensors_in

OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""variables with which torch switches torch.compile off"""


def rehearse_compiled(fake: QuickFakeTensorMode, note: Callable[[str], Any]) -> None:
    """Replaces torch.compile in this process, unless the environment switches it off."""
    recompute_with_any_random_state()
    off = any(os.environ.get(name) == "1" for name in OFF)
    compile_with, backend = torch.compile, partial(_compile, fake)  # one backend: else each layer is captured anew

    @wraps(compile_with)
    def compile_here(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_here, **options)
        if off:
            note(NOT_COMPILED)
            return compile_with(model, **options)
        found: Any = compile_with(model, fullgraph=options.get("fullgraph", False), dynamic=False, backend=backend)
        if isinstance(model, nn.Module):  # whose hooks are called before the captured code begins
            found.forward = _without_global_hooks(found.forward, note)
            return found
        return _without_global_hooks(found, note, getattr(model, "__self__", None))

    torch.compile = compile_here


def _compile(fake: QuickFakeTensorMode, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    def without_kernels(graph: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[..., Any]:
        compiled = CompiledGraph(fake, graph)

        def run(args: list[Any]) -> Any:
            return compiled.run(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # its arguments come in a list, which it empties
        return run

    with unset_fake_temporarily():
        return cast(Callable[..., Any], compile_with_inductor(graph, inputs, without_kernels))


def _without_global_hooks(compiled: Callable[..., Any], note: Callable[[str], Any], module: Any = None) -> Callable[..., Any]:
    """The watcher's hooks of all modules are not captured; for `module`, whose call is compiled, they are called here."""
    before, after = hooks._global_forward_pre_hooks, hooks._global_forward_hooks

    @wraps(compiled)
    def outer(*args: Any, **kwargs: Any) -> Any:
        note(COMPILED)  # not before: modules compile functions that a program never calls
        held = dict(before), dict(after)
        before.clear()
        after.clear()
        try:
            if isinstance(module, nn.Module):
                for hook in held[0].values():
                    hook(module, args)
            result = compiled(*args, **kwargs)
            if isinstance(module, nn.Module):
                for hook in held[1].values():
                    hook(module, args, result)
            return result
        finally:
            before.update(held[0])
            after.update(held[1])

    return outer


class CompiledGraph:
    """A graph of Inductor's that is run operator by operator; see the module for what is counted."""

    def __init__(self, fake: QuickFakeTensorMode, graph: fx.GraphModule) -> None:
        self.fake, self.module = fake, graph
        self.nodes = list(graph.graph.nodes)
        self.is_fused, self.is_view = fused_operators()
        self.fused = {node for node in self.nodes if self._fused(node)}
        self.views = {node for node in self.nodes if self._view(node)}
        self.virtual = {node for node in self.fused if not _reduces(node) and not self._read_from_memory(node)}
        self.ends = self._ends()

    def _fused(self, node: fx.Node) -> bool:
        tensors = [node, *node.all_input_nodes]
        complex_numbers = any(one.is_complex() for each in tensors for one in _tensors(each))
        return self.is_fused(node) and not self._view(node) and not complex_numbers

    def _view(self, node: fx.Node) -> bool:
        return node.target is operator.getitem or self.is_view(node)

    def _read_from_memory(self, node: fx.Node) -> bool:
        return any(user not in self.fused and (user not in self.views or self._read_from_memory(user)) for user in node.users)

    def _ends(self) -> dict[fx.Node, list[fx.Node]]:
        """After each node, those whose value is not needed any more."""
        place = {node: index for index, node in enumerate(self.nodes)}
        last: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            uses = [place[node]]
            for user in node.users:
                later = user in self.virtual or (user in self.views and user.target is not operator.getitem)
                uses.append(last[user] if later else place[user])
            last[node] = max(uses)
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, index in last.items():
            found.setdefault(self.nodes[index], []).append(node)
        return found

    def run(self, args: list[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        given = iter([*args])
        args.clear()
        *nodes, output = self.nodes
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self.module)
            else:
                self._run(node, values)
            for one in self.ends.get(node, ()):
                values.pop(one, None)
        return fx.map_arg(output.args[0], values.__getitem__)

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target = cast(Callable[..., Any], node.target)
        if node not in self.fused:
            values[node] = target(*args, **kwargs)
            return
        with self._uncounted() as watcher:
            result = values[node] = target(*args, **kwargs)
        if node in self.virtual or watcher is None:
            return
        del args, kwargs
        self._write_in_place(node, values)
        for tensor in tensors_in(result):
            watcher.track_storage(tensor.untyped_storage())

    def _write_in_place(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Frees one operand of the result's size that nothing reads after this, with its views."""
        operands = [one for one in self.ends.get(node, ()) if one is not node and one not in self.virtual and one in values]
        for one in operands:
            if _storage_bytes(values[one]) == _storage_bytes(values[node]):
                freed = _storages(values[one])
                for alias in operands:
                    if _storages(values[alias]) <= freed:
                        del values[alias]
                return

    @contextmanager
    def _uncounted(self) -> Iterator[Any]:
        watcher, self.fake.watcher = self.fake.watcher, None
        try:
            yield watcher
        finally:
            self.fake.watcher = watcher


def _storage_bytes(value: Any) -> int:
    return sum(one.untyped_storage().nbytes() for one in tensors_in(value))


def _storages(value: Any) -> set[int]:
    return {id(one.untyped_storage()) for one in tensors_in(value)}


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    yield from tensors_in(node.meta.get("val"))


def _reduces(node: fx.Node) -> bool:
    results, operands = ([one.numel() for each in nodes for one in _tensors(each)] for nodes in ([node], node.all_input_nodes))
    return max(results, default=0) < max(operands, default=0)
