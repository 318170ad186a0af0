"""Memory of the process: what the C library does with blocks that tensors give back."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of returning them to the system.

    A training step allocates and frees the same large tensors again and again. By default each of over 32 MiB is mapped
    anew, and the kernel clears its pages while the step waits: a fifth of the time of a layer with large experts.
    Elsewhere than on Linux with glibc this does nothing.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
