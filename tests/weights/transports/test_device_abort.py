"""Aborting a device transfer waits for nobody."""

from __future__ import annotations

import os
import signal
import threading

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.weights.messages import Proposal
from hwrl.weights.transport import ReceiverContext
from hwrl.weights.transports.device import DevicePayload, DeviceReceiver
from hwrl_cpu import INFO, CpuBackend


def test_an_abort_while_connecting_does_not_wait_for_a_dead_store() -> None:
    read, write = os.pipe()
    server = os.fork()
    if server == 0:
        store = serve_store()
        os.write(write, store_address(store).encode())
        signal.pause()
    receiver = DeviceReceiver(ReceiverContext(connect_store(os.read(read, 1000).decode()), CpuBackend(INFO), 8))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    os.close(read)
    os.close(write)
    payload = DevicePayload("1.1", 1)
    proposal = Proposal(1, 1, 1, "device", "", (1,), 60.0, 0, {}, payload)
    vars(receiver)["_connecting"] = proposal  # as while a thread makes the groups
    receiver.abort()
    telling = [thread for thread in threading.enumerate() if thread.name == "hwrl-call-off"]
    assert telling, "it still looks for the store, in a thread of its own"
    telling[0].join(600.0)
    assert not telling[0].is_alive()
