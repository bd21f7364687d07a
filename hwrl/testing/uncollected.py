"""Importing this module turns Python's garbage collector off.

The fork server of :mod:`hwrl.testing.processes` imports it first: its large imports take a quarter less time.
"""

import gc

gc.disable()
