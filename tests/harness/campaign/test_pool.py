"""The isolating pool: a task that raises, dies or hangs fails alone and names its case; no worker outlives its pool."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fa3verify.campaign.pool import DEVICES_VARIABLE, IsolatingPool, TaskError, WorkerLost, processes
from fa3verify.campaign.tasks import CallTask, run
from fa3verify.kernels import watch
from tests.sampling import sampled


@pytest.fixture(scope="module")
def pool():
    with IsolatingPool(1, limit_s=20.0, memory_bytes=2 << 30) as executor:
        yield executor


def die_at_a_case(case: int) -> None:
    watch.trying("family x", lambda: {"case": case})
    print("to standard output")
    os.write(2, b"last\x1b words\n")
    os._exit(7)


def spoil_the_gpu(case: int) -> int:
    """Leave a GPU behind as a kernel with a bad address does: every later call of the process fails."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
        cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    )
    watch.trying("family x", lambda: {"case": case})
    with contextlib.suppress(RuntimeError), watch.warming("x"):
        synchronize()
    return case  # as a search does that goes on with smaller cases


def is_imported(module: str) -> bool:
    return module in sys.modules


def fault() -> None:
    ctypes.string_at(0)


def leak() -> int:
    return sum(np.ones(1 << 25).size for _ in [[np.ones(1 << 25) for _ in range(64)]])


def hang(number: int) -> None:
    if number % 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def warm_up(first_s: float, then_s: float) -> str:
    with watch.warming("x"):
        time.sleep(first_s)
    time.sleep(then_s)
    return "done"


def fork_and_stay(path: str) -> int:
    if pid := os.fork():
        Path(path).write_text(str(pid))
        return pid
    time.sleep(600)
    os._exit(0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its death does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_results_come_back(pool):
    assert pool.submit(pow, 2, 10).result(timeout=60) == 1024


def spin(cpu_s: float) -> None:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


def test_a_result_says_what_its_worker_spent_and_not_how_long_it_waited(pool):
    done = pool.submit(spin, 0.1), pool.submit(time.sleep, 0.3)
    assert [future.result() for future in done] == [None, None]
    assert 0.1 <= done[0].cpu_s < 0.3
    assert done[1].cpu_s < 0.1


def test_an_exception_is_one_line_with_its_type(pool):
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        pool.submit(divmod, 1, 0).result(timeout=60)


def test_leaving_the_program_is_an_error_of_the_task_alone(pool):
    with pytest.raises(TaskError, match="SystemExit: 0"):
        pool.submit(sys.exit, 0).result(timeout=60)
    assert pool.submit(abs, -3).result(timeout=60) == 3


def test_a_worker_that_dies_loses_only_its_task_and_says_where(pool):
    dead, alive = pool.submit(die_at_a_case, 5), pool.submit(abs, -3)
    with pytest.raises(WorkerLost, match=r"died with exit code 7; it printed last: .*last.x1b words") as lost:
        dead.result(timeout=60)
    assert lost.value.at == {"what": "family x", "content": {"case": 5}}
    assert alive.result(timeout=60) == 3


def test_a_gpu_that_a_case_has_spoilt_fails_that_case_alone():
    with IsolatingPool(1, limit_s=20.0) as pool:
        spoilt, later = pool.submit(spoil_the_gpu, 5), pool.submit(is_imported, "torch")
        with pytest.raises(TaskError, match="misaligned address") as error:
            spoilt.result(timeout=60)
        assert not isinstance(error.value, WorkerLost), "a process costs seconds, and a kernel has many cases"
        assert error.value.raised == "RuntimeError"
        assert error.value.at == {"what": "family x", "content": {"case": 5}}
        assert later.result(timeout=60) is False
        outcome, *_ = run([CallTask("a case", spoil_the_gpu, {"case": 6}, kernel="x")], pool)
        assert (outcome.at, outcome.lost_worker) == ({"what": "family x", "content": {"case": 6}}, False)


def test_a_segmentation_fault_names_its_signal_and_its_place(pool):
    with pytest.raises(WorkerLost, match=r"killed by SIGSEGV; it printed last: .*in fault") as lost:
        pool.submit(fault).result(timeout=60)
    assert lost.value.at is None


def write_into_every_socket() -> None:
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, struct.pack("!i", 4) + b"oops")
    time.sleep(600)


def test_a_worker_whose_pipe_has_something_else_in_it_is_lost_and_never_waited_for(pool):
    with pytest.raises(WorkerLost, match=r"something else wrote into its pipe \(UnpicklingError: .*stopped"):
        pool.submit(write_into_every_socket).result(timeout=15)
    assert pool.submit(abs, -3).result(timeout=60) == 3


def warm_up_in_a_fork() -> None:
    if not os.fork():
        with watch.warming("x"):
            time.sleep(600)
    time.sleep(600)


