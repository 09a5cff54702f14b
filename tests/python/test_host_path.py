# SPDX-License-Identifier: Apache-2.0
"""Collectives of emulated GPU tensors in host memory: small ones, all where kernels do not compile, and failures."""

from __future__ import annotations

from test_processes import finish, launch

VALUES = """
    import torch.distributed as dist
    for numel in (1, 1000, 70000, 400000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            parts = [((torch.arange(numel) + 3 * r) % 11).to(dtype) for r in range(size)]
            wide = torch.stack(parts).to(torch.float64)
            want = wide.any(0) if dtype is torch.bool else wide.sum(0).to(dtype)
            x = parts[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, want), (numel, dtype)
            out = torch.empty(size * numel, dtype=dtype)
            dist.all_gather_into_tensor(out, parts[rank])
            assert torch.equal(out, torch.cat(parts)), (numel, dtype)
            block = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(block, torch.cat([parts[rank]] * size))
            assert torch.equal(block, want), (numel, dtype)
            rows = torch.empty(size * numel, dtype=dtype)
            dist.all_to_all_single(rows, torch.cat([parts[rank]] * size))
            assert torch.equal(rows, torch.cat(parts)), (numel, dtype)
    one = torch.full((3,), 5.0)
    alone = [dist.new_group([r]) for r in range(size)][rank]
    dist.all_reduce(one, op=dist.ReduceOp.AVG, group=alone)
    assert one[0] == 5.0
    print("right", flush=True)
    dist.destroy_process_group()
"""


def emulated(body: str, size: int, **extra: str) -> list[tuple[int, str, str]]:
    vendors = ",".join("cuda" if r < (size + 1) // 2 else "hip" for r in range(size))
    return finish(launch(body, size=size, GPUBRIDGE_EMULATE=vendors, GPUBRIDGE_ISLAND="", **extra))


def check(results: list[tuple[int, str, str]]) -> None:
    for code, out, err in results:
        assert code == 0 and "right" in out, err[-3000:]


def test_no_compiler_on_one_vendor() -> None:
    """hipRTC fails: its ranks say so once, and all ranks of the group add in host memory, to the same values."""
    results = emulated(VALUES, 4, GBEMU_FAIL="hiprtcCompileProgram:0:6")
    check(results)
    for rank, (_, _, err) in enumerate(results):
        assert err.count("sums are made in host memory") == (1 if rank >= 2 else 0), err[-3000:]


def test_everything_small_and_nothing_small() -> None:
    check(emulated(VALUES, 3, GPUBRIDGE_HOST_BYTES="1G"))
    check(emulated(VALUES, 3, GPUBRIDGE_HOST_BYTES="0"))


def test_models_with_shared_hardware_queues() -> None:
    """The streams of several groups on four (AMD) and eight (NVIDIA) hardware queues, launched in different orders."""
    body = """
    groups = [dist.new_group(list(range(size))) for _ in range(5)]
    x = {(i, k): torch.full((n,), float(rank + i)) for i in range(5) for k, n in enumerate((10, 50000, 300000))}
    order = list(x)
    if rank % 2:
        order.reverse()
    for k in range(3):
        works = [dist.all_reduce(x[i, j], group=groups[i], async_op=True) for i, j in order if j == k]
        for work in works:
            work.wait()
    for (i, k), t in x.items():
        assert (t == sum(r + i for r in range(size))).all(), (i, k)
    print("right", flush=True)
    dist.destroy_process_group()
    """
    check(emulated(body, 2, GBEMU_PROFILE="H200,MI300X"))
    check(emulated(body, 2, GBEMU_PROFILE="V100,MI210", GPUBRIDGE_HOST_BYTES="0"))


def test_failure_leaves_nan_not_half_a_result() -> None:
    """A rank dies under an operation: the survivor raises, and its tensor, copied out already, is NaN."""
    body = """
    x = torch.full((30000,), 7.0)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["issued"])
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, async_op=True)
    store.set("issued", "1")
    try:
        work.wait()
    except Exception as error:
        assert "rank 1" in str(error), error
        deadline = time.monotonic() + 20
        while not x.isnan().all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert x.isnan().all(), x
        print("right", flush=True)
    os._exit(0)
    """
    for host_bytes in ("auto", "0"):
        (code, out, err), _ = emulated(body, 2, GPUBRIDGE_HOST_BYTES=host_bytes)
        assert code == 0 and "right" in out, err[-3000:]
