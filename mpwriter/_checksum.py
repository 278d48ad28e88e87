"""CRC-32 by the fastest library that is installed.

Runs in: both. Torch-free. isal and zlib-ng use the CPU's vector units (16 GiB/s); zlib does 3.2.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    try:
        from zlib_ng.zlib_ng import crc32
    except ImportError:
        from zlib import crc32

__all__ = ["crc32"]
