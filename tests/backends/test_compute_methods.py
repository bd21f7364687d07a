"""The shipped accelerators' attention, peaks and fused operations, as far as this machine can run them."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

import hwrl_cpu
import hwrl_cuda
from hwrl.interfaces import Backend, Capability, Kernels
from hwrl.testing.varlen import PACKED, wrong_varlen
from hwrl_cuda import attention, peaks
from hwrl_npu import peaks as npu_peaks
from tests.support.interrupting import before_each_line


class Generic(hwrl_cpu.CpuBackend):
    """Computes like a backend that overrides nothing."""

    _grouped_attention = False


GENERIC = Generic(hwrl_cpu.INFO)


@pytest.mark.parametrize("pack", PACKED)
def test_the_generic_attention_is_right_where_heads_cannot_share(pack: str) -> None:
    assert wrong_varlen(GENERIC, PACKED[pack], torch.float32) == []


class Numberings(TorchFunctionMode):
    """Counts the calls that number the tokens of a pack."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.arange
        return func(*args, **(kwargs or {}))


def test_the_places_of_tokens_are_computed_once_for_all_layers() -> None:
    query, key, value = packed(torch.float32)
    for boundaries in ([0, 5, 12], [0, 12]):
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        with Numberings() as numberings:
            for _ in range(3):
                out = GENERIC.varlen_attention(query, key, value, cu_seqlens=cu_seqlens, max_length=12)
        assert numberings.count == 1
        assert out.shape == query.shape


def test_boundaries_made_in_inference_mode_serve_outside_of_it() -> None:
    query, key, value = map(torch.rand_like, packed(torch.float32))
    with torch.inference_mode():
        made = torch.tensor([0, 5, 12], dtype=torch.int32)
    plain = torch.tensor([0, 5, 12], dtype=torch.int32)
    out, wanted = (GENERIC.varlen_attention(query, key, value, cu_seqlens=each, max_length=7) for each in (made, plain))
    torch.testing.assert_close(out, wanted)


def test_threads_do_not_get_the_places_of_each_other() -> None:
    """Another thread attends, with other boundaries, before each line of the method that keeps the places."""
    query, key, value = map(torch.rand_like, packed(torch.float32))
    mine, others = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 12], [0, 7, 12]))

    def attend(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return GENERIC.varlen_attention(query, key, value, cu_seqlens=cu_seqlens, max_length=7)

    def attend_elsewhere() -> None:
        other = threading.Thread(target=attend, args=[others])
        other.start()
        other.join()

    wanted = attend(mine)
    with before_each_line(lambda code: code.co_name == "_places", attend_elsewhere):
        out = attend(mine)
    torch.testing.assert_close(out, wanted)


# -- torch's kernel does not run on a host: these have its signatures, and compute it in the generic way --------------


def checked(query: Any, key: Any, value: Any, ends: Any, longest: int, *, causal: bool, scale: float | None) -> Any:
    assert causal, "the backend must ask for causal attention"
    return GENERIC.varlen_attention(query, key, value, cu_seqlens=ends, max_length=longest, scale=scale)


def torch_2_10(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, is_causal: bool = False) -> Any:
    return checked(q, k, v, cu_q, max_q, causal=is_causal, scale=None)


def torch_2_11(
    *packed: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), seqused_k: Any = None
) -> Any:
    query, key, value, ends, _, longest, _ = packed
    return checked(query, key, value, ends, longest, causal=window_size == (-1, 0), scale=scale)


def torch_2_12(
    *packed: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> Any:
    query, key, value, ends, _, longest, _ = packed
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return checked(query, key, value, ends, longest, causal=window_size == (-1, 0), scale=scale)


def unknown(*packed: Any, mask: str = "") -> Any:
    raise AssertionError("the backend must not call what it does not know")


def loaded_over(kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a second ``hwrl_cuda.attention``, for a torch with this kernel."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    spec = importlib.util.find_spec("hwrl_cuda.attention")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attending(hwrl_cpu.CpuBackend):
    def __init__(self, module: ModuleType) -> None:
        super().__init__(hwrl_cpu.INFO)
        self.module = module

    def varlen_attention(self, query: Any, key: Any, value: Any, *, scale: float | None = None, **where: Any) -> Any:
        return self.module.attend(query, key, value, scale=scale, **where)


@pytest.mark.parametrize("pack", ["grouped", "one key head, own scale", "padded boundaries"])
@pytest.mark.parametrize("kernel", [torch_2_10, torch_2_11, torch_2_12])
def test_the_kernel_is_called_as_each_torch_wants(
    kernel: Callable[..., Any], pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = loaded_over(kernel, monkeypatch)
    assert module.why_not() == ""
    assert wrong_varlen(Attending(module), PACKED[pack], torch.float32) == []


def test_an_unknown_kernel_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded_over(unknown, monkeypatch)
    assert "mask" in module.why_not()
    query = torch.ones(3, 2, 16, dtype=torch.bfloat16)
    assert attention.takes(query, query)
    assert not module.takes(query, query)
    monkeypatch.setattr(hwrl_cuda, "attention", module)
    support = hwrl_cuda.CudaBackend(hwrl_cuda.INFO).supports(Capability.VARLEN_ATTENTION)
    assert (support.state, "mask" in support.reason) == ("unsupported", True)


def packed(dtype: torch.dtype, *, head_dim: int = 16, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.zeros(12, heads, head_dim, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2)]


def test_the_installed_torch_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Backend, "varlen_attention")  # the generic way
    query, key, value = packed(torch.bfloat16, device="meta")
    cu_seqlens = torch.tensor([0, 5, 12, 12], dtype=torch.int32, device="meta")
    backend = hwrl_cuda.CudaBackend(hwrl_cuda.INFO)
    attend = torch.compile(backend.varlen_attention, backend="eager", fullgraph=True)  # traces it whole, or raises
    out = attend(query, key, value, cu_seqlens=cu_seqlens, max_length=8)
    out.backward(torch.empty_like(out))
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert key.grad is not None and key.grad.shape == key.shape


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 20), (torch.float16, 264)])
def test_what_the_kernel_does_not_take_is_padded(dtype: torch.dtype, head_dim: int) -> None:
    query, key, value = packed(dtype, head_dim=head_dim)
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    backend = hwrl_cuda.CudaBackend(hwrl_cuda.INFO)
    assert backend.varlen_attention(query, key, value, cu_seqlens=cu_seqlens, max_length=7).shape == query.shape


