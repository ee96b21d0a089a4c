"""Devices: memory, bandwidth and speed of GPUs by name, of a number of bytes, or of what this machine has."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from pagedkv.budget import parse_bytes
from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a budget of bytes.

    Attributes:
        name: as users write it.
        memory: bytes that its driver reports in all.
        bandwidth: bytes per second read from memory at best; 0 where only bytes are known.
        flops: dense bfloat16 operations per second at best; 0 where only bytes are known.
        used: bytes that other processes hold.
        source: the maker's data sheet.
    """

    name: str
    memory: int
    bandwidth: float = 0.0
    flops: float = 0.0
    used: int = 0
    source: str = ""


def _gpu(name: str, mebibytes: int, gigabytes_per_second: float, teraflops: float, source: str) -> Device:
    return Device(name, mebibytes * 1024**2, gigabytes_per_second * 1e9, teraflops * 1e12, source=source)


DEVICES = {
    device.name.lower(): device
    for device in (
        _gpu("A10", 23028, 600, 125, "NVIDIA A10 datasheet, 2021"),
        _gpu("A100-40GB", 40960, 1555, 312, "NVIDIA A100 datasheet, 2020 (SXM)"),
        _gpu("A100-80GB", 81920, 2039, 312, "NVIDIA A100 datasheet, 2021 (SXM)"),
        _gpu("L4", 23034, 300, 121, "NVIDIA L4 datasheet, 2023 (without sparsity)"),
        _gpu("L40S", 46068, 864, 362, "NVIDIA L40S datasheet, 2023 (without sparsity)"),
        _gpu("H100", 81559, 3350, 989, "NVIDIA H100 datasheet, 2023 (SXM, without sparsity)"),
        _gpu("H200", 143771, 4800, 989, "NVIDIA H200 datasheet, 2023 (SXM, without sparsity)"),
        _gpu("B200", 183359, 8000, 2250, "NVIDIA Blackwell datasheet, 2024 (without sparsity)"),
        _gpu("MI300X", 196592, 5300, 1307, "AMD Instinct MI300X data sheet, 2023"),
    )
}
"""By lower-case name. The memory is what nvidia-smi and rocm-smi show, which is a little less than on the box."""

_ALIASES = {"a100": "a100-80gb", "a10040gb": "a100-40gb", "a10080gb": "a100-80gb", "h10080gb": "h100"}


def find_device(text: str) -> Device:
    """A device by name ("H100", "a100 40gb"), or by its bytes ("80GiB").

    Raises:
        ConfigError: neither; the message has the nearest names.
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    by_name = {re.sub(r"[^a-z0-9]", "", name): device for name, device in DEVICES.items()}
    if found := by_name.get(plain) or DEVICES.get(_ALIASES.get(plain, "")):
        return found
    if re.match(r"\s*\d", text):
        return Device(text.strip(), parse_bytes(text))
    near = difflib.get_close_matches(plain, by_name, n=3, cutoff=0.5)
    names = [by_name[name].name for name in near] or [device.name for device in DEVICES.values()]
    raise ConfigError(f"{text!r} is not a GPU known here; did you mean {', '.join(names)}? Bytes do too: --gpu 80GiB")


def detect() -> list[Device]:
    """The NVIDIA GPUs of this machine, with the bytes that others use now.

    Speeds are those of the device of the same name in `DEVICES`, where there is one.

    Raises:
        ConfigError: nvidia-ml-py is not installed, or finds no driver or no GPU.
    """
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        raise ConfigError("--detect needs nvidia-ml-py; install it with: pip install 'pagedkv[plan]'") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(f"--detect found no NVIDIA driver ({error}); name the device with --gpu") from None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [_seen(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)) for handle in handles]
    finally:
        nvml.nvmlShutdown()
    if not found:
        raise ConfigError("--detect found no GPU; name the device with --gpu")
    return found


def _seen(name: str | bytes, memory: object) -> Device:
    """A device as the driver calls it ("NVIDIA H100 80GB HBM3")."""
    text = name.decode() if isinstance(name, bytes) else name
    total, used = int(getattr(memory, "total", 0)), int(getattr(memory, "used", 0))
    words = set(re.findall(r"[A-Z0-9]+", text.upper()))
    known = [device for device in DEVICES.values() if device.name.split("-")[0].upper() in words]
    if not known:
        return Device(text, total, used=used)
    nearest = min(known, key=lambda device: abs(device.memory - total))
    return replace(nearest, name=text, memory=total, used=used)
