"""Peak memory of this process, or of its GPU.

On Linux the kernel's high-water mark of resident memory, which can be reset; elsewhere that since
the process began. glibc keeps what was freed for later: it is asked to give it back first.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

import torch

_LINUX = sys.platform == "linux"


def now(device: str) -> int:
    """Bytes in use now."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    _give_back()
    return _status("VmRSS") if _LINUX else _since_start()


def reset_peak(device: str) -> None:
    """Forget earlier peaks."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif _LINUX:
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    """Most bytes in use since the last reset."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM") if _LINUX else _since_start()


def _give_back() -> None:
    if _LINUX:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # other C libraries have none


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _since_start() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
