"""Sample the SM clock and the power of a GPU until it is told to stop, for bursts that other processes time.

    python -m fa3_reports.measured.clock_samples SAMPLES.csv

NVML is asked every 20 ms; where its library is not found, nvidia-smi prints every 50 ms. It ends with the file
``SAMPLES.csv.stop``, or after :data:`LONGEST_S`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("unix_s", "sm_mhz", "power_w", "energy_j", "reasons")
EVERY_S = 0.02
LONGEST_S = 600.0
_SM_CLOCK = 1
_QUERY = "timestamp,clocks.sm,power.draw"
_LIBRARY = "libnvidia-ml.so.1"


class Sample(NamedTuple):
    """The state of a GPU at a moment; ``reasons`` are NVML's bits of why the clock is no higher, -1 if not asked."""

    unix_s: float
    sm_mhz: float
    power_w: float
    energy_j: float
    reasons: int


def from_line(line: str) -> Sample:
    """Read a line of ``nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw --format=csv,noheader,nounits``.

    Raises
    ------
    ValueError
        For a line of another form, as nvidia-smi's errors are.
    """
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != _QUERY.count(",") + 1:
        raise ValueError(f"nvidia-smi printed no sample: {line.strip()}")
    moment, clock, power = fields
    watts = float("nan") if power.startswith("[") else float(power.removesuffix(" W"))
    at = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    return Sample(at, float(clock.removesuffix(" MHz")), watts, float("nan"), -1)


def _through_nvml() -> Callable[[], Sample]:
    nvml = ctypes.CDLL(_LIBRARY)
    handle = ctypes.c_void_p()
    for code in (nvml.nvmlInit_v2(), nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))):
        if code:
            raise OSError(f"NVML answered {code}")
    clock, power = ctypes.c_uint(), ctypes.c_uint()
    energy, reasons = ctypes.c_ulonglong(), ctypes.c_ulonglong()

    def sample() -> Sample:
        nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock))
        nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
        return Sample(time.time(), clock.value, power.value / 1e3, energy.value / 1e3, reasons.value)

    return sample


def _by_nvml() -> Iterator[Sample]:
    sample = _through_nvml()
    while True:
        yield sample()
        time.sleep(EVERY_S)


def _by_smi() -> Iterator[Sample]:
    command = ["stdbuf", "-oL", "nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                yield from_line(line)
        finally:
            process.kill()


def samples() -> Iterator[Sample]:
    """Yield samples without an end."""
    try:
        _through_nvml()
    except (OSError, AttributeError) as error:
        print(f"nvidia-smi is asked instead of NVML: {error}", file=sys.stderr)
        yield from _by_smi()
    else:
        yield from _by_nvml()


def main(target: Path) -> None:
    """Write samples until there is a file that says to stop."""
    stop = target.with_name(target.name + ".stop")
    begin = time.monotonic()
    with target.open("w") as file:
        file.write(",".join(COLUMNS) + "\n")
        for each in samples():
            file.write(",".join(f"{value:.10g}" if i else f"{value:.3f}" for i, value in enumerate(each)) + "\n")
            file.flush()
            if stop.exists() or time.monotonic() - begin > LONGEST_S:
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
