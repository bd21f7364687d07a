"""Ray and the devices of a run: start or join a cluster, place the processes, and check their devices.

- :mod:`hwrl.run.cluster.ray_session`: start a private Ray on this machine, or join a cluster.
- :mod:`hwrl.run.cluster.ray_security`: keep that private Ray closed to other users and machines.
- :mod:`hwrl.run.cluster.placement`: decide about devices and transport. Needs no Ray.
- :mod:`hwrl.run.cluster.devices`: reserve devices in Ray and check the processes' reports.
"""
