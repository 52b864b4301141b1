"""Each private name of torch that the engine needs is still there and does what parallel/torch_private.py says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ultrascale.kernels import float8_gemm
from ultrascale.launch import local
from ultrascale.parallel import torch_private as private

LENGTH = 4


def test_many_tensors_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in private.foreach_norm(tensors)] == [5.0, 2.0]
    private.foreach_mul_(tensors, 2.0)
    assert tensors[1].item() == 4.0
    private.foreach_copy_(tensors, [torch.zeros(2), torch.ones(1)])
    assert [tensor.sum().item() for tensor in tensors] == [0.0, 1.0]


def test_a_running_profiler_is_detected() -> None:
    assert not private.is_profiling()
    with torch.profiler.profile():
        assert private.is_profiling()
    assert not private.is_profiling()


def test_a_forward_in_backward_is_detected() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.in_backward())
        return x * x

    torch.utils.checkpoint.checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not private.in_backward()


def test_a_tensor_has_one_storage_object() -> None:
    """Live memory and selective recomputation compare storages by identity, of real tensors and of fake ones."""
    for mode in (None, private.FakeTensorMode()):
        with mode or torch.no_grad():
            x, other = torch.empty(LENGTH), torch.empty(LENGTH)
            assert x.untyped_storage() is x[1:].untyped_storage()
            assert x.untyped_storage() is not other.untyped_storage()
            assert isinstance(x, private.FakeTensor) == (mode is not None)
            with private.unset_fake_temporarily():
                assert not isinstance(torch.empty(LENGTH), private.FakeTensor)


def test_a_dispatch_mode_sees_operators_and_can_call_another() -> None:
    """Selective recomputation hands operators on to the modes that torch makes."""
    called = []

    class Mode(private.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert torch.ops.aten.mm.default in called
    for mode in create_selective_checkpoint_contexts([torch.ops.aten.mm.default]):  # type: ignore[no-untyped-call]
        assert callable(mode.__torch_dispatch__)
        assert mode.ignore_compile_internals() is True


def test_the_offset_of_a_tensor_in_a_checkpoint() -> None:
    place = private.StorageInfo("__0_0.distcp", 8, LENGTH)
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 8, LENGTH)
    # Our reader verifies checksums in this method.
    assert list(inspect.signature(FileSystemReader._slice_file).parameters) == ["self", "file", "sinfo"]


def test_a_store_without_peers() -> None:
    assert isinstance(private.fake_store(), dist.Store)
    assert callable(private.in_kernel_invocation_manager)


def test_a_fake_tensor_from_a_meta_tensor() -> None:
    with private.FakeTensorMode():
        vars_of = vars(torch.empty(LENGTH))
    meta, cpu = torch.empty(LENGTH, device="meta"), torch.device("cpu")
    fake = private.make_subclass(private.FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=cpu)
    vars(fake).update(vars_of)
    assert (fake.shape, fake.device) == (meta.shape, cpu)


def test_the_memory_recorder_has_the_same_arguments() -> None:
    assert {"enabled", "stacks", "max_entries"} <= set(inspect.signature(private.record_memory_history).parameters)
    assert "device" in inspect.signature(private.memory_snapshot).parameters


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch multiplies fp8 on a GPU")
def test_fp8_matmuls() -> None:
    left, right = (float8_gemm.quantise(torch.ones(16, 16, device="cuda"), "tensor", float8_gemm.E4M3) for _ in range(2))
    assert float8_gemm.multiply(left, right, torch.bfloat16)[0, 0].item() == 16.0


def in_a_group(rank: int, nproc: int, store: str) -> str:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    assert work is not None
    name = private.op_name(work)
    work.wait()
    _ddp(rank)
    _fsdp(rank, nproc)
    _gathered_in_place(nproc)
    dist.destroy_process_group()
    return name


def _ddp(rank: int) -> None:
    """Without a sync in forward, a prepared backward reduces."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp.require_backward_grad_sync = False
    out = ddp(torch.full((1, 1), float(rank)))
    private.prepare_ddp_backward(ddp)
    out.sum().backward()
    assert ddp.module.weight.grad.item() == 0.5


