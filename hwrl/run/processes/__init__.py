"""The processes of a run: the actors, their typed handles for other processes, and the parts inside of them.

``actors``, ``handles`` and ``answers`` import no torch: a process chooses its backend before it does.
``trainer_rank`` and ``build`` do, and only the processes that use a device import them.
"""
