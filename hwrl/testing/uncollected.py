"""For the fork server of :mod:`hwrl.testing.processes`, which imports this module before all others.

Python's garbage collector is off: the server's large imports take a quarter less time. torch loads no extension.
"""

import gc
import os

gc.disable()
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