def _fsdp(rank: int, nproc: int) -> None:
    model = nn.Sequential(*(nn.Linear(LENGTH, LENGTH, bias=False) for _ in range(2)))
    mesh = init_device_mesh("cpu", (nproc,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert private.fsdp_gathered_parameters(model) == []
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert private.local_tensor(weight).shape == (LENGTH // nproc, LENGTH)
    private.fsdp_begin_step(model)  # before the first forward there is nothing to forget
    for _ in range(2):
        model(torch.ones(1, LENGTH))
    groups = list(private.fsdp_param_groups(model))
    assert [len(group.fsdp_params) for group in groups] == [1, 1]
    assert all(len(group._post_forward_indices) == 2 for group in groups)
    private.fsdp_no_prefetch_beyond_first(model)
    assert groups[0]._post_forward_indices == [0, 0]
    private.fsdp_begin_step(model)
    assert not any(group._post_forward_indices for group in groups)
    assert len(private.fsdp_gathered_parameters(model)) == 2
    assert all(private.fsdp_unreduced(group) is None for group in groups)
    # Gradients that were computed outside a backward are reduce-scattered.
    model(torch.ones(1, LENGTH))
    model.unshard()  # type: ignore[operator]
    for parameter in private.fsdp_gathered_parameters(model):
        parameter.grad = torch.full_like(parameter, float(rank))
    private.fsdp_post_backward(model, [])
    for group in groups:
        (parameter,) = group.fsdp_params
        gradient = parameter.sharded_param.grad.to_local()
        assert gradient.shape == (LENGTH // nproc, LENGTH)
        assert gradient.unique().tolist() == [0.5]


def _gathered_in_place(nproc: int) -> None:
    """Shards are cast into the weights' own memory, uneven ones too; a second gather leaves the version as it was."""
    torch.manual_seed(0)
    layer = nn.Linear(LENGTH, LENGTH - 1)
    whole = [parameter.detach().clone() for parameter in layer.parameters()]
    fully_shard(layer, mesh=init_device_mesh("cpu", (nproc,)))
    parts = []

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        parts.append([target.untyped_storage().data_ptr() for target in targets])
        private.foreach_copy_(targets, sources)

    private.fsdp_gather_in_place(layer, copy)
    versions = []
    for _ in range(2):
        layer.unshard()  # type: ignore[operator]
        assert all(torch.equal(found, wanted) for found, wanted in zip(layer.parameters(), whole, strict=True))
        assert parts.pop() == [found.untyped_storage().data_ptr() for found in layer.parameters()]
        versions.append(layer.weight._version)
        layer.reshard()  # type: ignore[operator]
    assert versions[0] == versions[1]
    assert not parts


def test_private_attributes_of_ddp_fsdp_and_gloo() -> None:
    assert local.run(in_a_group, 2, timeout_s=120) == ["ALLREDUCE", "ALLREDUCE"]


def test_what_rehearsals_of_other_programs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", list)
    monkeypatch.setattr(optimizer, "_foreach_supported_types", [])
    private.foreach_on_cpu()
    assert optimizer._default_to_fused_or_foreach([torch.ones(1)], False) == (False, False)  # of the type that was added only
    with private.FakeTensorMode():
        assert optimizer._default_to_fused_or_foreach([torch.ones(1)], False) == (False, True)
        with pytest.raises(private.DataDependentOutputException):
            torch.ones(2).sum().item()
        with pytest.raises(private.DynamicOutputShapeException):
            torch.ones(2).nonzero()
    assert all(callable(getattr(private.ShardingPropagator, name)) for name in private.SHARDING_PROPAGATION)
    called = []
    weight = torch.ones(2, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        called.append(str(private.in_backward()))
        private.after_backward(lambda: called.append("end"))

    weight.register_hook(hook)
    weight.sum().backward()
    assert called == ["True", "end"]
    assert not private.in_backward()
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    assert private.resolve_group(dist.group.WORLD.group_name) is dist.group.WORLD
    dist.destroy_process_group()


def test_a_norm_is_one_operator() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.rand(8, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = nn.functional.rms_norm(x, (8,), weight, 1e-5)
        return (out, *torch.autograd.grad(out.square().sum(), (x, weight)))

    plain = gradients()
    registered = private.fused_rms_norm_on_cpu()
    try:
        assert nn.functional.rms_norm(x, (8,), weight).grad_fn.name() == "FusedRmsNormBackward0"
        torch.testing.assert_close(gradients(), plain)
    finally:
        registered._destroy()
        private.fused_rms_norm_on_cpu.cache_clear()


def test_a_partition_without_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import partitioners

    plain = inspect.signature(partitioners.functionalize_rng_ops)
    monkeypatch.setattr(partitioners, "functionalize_rng_ops", None)
    private.recompute_with_any_random_state()
    assert list(inspect.signature(partitioners.functionalize_rng_ops).parameters) == list(plain.parameters)
    assert "functionalize_rng_ops" in partitioners.min_cut_rematerialization_partition.__code__.co_names


def test_collectives_are_coalesced_by_one_function() -> None:
    """A rehearsal replaces it, wherever it was imported."""
    assert torch.distributed._coalescing_manager is private.coalescing_manager
    assert torch.distributed.batch_isend_irecv.__globals__["_coalescing_manager"] is private.coalescing_manager