def test_a_process_that_a_task_forks_says_nothing_in_its_name():
    with IsolatingPool(1, limit_s=1.0) as executor, pytest.raises(WorkerLost, match="no answer within 1 s"):
        executor.submit(warm_up_in_a_fork).result(timeout=60)


def test_a_task_for_which_no_process_can_start_fails_alone(monkeypatch):
    def start(process):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with IsolatingPool(1, limit_s=20.0) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(multiprocessing.context.SpawnProcess, "start", start)
            with pytest.raises(WorkerLost, match="no process could be started for it: BlockingIOError"):
                executor.submit(abs, -3).result(timeout=60)
        assert executor.submit(abs, -3).result(timeout=60) == 3


def test_memory_beyond_the_limit_is_an_error_of_the_task_alone(pool):
    with pytest.raises(TaskError, match="MemoryError"):
        pool.submit(leak).result(timeout=60)
    assert pool.submit(abs, -3).result(timeout=60) == 3


def test_a_worker_that_hangs_is_stopped_and_a_warm_up_does_not_count():
    with IsolatingPool(1, limit_s=1.0) as executor:
        hung, after = executor.submit(time.sleep, 600), executor.submit(warm_up, 1.5, 0.1)
        with pytest.raises(WorkerLost, match="no answer within 1 s"):
            hung.result(timeout=60)
        assert after.result(timeout=60) == "done"
        with pytest.raises(WorkerLost, match="no answer within 1 s"):
            executor.submit(warm_up, 0.0, 600).result(timeout=60)


def several_cases(count, each_s, last_s):
    for i in range(count):
        watch.trying("family x", lambda i=i: {"case": i})
        time.sleep(each_s if i < count - 1 else last_s)
    return "done"


def test_the_limit_is_of_a_case_so_that_many_may_take_longer_together():
    with IsolatingPool(1, limit_s=1.0) as executor:
        assert executor.submit(several_cases, 4, 0.7, 0.1).result(timeout=60) == "done"
        with pytest.raises(WorkerLost, match="no answer within 1 s") as lost:
            executor.submit(several_cases, 3, 0.4, 600).result(timeout=60)
        assert lost.value.at == {"what": "family x", "content": {"case": 2}}


def warm_up_in_a_case(warm_s: float) -> None:
    watch.trying("family x", lambda: {"case": 0})
    warm_up(warm_s, 0.0)


def test_a_warm_up_has_a_limit_of_its_own_and_hangs_in_its_case(monkeypatch):
    with IsolatingPool(1, limit_s=1.0) as executor:
        assert executor.submit(abs, -3).result(timeout=60) == 3
        monkeypatch.setattr("fa3verify.campaign.pool.WARM_UP", 2)
        with pytest.raises(WorkerLost, match="no answer within 2 s") as lost:
            executor.submit(warm_up_in_a_case, 600).result(timeout=60)
        assert lost.value.at == {"what": "family x", "content": {"case": 0}}


def test_what_a_task_forked_ends_with_its_worker(tmp_path):
    with IsolatingPool(1, limit_s=20.0) as executor:
        forked = executor.submit(fork_and_stay, str(tmp_path / "pid")).result(timeout=60)
        assert is_alive(forked)
    assert ends(forked)


def daemon(path: str) -> None:
    """Fork twice into a new session, as daemons do, and write the pid of what stays."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    os._exit(0)


def in_a_new_session(path: str) -> None:
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(path).write_text(str(sleeper.pid))


def several(path: str) -> None:
    """Have twenty processes, of which each is the child of the one before."""
    for _ in range(20):
        if os.fork():
            break
    else:
        Path(path).write_text(str(os.getpid()))
    if os.getppid() != int(os.environ["SUPERVISOR"]):
        time.sleep(600)
        os._exit(0)


def leave(fork, path: str, then: str) -> int:
    """Have a process that stays and whose pid stands in a file; then die, hang, or go on."""
    os.environ["SUPERVISOR"] = str(os.getppid())
    fork(path)
    while not (os.path.exists(path) and Path(path).read_text()):
        time.sleep(0.01)
    if then == "dies":
        os._exit(0)
    if then == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    if then == "ends its supervisor":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    return int(Path(path).read_text())


FORKS = (daemon, in_a_new_session, several)
THEN = ("goes on", "dies", "hangs", "ends its supervisor")
QUICK = [(daemon, "goes on"), (in_a_new_session, "dies"), (several, "hangs"), (daemon, "ends its supervisor")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(("fork", "then"), sampled(product(FORKS, THEN), QUICK))
def test_nothing_that_a_task_leaves_outlives_its_worker(tmp_path, fork, then):
    path = tmp_path / "pid"
    words = {"dies": "died with exit code 0", "hangs": "no answer within 1 s", "ends its supervisor": "by SIGTERM"}
    with IsolatingPool(1, limit_s=1.0) as executor:
        left = executor.submit(leave, fork, str(path), then)
        if then == "goes on":
            assert is_alive(left.result(timeout=60))
        else:
            with pytest.raises(WorkerLost, match=words[then]):
                left.result(timeout=60)
            assert not is_alive(int(path.read_text()))
    assert not is_alive(int(path.read_text()))


def squares_by_processes(count: int) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, range(-count, 0))


def test_a_task_may_have_processes_of_its_own(pool):
    assert pool.submit(squares_by_processes, 3).result(timeout=60) == [3, 2, 1]


def test_a_task_that_is_given_up_ends_and_its_worker_is_replaced():
    with IsolatingPool(1, limit_s=60.0) as executor:
        running, waiting, after = (executor.submit(time.sleep, s) for s in (600, 600, 0))
        while not running.running():
            time.sleep(0.01)
        began = time.monotonic()
        for future in (waiting, running):
            future.give_up()
        assert after.result(timeout=60) is None
        assert waiting.cancelled()
        with pytest.raises(WorkerLost):
            running.result(timeout=60)
        assert time.monotonic() - began < 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda s: s.name)
def test_no_worker_outlives_a_parent_that_is_killed(number):
    program = """
