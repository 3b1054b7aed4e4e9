"""A program written for CUDA, with what people use of it; prints "passed" on each rank. It names no CPU."""

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=4)], key=["n"])
@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, 2 * tl.load(x))


def raises(text, fn):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        fn()


def devices():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 2
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.total_memory > 0
    assert properties.multi_processor_count > 0
    x = torch.randn(4, 4, device="cuda:1")
    assert x.is_cuda
    assert x.device == torch.device("cuda", 1)
    assert isinstance(x.device, torch.device)
    assert torch.empty_like(torch.ones(2), device="cuda:1", dtype=torch.float64).is_cuda
    host = x.cpu()
    x.add_(1)
    assert not torch.equal(host, x)  # a copy, as on a GPU
    w = torch.nn.Parameter(torch.ones(3).cuda())
    assert w.to("cuda") is w
    assert torch.zeros(2, pin_memory=True).pin_memory().is_pinned()
    assert torch.randn(2, generator=torch.Generator(device="cuda"), device="cuda").cuda().get_device() >= 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0


def streams_and_amp():
    stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(4, 4, device="cuda")
    start.record()
    with torch.cuda.stream(stream):
        y = x @ x
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert torch.Stream("cuda").query()
    assert torch.Event(device="cuda:0", enable_timing=True).query()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        y = y * 1
    assert start.elapsed_time(end) >= 0
    model = torch.nn.Linear(4, 4).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(y)
    assert out.dtype is torch.bfloat16
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert float(torch.compile(lambda t: (t * 2).sum())(torch.ones(8, device="cuda"))) == 16


def operators():
    torch.library.define("on_cpu_test::double", "(Tensor x) -> Tensor")
    torch.library.impl("on_cpu_test::double", "cuda", lambda x: 2 * x)
    assert torch.ops.on_cpu_test.double(torch.ones(1, device="cuda")) == 2

    @torch.library.custom_op("on_cpu_test::triple", mutates_args=(), device_types="cuda")
    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    assert triple(torch.ones(1, device="cuda")) == 3


def refusals():
    raises("torch.cuda.CUDAGraph", torch.cuda.CUDAGraph)
    raises("torch.cuda.graph:", lambda: torch.cuda.graph(None))
    raises("triton kernel double_kernel", lambda: double_kernel[(1,)](torch.ones(1), 1))
    raises("torch.cuda.set_device", lambda: torch.cuda.set_device(10_000))
    raises("torch.cuda.memory._record_memory_history", torch.cuda.memory._record_memory_history)
    raises("torch.cuda.get_device_properties", lambda: torch.cuda.get_device_properties(10_000))


def groups():
    import deep_ep

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    x = torch.full((2,), float(rank), device="cuda")
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [(size - 1) / 2] * 2
    gathered = torch.empty(size, 1, 2, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((1, 2), float(rank), device="cuda"))
    assert gathered[:, 0, 0].tolist() == list(range(size))
    codes = torch.full((size,), float(rank), device="cuda").to(torch.float8_e4m3fn)
    came = torch.empty_like(codes)
    dist.all_to_all_single(came, codes)
    assert came.float().tolist() == list(range(size))
    dist.barrier(device_ids=[rank])
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (size,))
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
    buffer = deep_ep.Buffer(mesh.get_group(), int(1e9))
    ids = torch.arange(8, device="cuda").view(8, 1) % size
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, size)
    rows = torch.randn(8, 64, device="cuda").bfloat16()
    recv, _, _, counts, handle, event = buffer.dispatch(
        rows, topk_idx=ids, topk_weights=torch.ones(8, 1, device="cuda"), num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert, is_token_in_rank=in_rank, async_finish=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert counts == [8]
    assert torch.equal(buffer.combine(recv, handle)[0], rows)
    print(deep_ep.__name__)


if __name__ == "__main__":
    for part in (devices, streams_and_amp, operators, refusals, *([groups] if "RANK" in os.environ else [])):
        part()
    sys.stdout.write("passed\n")  # one write, so that lines of ranks do not mix
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
