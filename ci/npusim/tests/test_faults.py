"""Processes that fail: by strictness, by a knob or by being killed. Mostly without torch, which takes seconds."""

from collections.abc import Callable

import pytest
from conftest import MEMORY, Python

Start = Callable[..., Python]

ALLOCATE = """
acl.aclrtSetDevice(0)
def malloc(nbytes):
    pointer = ctypes.c_void_p()
    return acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes), 0), pointer
def free():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total))
    return free.value
"""
OUT_OF_MEMORY = 207001


def test_a_devices_memory_is_one_for_all_processes(python: Start) -> None:
    holder = python(ALLOCATE + "print(malloc(200 << 20)[0], flush=True); input()")
    assert holder.line() == "0"
    other = python(
        ALLOCATE + "print(free(), malloc(100 << 20)[0], flush=True); input(); print(free(), malloc(100 << 20)[0])"
    )
    assert other.line() == f"{MEMORY - (200 << 20)} {OUT_OF_MEMORY}"
    holder.kill()
    other.tell("go on")
    assert other.result()[1].strip() == f"{MEMORY} 0"


@pytest.mark.parametrize(
    ("knob", "codes"),
    [({"NPUSIM_FAULT_OOM_AT": "3"}, "0 0 207001 207001"), ({"NPUSIM_FAULT_OOM_AFTER": "8192"}, "0 0 207001 207001")],
)
def test_out_of_memory_on_request(python: Start, knob: dict[str, str], codes: str) -> None:
    process = python(ALLOCATE + "print(*[malloc(4096)[0] for _ in range(4)])", **knob)
    assert process.result()[1].strip() == codes


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,3", 2), ("1,0", 0), ("0,0", 0), ("3;2", 1), ("0,9", 1), ("x", 0)]
)
def test_visible_devices_as_cann_reads_them(python: Start, visible: str, count: int) -> None:
    code = "count = ctypes.c_uint32(); acl.aclrtGetDeviceCount(ctypes.byref(count)); print(count.value)"
    assert python(code, ASCEND_RT_VISIBLE_DEVICES=visible).result()[1].strip() == str(count)


HANDLES = """
acl.aclrtSetDevice(0)
event, stream = ctypes.c_void_p(), ctypes.c_void_p()
acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0)
acl.aclrtCreateStream(ctypes.byref(stream))
"""


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("acl.aclrtRecordEvent(stream, stream)", "aclrtRecordEvent wants a handle of kind event and got stream"),
        (
            "acl.aclrtDestroyEvent(event); acl.aclrtDestroyEvent(event)",
            "aclrtDestroyEvent wants a handle of kind event and got",
        ),
        ("acl.rtKernelLaunch()", "rtKernelLaunch is not simulated"),
    ],
)
def test_misuse_ends_the_process_and_names_itself(python: Start, misuse: str, message: str) -> None:
    status, out, err = python(HANDLES + misuse + "\nprint('went on')").result()
    assert (status, out) == (86, "")
    assert message in err


def test_memory_shared_by_a_dead_process_cannot_be_opened(python: Start) -> None:
    exporter = python(
        ALLOCATE
        + "_, pointer = malloc(4096); key = ctypes.create_string_buffer(65)\n"
        + "acl.aclrtIpcMemGetExportKey(pointer, ctypes.c_size_t(4096), key, ctypes.c_size_t(65), ctypes.c_uint64(0))\n"
        + "print(key.value.decode(), flush=True); input()"
    )
    key = exporter.line()
    opening = "pointer = ctypes.c_void_p(); acl.aclrtSetDevice(0)\n"
    opening += f"print(acl.aclrtIpcMemImportByKey(ctypes.byref(pointer), {key.encode()!r}, ctypes.c_uint64(0)))"
    assert python(opening).result()[1].strip() == "0"
    exporter.kill()
    assert python(opening).result()[1].strip() == "507022"


OPERATOR_FAILS = """
import torch
x = torch.ones(3, device="npu")
y = x + 1
torch.npu.synchronize()
y = x + 1
for device in (0, 0, 1):  # the error stays with its device
    try:
        torch.npu.synchronize(device)
        print("fine")
    except RuntimeError as exc:
        print("507015" in str(exc) and "aclnnAdd" in str(exc) and "on request" in str(exc))
sys.stdout.flush()
import torch_npu
with torch.npu.device(1):
    torch_npu.npu_format_cast(torch.ones(32, 32, device="npu"), 29)
    torch.npu.synchronize()
print("went on")
"""


def test_an_operator_that_fails_and_one_that_is_not_simulated(python: Start) -> None:
    status, out, err = python(OPERATOR_FAILS, NPUSIM_FAULT_OP="aclnnAdds:2").result()
    assert out.splitlines()[-3:] == ["True", "True", "fine"], err
    assert status == 86
    assert "is not simulated" in err
