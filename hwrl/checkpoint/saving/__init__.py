"""A save: its stages and the memory for copies of a state.

``agreement``, ``nodes`` and ``inventory`` also serve ``resume``.
"""
