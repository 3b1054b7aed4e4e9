"""One rank's state in files of common savers, and whole experts that any number of ranks loads."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replicas.cases_replicas import backward, local, loss_of, mesh_of, net, whole
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.nn.parallel import DistributedDataParallel

from moe_rt.parallel import whole_state_dict

# The writer on rank 0, and the reader on every rank.
State = dict[str, Any]
SAVERS: dict[str, tuple[Callable[[nn.Module, str], Any], Callable[[nn.Module, str], State]]] = {
    "torch.save": (lambda m, path: torch.save(m.state_dict(), path), lambda m, path: torch.load(path)),
    "numpy": (
        lambda m, path: torch.save({k: v.detach().numpy() for k, v in m.state_dict().items()}, path),
        lambda m, path: {k: torch.from_numpy(v) for k, v in torch.load(path, weights_only=False).items()},
    ),
    "assign": (lambda m, path: torch.save(m.state_dict(), path), lambda m, path: torch.load(path, mmap=True)),
    "parameters": (
        lambda m, path: torch.save({k: p.detach().cpu().clone() for k, p in m.named_parameters()}, path),
        lambda m, path: torch.load(path),
    ),
    "safetensors": (lambda m, path: save_file(m.state_dict(), path), lambda m, path: load_file(path)),
    "full state dict": (
        lambda m, path: torch.save(get_model_state_dict(m, options=StateDictOptions(full_state_dict=True)), path),
        lambda m, path: torch.load(path),
    ),
}


def of_rank_0(group: Any, path: str, saver: str, over: str) -> bool:
    """Rank 0 gets back what it saved; the other rank raises, and keeps its weights."""
    save, load = SAVERS[saver]
    with net(mesh_of(group) if over == "mesh" else group, over != "bare") as model:
        wrapped = DistributedDataParallel(model) if over == "ddp" else model
        if group.rank() == 0:
            save(wrapped, path)
        dist.barrier()
        before = local(model.experts.down_proj)
        state = load(wrapped, path)
        if saver != "assign":
            with torch.no_grad():
                local_view(model.experts.down_proj).zero_()
        try:
            loading = model if saver == "full state dict" else wrapped
            loading.load_state_dict(state, strict=saver != "parameters", assign=saver == "assign")
        finally:
            after = local(model.experts.down_proj)
            assert torch.equal(after, before if group.rank() == 0 or saver == "assign" else torch.zeros_like(before))
    return True


def local_view(p: Any) -> torch.Tensor:
    return p.detach().to_local() if hasattr(p, "to_local") else p.detach()


def whole_states_of_a_loaded_optimizer(group: Any) -> bool:
    """States that were loaded from this rank's own file are whole before the next step marks them."""
    with net(group) as model:
        optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
        backward(model, group)
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        got, expected = (whole_state_dict(each)["state"] for each in (other, optimizer))
        return got.keys() == expected.keys() and all(
            torch.equal(value, got[at][name]) for at, state in expected.items() for name, value in state.items()
        )


def optimizer_of_rank_0(group: Any, path: str, over: str) -> None:
    """A loaded state of another rank is refused before the step, which changes nothing."""
    with net(group, over != "bare") as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        backward(model, group)
        optimizer.step()
        if group.rank() == 0:
            torch.save(optimizer.state_dict(), path)
        dist.barrier()
        other = torch.optim.AdamW(model.parameters(), lr=1e-2)
        other.load_state_dict(torch.load(path))
        before = local(model.experts.down_proj)
        try:
            other.step()
        except Exception:
            assert torch.equal(local(model.experts.down_proj), before)
            raise


def dcp_over_a_group(group: Any, path: str) -> None:
    with net(group) as model:
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        backward(wrapped, group)
        optimizer.step()

        def state() -> State:
            return dict(zip(("model", "optimizer"), get_state_dict(wrapped, optimizer), strict=True))

        dcp.save(state(), checkpoint_id=path)
        try:
            dcp.load(state(), checkpoint_id=path)
        except BaseException as error:  # a CheckpointException is not an Exception
            raise RuntimeError(str(error)) from None