@pytest.fixture
def autocast() -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.usefixtures("autocast")
def test_autocast_reaches_the_kernel() -> None:
    assert [tensor.dtype for tensor in attention.cast(*packed(torch.float32))] == [torch.bfloat16] * 3


# -- peaks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H20", 148e12, 44e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("a GPU of next year", None, None),
    ],
)
def test_known_gpus_have_a_peak(name: str, half: float | None, single: float | None) -> None:
    assert [peaks.of(name, dtype) for dtype in ("bfloat16", "float16", "float32")] == [half, half, single]
    assert peaks.of(name, "int8") is None


def described_npu(root: Path, text: str) -> dict[str, str]:
    folder = root / "aarch64-linux/data/platform_config"
    folder.mkdir(parents=True)
    (folder / "Ascend910B2.ini").write_text(text)
    return {"ASCEND_HOME_PATH": str(root)}


def test_the_peak_of_an_npu_is_computed_from_its_description(tmp_path: Path) -> None:
    core = "[AICoreSpec]\ncube_freq=1800\ncube_m_size=16\ncube_n_size=16\ncube_k_size=16\n"
    env = described_npu(tmp_path, f"[SoCInfo]\nai_core_cnt=24\n{core}")
    assert npu_peaks.of("Ascend910B2", env) == pytest.approx(353.9e12, rel=1e-3)
    assert npu_peaks.of("Ascend910B9", env) is None
    assert npu_peaks.of("Ascend910B2", {}) is None


@pytest.mark.parametrize("text", ["", "[SoCInfo]\nai_core_cnt=many\n[AICoreSpec]\ncube_freq=1\n", "no sections"])
def test_an_unreadable_description_gives_no_peak(text: str, tmp_path: Path) -> None:
    assert npu_peaks.of("Ascend910B2", described_npu(tmp_path, text)) is None


# -- fused operations of an optional package --------------------------------------------------------------------------


class Norm:
    @staticmethod
    def apply(x: Any, weight: Any, eps: float, offset: float, casting: str, in_place: bool) -> Any:
        assert (offset, casting, in_place) == (0.0, "llama", False)
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)


class SiluMul:
    @staticmethod
    def apply(gate: Any, up: Any) -> Any:
        return functional.silu(gate) * up


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Liger Kernel's two classes, in modules of its names."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, operation in (("rms_norm.LigerRMSNormFunction", Norm), ("swiglu.LigerSiLUMulFunction", SiluMul)):
        module, _, attribute = f"liger_kernel.ops.{name}".rpartition(".")
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[module], attribute, operation, raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ModuleType("liger_kernel.ops"))
    yield
    sys.modules.pop("hwrl_cuda.kernels", None)
    vars(hwrl_cuda).pop("kernels", None)


@pytest.mark.usefixtures("liger")
def test_an_installed_package_brings_fused_operations() -> None:
    kernels = hwrl_cuda.hwrl_kernels()
    assert kernels is not None and kernels.rms_norm and kernels.swiglu
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), functional.rms_norm(x, (8,), weight, 1e-6))
    torch.testing.assert_close(kernels.swiglu(x, x + 1), functional.silu(x) * (x + 1))


@pytest.mark.usefixtures("liger")
def test_a_broken_package_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(sys.modules["liger_kernel.ops.swiglu"], "LigerSiLUMulFunction")
    assert hwrl_cuda.hwrl_kernels() is None
    assert "cannot be used: cannot import name 'LigerSiLUMulFunction'" in caplog.text


def test_without_the_package_there_are_none() -> None:
    assert hwrl_cuda.hwrl_kernels() is None
    assert Kernels().rms_norm is None
