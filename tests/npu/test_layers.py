"""Layers run on torch_npu's fused operations, and train as on one host; the peak comes from CANN's description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hwrl
import hwrl_cpu
from hwrl.discovery import kernels
from hwrl.memory import Offloader
from hwrl.testing.varlen import PACKED, wrong_varlen
from hwrl.train import FsdpEngine, PolicyLoss
from hwrl.train.kernels import apply_kernels
from tests.support.fsdp_training import batch_of, engine_on, groups_of, model_directory
from tests.support.tiny_model import tiny_model

__all__ = ["model_directory"]  # a fixture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_and_gated_layer_runs_fused(dtype: torch.dtype) -> None:
    backend, model = hwrl.get_backend(), tiny_model()
    assert apply_kernels(model, kernels(), device=backend.device(), dtype=dtype) == 2 * 5 + 1
    tokens = torch.arange(24).reshape(2, 12) % 16
    right = tiny_model().double()(input_ids=tokens, labels=tokens).loss
    right.backward()
    fused = model.to(backend.device(), dtype)
    loss = fused(input_ids=tokens.to(backend.device()), labels=tokens.to(backend.device())).loss
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-5 if dtype is torch.float32 else 3e-2)
    assert all(parameter.grad is not None for parameter in fused.parameters())


def test_an_engine_may_replace_torchs_events_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend's model runner does so for the whole process. A model still moves to the host and back."""
    backend, model = hwrl.get_backend(), tiny_model().to(hwrl.get_backend().device())
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch, name, getattr(torch.npu, name))  # type: ignore[attr-defined]  # torch_npu's
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    with Offloader(model, backend=backend) as offloader:
        assert offloader.offload().nbytes > 0
        offloader.load()
    begin, end = backend.event(timing=True), backend.event(timing=True)
    begin.record()
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0
    after = [parameter.detach().cpu() for parameter in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_where_the_fused_attention_cannot_serve_rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwrl_npu.attention.takes", lambda *_: False)
    assert wrong_varlen(hwrl.get_backend(), PACKED["grouped"], torch.float32) == []


def test_the_peak_comes_from_canns_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = hwrl.get_backend()
    folder = tmp_path / "x86_64-linux/data/platform_config"
    folder.mkdir(parents=True)
    described = (
        "[SoCInfo]\nai_core_cnt=24\n[AICoreSpec]\ncube_freq=1800\ncube_m_size=16\ncube_n_size=16\ncube_k_size=16\n"
    )
    (folder / f"{backend.device_module.get_device_name()}.ini").write_text(described)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert backend.peak_flops(torch.bfloat16) == 24 * 16**3 * 2 * 1.8e9
    assert backend.peak_flops(torch.float32) is None


def test_packs_train_on_fused_operations_as_on_the_host(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = engine_on(model_directory, None)
    assert not [record for record in caplog.records if "padded rows" in record.getMessage()]
    host_settings = replace(device.settings, fused_kernels=False)
    host = FsdpEngine(host_settings, backend=hwrl_cpu.CpuBackend(hwrl_cpu.INFO), group=None)
    for step in range(3):
        batch = batch_of(groups_of(4, seed=step))
        got, wanted = (engine.train_batch(batch, loss=PolicyLoss()) for engine in (device, host))
        for name in ("loss", "grad_norm", "entropy"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), f"{name} in step {step}"
