"""How much memory there is, and what of it the KV cache gets."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

import torch

CPU_KV_CEILING = 4 << 30  # bytes; by default a CPU cache takes no more, whatever is free
CPU_KV_SHARE = 0.4  # of free memory
CUDA_KV_SHARE = 0.9

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`. For the CPU: what the kernel calls available, or what the control
    groups around this process leave, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_available(), *_cgroup_rooms()])


def kv_cache_bytes(device: torch.device, requested: int | None) -> int:
    """Bytes for the KV cache: what the user asked for, else a share of what is free."""
    if requested is not None:
        return requested
    free = free_memory(device)
    if device.type == "cuda":
        return int(free * CUDA_KV_SHARE)
    return min(CPU_KV_CEILING, int(free * CPU_KV_SHARE))


def give_back() -> None:
    """Returns what is free in this process's heap to the system: loading leaves holes as large as the model."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _available() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms() -> list[int]:
    """Bytes left under the limit of each control group (v2) around this process; page cache counts as free."""
    rooms = []
    for group in _cgroups():
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            rooms.append(max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
        except (OSError, ValueError):
            continue
    return rooms


def _cgroups() -> list[Path]:
    """This process's control group and those around it. In a container the path may be seen from outside."""
    try:
        own = _SELF_CGROUP.read_text().strip().rpartition("::/")[2]
    except OSError:
        return []
    group = _CGROUP / own
    return [_CGROUP, *(g for g in (group, *group.parents) if g.is_relative_to(_CGROUP) and g != _CGROUP)]
