"""A program with one rank. Both get SIGHUP, as when a terminal closes; a rank that survives prints a line."""

from __future__ import annotations

import os
import signal

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks


def go_on(channel: Channel) -> None:
    channel.receive()
    os.kill(os.getpid(), signal.SIGHUP)
    channel.send(b"goes on")


def main() -> None:
    with ProcessRanks() as ranks:
        ranks.start(0, go_on)
        os.kill(os.getpid(), signal.SIGHUP)
        ranks.send(0, b"go on")
        print(ranks.receive(0).decode())


main()