import os, signal, time
from fa3verify.campaign.pool import IsolatingPool
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    pool = IsolatingPool(1, 60.0)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600).result()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.send_signal(number)
    assert ends(worker)


def test_nothing_is_accepted_after_shutdown():
    executor = IsolatingPool(1, limit_s=5.0)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(abs, 1)


def test_a_time_that_is_over_and_an_error_end_what_runs():
    began_s = time.monotonic()
    with processes(1) as executor:
        assert executor.submit(warm_up, 0.0, 0.0).result() == "done"  # it has started and imported this module
        tasks = [CallTask("", warm_up, {"first_s": 0.0, "then_s": then_s}) for then_s in (0.0, 600.0, 600.0)]
        assert [outcome.value for outcome in run(tasks, executor, until=time.monotonic() + 2.0)] == ["done"]
    with pytest.raises(ValueError, match="of the one who waits"), processes(1) as executor:  # noqa: PT012
        executor.submit(time.sleep, 600)
        raise ValueError("of the one who waits")
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("3", "3")])
def test_a_process_has_one_thread_of_every_library_unless_the_user_says_otherwise(monkeypatch, given, wanted):
    """Torch's compiler among them: each process would start as many of its own as the machine has cores."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    for name in names:
        monkeypatch.setenv(name, given or "1")
        if given is None:
            monkeypatch.delenv(name)
    with processes(1) as executor:
        assert [executor.submit(os.getenv, name).result() for name in names] == [wanted] * 4


def held(folder: Path) -> tuple[str, float, float]:
    """Work for 0.2 s on the GPU that this process sees, as a launch does: one at a time. Return which, and when."""
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    with (folder / device).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began_s = time.monotonic()
        time.sleep(0.2)
        return device, began_s, time.monotonic()


@pytest.mark.parametrize(("devices", "at_once"), [("3", 1), ("3,GPU-5", 2)])
def test_workers_are_dealt_out_to_gpus_which_then_work_at_the_same_time(tmp_path, monkeypatch, devices, at_once):
    monkeypatch.setenv(DEVICES_VARIABLE, devices)
    with processes(4) as executor:
        calls = [future.result() for future in [executor.submit(held, tmp_path) for _ in range(12)]]
    assert {device for device, *_ in calls} == {*devices.split(",")}
    most = max(sum(began_s <= at_s < ended_s for _, began_s, ended_s in calls) for _, at_s, _ in calls)
    assert most == at_once


@pytest.mark.parametrize(("visible", "wanted"), [("", {"0", "1"}), ("2,GPU-7", {"2", "GPU-7"})])
def test_all_devices_are_those_that_this_process_may_use(monkeypatch, tmp_path, visible, wanted):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(DEVICES_VARIABLE, "all")
    with processes(2) as executor:
        calls = [future.result() for future in [executor.submit(held, tmp_path) for _ in range(4)]]
    assert {device for device, *_ in calls} == wanted


def test_a_worker_that_is_replaced_keeps_its_gpu():
    with IsolatingPool(1, limit_s=20.0, devices=["7"]) as executor:
        with pytest.raises(WorkerLost):
            executor.submit(os._exit, 3).result(timeout=60)
        assert executor.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result(timeout=60) == "7"


def test_a_call_that_cannot_be_sent_raises_at_once(pool):
    """It ended the thread that sends it, and whoever asked waited without end."""
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"[Pp]ickle"):
        pool.submit(lambda: 1)
    assert pool.submit(abs, -1).result(timeout=60) == 1
