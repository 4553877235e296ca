"""api.malloc, in a process of its own: it cannot be undone."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
from api import malloc
if sys.argv[1] == "set":
    malloc.map_large_blocks()
def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
large = bytearray(20_000_000); del large  # with this glibc would raise its threshold
before = memory()
kept, holes = [], []
for _ in range(20):
    holes.append(bytearray(4_000_000)); kept.append(bytearray(100_000))
holes.clear()
left = memory() - before
again = faults()
for _ in range(100):
    piece = bytearray(300_000); copy = bytes(piece); del piece, copy
print(left // 1_000_000, (faults() - again) // 100)
"""


def measured(how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", MEASURE, how], capture_output=True, text=True, check=True, timeout=60)
    return [int(one) for one in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_blocks_go_back_and_small_ones_cost_no_faults() -> None:
    (left, faults), (unset, _) = measured("set"), measured("not set")
    assert left < 10 < unset, "MB, of which two are in use"
    assert faults < 10, "a piece has 146 pages"
