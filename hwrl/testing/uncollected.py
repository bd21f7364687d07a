"""Turns Python's garbage collector off in the process that imports this module.

The process that children are forked from imports it first: large imports then take three quarters of the time.
"""

import gc

gc.disable()
