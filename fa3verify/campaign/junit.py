"""A campaign's verdict as JUnit XML, for the pages of a CI."""

from __future__ import annotations

from fa3verify.campaign.run import Run
from fa3verify.judging.verdict import Part
from fa3verify.records import plain
from fa3verify.text import one_line


def junit(run: Run) -> str:
    """Return the verdict as JUnit XML: a test case for each kernel and law, each gate row, and each other finding.

    A kernel of which too little was tried is an error, a question a failure unless it only stands in the summary. The
    bits that a kernel loses over the ideal one are properties of the suite: ``NAME.bits_lost.mean``, ``.worst`` and
    ``.worst_family``. It needs the extra ``junit``.
    """
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    rows = []
    for kernel in run.kernels:
        rows += [(kernel.name, f"law {law.law}", law.status, law.message or "") for law in kernel.laws]
        if reason := kernel.inconclusive:
            rows.append((kernel.name, "coverage", "inconclusive", reason))
    for row in run.gate:
        words = f"observed {row.observed}, limit {row.limit}"
        rows.append((row.kernel, f"{row.layer} {row.rule} {row.family}", row.status, words))
    others = [
        finding for finding in run.failures if finding.what.part not in (Part.LAW, Part.BITS, Part.BOUND, Part.BASELINE)
    ]
    rows += [(finding.kernel, str(finding.what), "fail", finding.message) for finding in others]
    is_asked = "fail" if run.verdict in ("fail", "question") else "pass"
    rows += [(each.kernel, f"contract: {each.meaning}", is_asked, each.answer) for each in run.questions]
    results = {"fail": Failure, "inconclusive": Error, "not compared": Skipped, "not_tried": Skipped}
    suite = TestSuite("fa3verify")
    for kernel, name, status, message in rows:
        case = TestCase(one_line(name), one_line(kernel))
        if status in results:
            case.result = [results[status](one_line(message))]
        suite.append(case)  # add_testcase counts all of them again each time
    suite.update_statistics()
    suite.time = run.wall_s
    for kernel in run.kernels:
        for key, value in plain(kernel.bits_lost).items() if kernel.bits_lost else ():
            suite.add_property(one_line(f"{kernel.name}.bits_lost.{key}"), str(value))
    xml = JUnitXml()
    xml.add_testsuite(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{xml.tostring().decode()}\n'
