"""The transports of weights. A new one is a file here and a line in ``TRANSPORTS``."""

from hwrl.weights.transport import Transport
from hwrl.weights.transports.device import DEVICE
from hwrl.weights.transports.host import HOST
from hwrl.weights.transports.ipc import IPC

TransportName = str
"""A key of ``TRANSPORTS``."""

TRANSPORTS: dict[TransportName, Transport] = {"device": DEVICE, "ipc": IPC, "host": HOST}
