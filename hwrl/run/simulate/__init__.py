"""``hwrl simulate``: simulate a run on thousands of devices. No device is needed."""

from hwrl.run.simulate.calibration import as_measured, averages, calibrate, read_run, settled
from hwrl.run.simulate.simulation import SimulatedRun, simulate
from hwrl.run.simulate.size import SimulatedSize, scaled, synchronous
from hwrl.run.simulate.text import as_json, assumptions, limits_exceeded, result_of, table_head, table_row
from hwrl.run.simulate.workload import Lengths, Workload, assume

__all__ = [
    "Lengths",
    "SimulatedRun",
    "SimulatedSize",
    "Workload",
    "as_json",
    "as_measured",
    "assume",
    "assumptions",
    "averages",
    "calibrate",
    "limits_exceeded",
    "read_run",
    "result_of",
    "scaled",
    "settled",
    "simulate",
    "synchronous",
    "table_head",
    "table_row",
]
