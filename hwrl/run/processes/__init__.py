"""The code of a run's processes: the actors, the handles with which other processes call them, and their parts.

``actors``, ``handles`` and ``answers`` do not import torch, because a process chooses its backend before it imports
torch. ``trainer_rank`` and ``build`` import torch. Only processes with a device import these two.
"""
