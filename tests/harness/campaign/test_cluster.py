"""A Dask cluster: the data of one process bit for bit, whatever becomes of its workers; what is lost is a failure."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from pathlib import Path

import pytest
import xarray as xr

from fa3verify.campaign import executors, plan
from fa3verify.campaign.executors import Cluster
from fa3verify.campaign.pool import TaskError, WorkerLost
from fa3verify.campaign.tasks import CallTask, execute
from fa3verify.commands import verify as jobs
from fa3verify.report import dataset
from tests.harness.campaign.cluster_tasks import double, process
from tests.harness.campaign.test_pool import ends

KERNEL = "twin.quantize"


of_a_cluster = pytest.mark.nightly  # a scheduler and its workers take a minute to begin, be killed and come back


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and two workers in processes of their own, which come back when they are killed."""
    from distributed import LocalCluster

    folder = str(tmp_path_factory.mktemp("dask"))
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=folder, silence_logs=50
    ) as found:
        yield found


def settings(out: Path, scheduler: str | None) -> jobs.Settings:
    return jobs.Settings((KERNEL,), "quick", 0, out, workers=1, scheduler=scheduler)


def data_of(out: Path) -> xr.DataTree:
    return dataset.load(out / "run.nc")


@of_a_cluster
def test_a_cluster_whose_workers_are_killed_gives_the_data_of_one_process(cluster, tmp_path, monkeypatch):
    whole, ended, done = plan.plan, [], []
    monkeypatch.setattr(plan, "plan", lambda *args: whole(*args)[:8])

    def kill(total, outcome) -> None:
        done.append(outcome)
        if len(done) in (2, 5):
            ended.append(cluster.workers[len(ended) % 2].pid)
            os.kill(ended[-1], signal.SIGKILL)

    summary = jobs.run(settings(tmp_path / "cluster", cluster.scheduler_address), kill)
    jobs.run(settings(tmp_path / "alone", None), lambda total, outcome: None)
    many, one = data_of(tmp_path / "cluster"), data_of(tmp_path / "alone")
    assert len(set(ended)) == 2
    assert summary.failures == ()
    assert many.attrs["content_sha256"] == one.attrs["content_sha256"]
    for name in ("cases", "laws", "gate"):
        xr.testing.assert_identical(many[name].to_dataset(), one[name].to_dataset())
    assert sum(summary.cpu_s[KERNEL].values()) > 0


@of_a_cluster
def test_what_raises_hangs_or_ends_its_process_is_an_error_of_its_own(cluster):
    executor = Cluster(cluster.scheduler_address, 4.0)
    outcomes = execute([CallTask(str(x), double, {"x": x}) for x in (3, 0, -1, -2, 2)], executor)
    executor.shutdown()
    assert [o.value for o in outcomes] == [6, None, None, None, 4]
    words = ("SystemExit: 0", "killed by SIGKILL", "no answer within 4 s")
    assert [word in (o.error or "") for word, o in zip(words, outcomes[1:4])] == [True] * 3
    assert [o.lost_worker for o in outcomes] == [False, False, True, True, False]
    assert outcomes[2].at == {"what": "doubling", "content": {"x": -1}}


@of_a_cluster
def test_each_campaign_has_processes_of_its_own_so_that_an_edited_kernel_is_loaded_again(cluster):
    tasks, seen = [CallTask(str(x), process, {"_": x}) for x in range(6)], []
    for _ in range(2):
        executor = Cluster(cluster.scheduler_address, 4.0)
        seen.append({outcome.value for outcome in execute(tasks, executor)})
        executor.shutdown()
    assert all(1 <= len(pids) <= 2 and None not in pids for pids in seen)
    assert not seen[0] & seen[1]


@of_a_cluster
def test_a_worker_with_other_sources_judges_nothing(cluster, monkeypatch):
    monkeypatch.setattr(executors, "source_stamp", lambda: "of other sources")
    executor = Cluster(cluster.scheduler_address, 4.0)
    with pytest.raises(TaskError, match="other sources"):
        executor.submit(double, 3).result()
    executor.shutdown()


def test_a_task_lost_with_its_scheduler_is_an_error_and_a_cancelled_one_is_not():
    lost, unwanted = Future(), Future()
    futures = executors._Remote(lost), executors._Remote(unwanted)
    lost.cancel()
    assert futures[1].cancel()
    with pytest.raises(TaskError, match="scheduler is gone"):
        futures[0].result(timeout=5)
    assert futures[1].cancelled()
    assert not isinstance(futures[0].exception(), WorkerLost)


def terms(stamp: str) -> executors._Terms:
    return executors._Terms(stamp, "a campaign", 4.0, None)


def test_a_worker_runs_a_task_in_a_process_of_its_own_and_refuses_one_of_other_sources(monkeypatch):
    """The part of a cluster that its workers run, without one."""
    monkeypatch.setattr(executors, "_here", {})
    here = terms(executors.source_stamp())
    value, cpu_s = executors._run(here, process, (0,), {})
    assert value not in (os.getpid(), executors._run(here._replace(campaign="another"), process, (0,), {})[0])
    assert cpu_s >= 0
    assert list(executors._here) == [here._replace(campaign="another")]
    assert ends(value)
    error, _ = executors._run(terms("of other sources"), double, (3,), {})
    assert isinstance(error, TaskError)
    assert "other sources" in str(error)
    error, _ = executors._run(here._replace(campaign="another"), double, (0,), {})
    assert "SystemExit: 0" in str(error)
    for pool in executors._here.values():
        pool.shutdown()


def test_what_a_cluster_answers_is_what_its_task_gives():
    given = [Future() for _ in range(3)]
    futures = [executors._Remote(future) for future in given]
    given[0].set_result((6, 1.5))
    given[1].set_result((TaskError("ValueError: no"), 0.0))
    given[2].set_exception(OSError("the worker is\ngone"))
    assert (futures[0].result(timeout=5), futures[0].cpu_s) == (6, 1.5)
    for future, words in zip(futures[1:], ("ValueError: no", "OSError: the worker is gone")):
        with pytest.raises(TaskError, match=words):
            future.result(timeout=5)


def test_a_scheduler_that_does_not_answer_is_an_environment_error(tmp_path, monkeypatch):
    import dask
    import distributed  # whose defaults must be there before one of them is set, or the setting takes all away with it
    from click.testing import CliRunner

    from fa3verify.cli.main import main

    assert distributed.__version__
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        words = ["verify", KERNEL, "--quick", "--scheduler", "tcp://127.0.0.1:9", "--out", str(tmp_path)]
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 3
    assert "127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr
