"""hwrl's own transports. Other packages add theirs by an entry point (:func:`~hwrl.weights.with_transport`)."""

from hwrl.weights.transport import Transport
from hwrl.weights.transports.device import DEVICE
from hwrl.weights.transports.host import HOST
from hwrl.weights.transports.ipc import IPC

TransportName = str
"""The name of a transport: a key of ``TRANSPORTS``, or of an installed one."""

TRANSPORTS: dict[TransportName, Transport] = {"device": DEVICE, "ipc": IPC, "host": HOST}
