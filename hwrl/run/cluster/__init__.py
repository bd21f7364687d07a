"""Ray and the devices of a run: start or join a cluster, place the processes, and check their devices.

- :mod:`hwrl.run.cluster.ray_session`: start a private Ray on this machine, or join a cluster.
- :mod:`hwrl.run.cluster.ray_security`: keep that private Ray closed to other users and machines.
- :mod:`hwrl.run.cluster.placement`: decide which devices each process uses, and how weights travel. Needs no Ray.
- :mod:`hwrl.run.cluster.nodes`: decide which node of a cluster has which device of the run. Needs no Ray.
- :mod:`hwrl.run.cluster.devices`: reserve the devices in Ray, and compare them with the processes' reports.

A *machine* runs one or more processes of the run. A *node* is a machine as Ray sees it. A *host* name is for messages.
"""
