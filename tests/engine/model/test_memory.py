"""Free memory is the least of what the machine and each control group leave; the KV cache takes a bounded share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model import memory

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 20 GiB available and a container's control group without limits."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {20 * GIB >> 10} kB\n")
    (tmp_path / "self").write_text("0::/pod/box\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_SELF_CGROUP", tmp_path / "self")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    for group in ("", "pod", "pod/box"):
        limit(tmp_path, group, "max", 0)
    return tmp_path


def limit(root: Path, group: str, limit: int | str, used: int, page_cache: int = 0) -> None:
    folder = root / "cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {page_cache}\n")


def test_without_limits_free_is_what_the_kernel_calls_available(machine: Path) -> None:
    assert memory.free_memory(CPU) == 20 * GIB


@pytest.mark.parametrize("group", ["", "pod", "pod/box"])
def test_the_tightest_group_around_the_process_counts_without_its_page_cache(machine: Path, group: str) -> None:
    limit(machine, group, 8 * GIB, 6 * GIB, page_cache=1 * GIB)
    assert memory.free_memory(CPU) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(machine: Path) -> None:
    limit(machine, "pod", GIB, 2 * GIB)
    assert memory.free_memory(CPU) == 0


def test_files_that_are_not_there_or_not_numbers_are_no_limit(machine: Path) -> None:
    (machine / "cgroup" / "memory.max").unlink()
    (machine / "cgroup" / "pod" / "memory.max").write_text("lots")
    assert memory.free_memory(CPU) == 20 * GIB
    (machine / "self").unlink()
    assert memory.free_memory(CPU) == 20 * GIB


def test_the_kv_cache_takes_what_is_asked_else_a_bounded_share(machine: Path) -> None:
    assert memory.kv_cache_bytes(CPU, 12345) == 12345
    assert memory.kv_cache_bytes(CPU, None) == memory.CPU_KV_CEILING
    limit(machine, "pod", 5 * GIB, 0)
    assert memory.kv_cache_bytes(CPU, None) == int(5 * GIB * memory.CPU_KV_SHARE)


def test_the_real_machine_has_memory() -> None:
    assert memory.free_memory(CPU) > 0
