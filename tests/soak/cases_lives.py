"""A rank of the soak of whole lives: all ranks follow the same plan, each at its own pace."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from soak import buffer_acts, layer_acts
from soak.cases_soak import dawdle
from support.held_resources import held, left_behind
from torch import Tensor

from moe_rt import Buffer
from moe_rt.errors import GroupClosed
from moe_rt.lab.testing.rounds import buffer_kwargs

MOST_GROUPS, MOST_OWNED, MOST_KEPT = 4, 7, 6
TIMEOUT_S = 60.0
LOOKS = 20  # acts between two checks of the clock
WARM_UP = 10 * LOOKS
CONFIGS = 5  # kinds of layers: some share a buffer, also with a layer that some ranks have not yet collected
CHILD_S = 600  # a child that does not end by then is killed


@dataclass(eq=False)
class Group:
    """Some ranks; `group` is None on the others."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass(eq=False)
class Owned:
    """A buffer, or a layer with its one-rank reference; `of` is None on ranks outside the group."""

    home: Group
    kind: str
    of: Any


class Life:
    """Every rank lists all groups, buffers and layers, also others', so that the plan is identical on all ranks."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.plan, self.pace = random.Random(seed), random.Random(f"{seed} {self.rank}")
        self.groups, self.owned = [Group(tuple(range(self.size)), group)], list[Owned]()
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.children: list[int] = []
        self.counts: dict[str, int] = {}

    def act(self) -> None:
        """Perform one act. It draws from a separate seed, since ranks outside the group draw nothing."""
        name = self.plan.choices(list(ACTS), list(ACTS.values()))[0]
        dawdle(self.pace)
        getattr(self, name)(random.Random(self.plan.randrange(2**62)))
        self.counts[name] = self.counts.get(name, 0) + 1

    def make_group(self, draw: random.Random) -> None:
        """Make a group of any ranks; groups overlap."""
        if len(self.groups) == MOST_GROUPS:
            gone = self.groups.pop(draw.randrange(1, MOST_GROUPS))
            for owned in [o for o in self.owned if o.home is gone]:
                self.leave(owned)
            _destroy(gone)
        ranks = tuple(sorted(draw.sample(range(self.size), draw.randint(1, self.size))))
        made = dist.new_group(list(ranks))
        self.groups.append(Group(ranks, made if self.rank in ranks else None))

    def make_buffer(self, draw: random.Random) -> None:
        home, num_threads = self._room(draw), draw.randint(1, 3)
        of = None
        if home.group is not None:
            spec = buffer_acts.draw_spec(draw, len(home.ranks))
            of = Buffer(home.group, timeout_s=TIMEOUT_S, num_threads=num_threads, **buffer_kwargs(spec))
        self.owned.append(Owned(home, "buffer", of))

    def make_layer(self, draw: random.Random) -> None:
        home, of = self._room(draw), None
        if home.group is not None:
            config = layer_acts.draw_config(random.Random(draw.randrange(CONFIGS)), len(home.ranks))
            of = layer_acts.make_layers(config, home.group, draw.randrange(2**31))
        self.owned.append(Owned(home, "layer", of))

    def round(self, draw: random.Random) -> None:
        """Play rounds on some buffers without a drain in between; keep some outputs, to be checked much later."""
        for _ in range(draw.randint(1, 3)):
            owned, its_own = self._choose(draw, "buffer"), random.Random(draw.randrange(2**62))
            if owned is not None and owned.of is not None:
                outputs = buffer_acts.verified_round(owned.of, its_own)
                dawdle(self.pace)
                self.kept += [(t, t.clone()) for t in outputs if self.pace.random() < 0.1]

    def step(self, draw: random.Random) -> None:
        owned = self._choose(draw, "layer")
        if owned is not None and owned.of is not None:
            layer_acts.verified_step(*owned.of, draw, compiled=draw.random() < 0.02)

    def refuse(self, draw: random.Random) -> None:
        owned = self._choose(draw, "buffer")
        if owned is not None and owned.of is not None:
            buffer_acts.refused_round(owned.of, draw)

    def end(self, draw: random.Random) -> None:
        """One rank ends a buffer that the others use."""
        owned = self._choose(draw, "buffer")
        if owned is not None:
            if owned.of is not None:
                buffer_acts.ended(owned.of, draw)
            self.leave(owned)

    def fork(self, draw: random.Random) -> None:
        """Some ranks fork. The child's ops are refused, and objects it drops do not disturb the parent."""
        self._reap(os.WNOHANG)
        if self.pace.random() < 0.5:
            return
        gc.collect()  # collecting a gloo group in a child hangs: torch joins threads that the child does not have
        child = os.fork()
        if child:
            self.children.append(child)
            return
        status = 1
        try:
            signal.alarm(CHILD_S)
            self._disown()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def collect(self, draw: random.Random) -> None:
        """Check that kept outputs have not changed; some ranks collect garbage."""
        for got, copy in self.kept:
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(copy)), "an output changed while it was kept"
        if len(self.kept) > MOST_KEPT:
            del self.kept[: len(self.kept) // 2]
        if self.pace.random() < 0.5:
            gc.collect()

    def leave(self, owned: Owned) -> None:
        """Close it, or drop it, sometimes in a cycle that a later collection finds."""
        self.owned.remove(owned)
        if owned.of is None:
            return
        if owned.kind == "buffer" and self.pace.random() < 0.5:
            owned.of.close()
        elif self.pace.random() < 0.5:
            owned.of = [owned, owned.of]

    def finish(self) -> None:
        """Leave everything."""
        self.collect(self.plan)
        self.kept.clear()
        for owned in list(self.owned):
            self.leave(owned)
        while len(self.groups) > 1:
            _destroy(self.groups.pop())
        self._reap(0)

    def _room(self, draw: random.Random) -> Group:
        if len(self.owned) == MOST_OWNED:
            self.leave(self.owned[draw.randrange(MOST_OWNED)])
        return draw.choice(self.groups)

    def _choose(self, draw: random.Random, kind: str) -> Owned | None:
        found = [o for o in self.owned if o.kind == kind]
        return draw.choice(found) if found else None

    def _disown(self) -> None:
        for owned in self.owned:
            if owned.kind == "buffer" and owned.of is not None:
                try:
                    buffer_acts.dispatch(owned.of, buffer_acts.draw_inputs(self.pace, owned.of.spec), 0)
                except GroupClosed:
                    continue
                raise AssertionError("an op of a forked child was completed")
        self.owned.clear()
        gc.collect()

    def _reap(self, options: int) -> None:
        for child in list(self.children):
            pid, status = os.waitpid(child, options)
            if pid:
                self.children.remove(child)
                code = os.waitstatus_to_exitcode(status)
                assert code == 0, f"a forked child ended with {code}"


def _destroy(gone: Group) -> None:
    if gone.group is not None:
        dist.barrier(gone.group)  # new_group does not wait: a slow member may still be connecting to this one
        dist.destroy_process_group(gone.group)


# Relative frequency of each act.
ACTS = {
    "make_group": 1,
    "make_buffer": 3,
    "make_layer": 1,
    "round": 25,
    "step": 10,
    "refuse": 4,
    "end": 1,
    "fork": 1,
    "collect": 4,
}


def live(group: dist.ProcessGroup, seed: int, acts: int, seconds: float) -> dict[str, Any]:
    """Run at least this many acts and for this long; return how often each ran, and what remains at the end."""
    life = Life(group, seed)
    warnings.filterwarnings("ignore", message="dtype: got")  # a fixed dtype that autocast disagrees with
    try:
        _acts(life, WARM_UP, 0.0)  # makes everything that is made once and kept
        life.finish()
        before = held(group)
        _acts(life, acts, seconds)
    except BaseException:
        for owned in life.owned:
            if owned.of is not None:
                # The other ranks must end immediately also.
                (owned.of if owned.kind == "buffer" else owned.of[0].buffer).abort()
        raise
    life.finish()
    dist.barrier()
    return {"acts": life.counts, "left": left_behind(before, lambda: held(group))}


def _acts(life: Life, acts: int, seconds: float) -> None:
    deadline, done, late = time.monotonic() + seconds, 0, torch.zeros(1)
    while done < acts or not late:
        life.act()
        done += 1
        if done % LOOKS == 0:
            late.fill_(time.monotonic() >= deadline)
            dist.all_reduce(late, dist.ReduceOp.MAX)  # clocks differ, but ranks must end together