def own_state_comes_back(group: Any, path: str) -> bool:
    """Every rank saves and loads a separate file, as some jobs do: optimizer, experts and all."""
    with net(group) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        backward(model, group)
        optimizer.step()
        mine = f"{path}-{group.rank()}"
        torch.save((model.state_dict(), optimizer.state_dict()), mine)
        weights, states = torch.load(mine)
        before = whole(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        optimizer.zero_grad()
        backward(model, group)
        optimizer.step()
        return all(before[name].shape == t.shape for name, t in whole(model).items())


def accelerated(group: Any, path: str, how: str) -> Any:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD
    from accelerate.state import AcceleratorState

    rank = str(group.rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )
    try:
        with net(group) as model:
            accelerator = Accelerator(cpu=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            wrapped, stepping = accelerator.prepare(model, optimizer)
            if how == "LocalSGD":
                with LocalSGD(accelerator, wrapped, 1, enabled=True) as local_sgd:
                    accelerator.backward(loss_of(wrapped, 0, group.rank(), 2))
                    local_sgd.step()
            accelerator.backward(loss_of(wrapped, 0, group.rank(), 2))
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            stepping.step()
            if how == "save_state":
                accelerator.save_state(path)
                accelerator.wait_for_everyone()
                if group.rank() == 1:
                    accelerator.load_state(path)
                return True
            before = whole(model)
            file = Path(path) / "whole.pt"
            state = {"model": whole_state_dict(model), "optimizer": whole_state_dict(stepping)}
            accelerator.save(state, file)
            accelerator.wait_for_everyone()
            loaded = torch.load(file)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            accelerator.unwrap_model(wrapped).load_state_dict(loaded["model"])
            stepping.load_state_dict(loaded["optimizer"])
            stepping.step()
            return all(torch.equal(before[k], loaded["model"][k]) for k in before)
    finally:
        AcceleratorState._reset_state(True)


def steps(model: nn.Module, optimizer: Any, group: Any, which: tuple[int, ...]) -> list[float]:
    """Return losses over all ranks."""
    losses = []
    for step in which:
        loss = backward(model, group, step)
        optimizer.step()
        optimizer.zero_grad()
        if group is not None:
            dist.all_reduce(loss)
        losses.append(loss.item() / (1 if group is None else group.size()))
    return losses


def save_whole(group: Any, path: str, changes: dict[str, Any]) -> list[float]:
    """Run two steps and save a file of rank 0; return the losses of the next two."""
    with net(group, **changes) as model:
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        steps(wrapped, optimizer, group, (0, 1))
        state = {"model": whole_state_dict(model), "optimizer": whole_state_dict(optimizer)}
        if group.rank() == 0:
            torch.save(state, path)
        dist.barrier()
        return steps(wrapped, optimizer, group, (2, 3))


def load_whole(group: Any, path: str, changes: dict[str, Any]) -> list[float]:
    with net(group, group is not None, **changes) as model:
        wrapped = model if group is None else DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.testing.assert_close(whole_state_dict(optimizer)["state"], state["optimizer"]["state"], rtol=0, atol=0)
        return steps(wrapped, optimizer, group, (2, 3))


def whole_of_pairs(group: Any) -> bool:
    """Two groups side by side, each with its own experts, gather only these."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair = group.rank() // 2
    with net(group) as of_all, net(pairs[pair]) as model:
        with torch.no_grad():
            for p in model.experts.parameters():
                p.mul_(pair + 1)
        expected, got = whole(of_all), whole(model)
        experts = [name for name in got if ".experts." in name]
        return len(experts) == 2 and all(torch.equal(got[name], expected[name] * (pair + 1)) for name in experts)
