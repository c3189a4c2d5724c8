"""Figures as SVG: what is left out of matplotlib's text changes nothing that is seen."""

from __future__ import annotations

import re

from fa3verify.report import svg


def test_what_is_left_out_of_a_figure_is_seen_by_nobody():
    with svg.styled():
        figure = svg.new_figure()
        axes = figure.add_subplot()
        axes.plot([0, 1.23456789], [0, 1], color=svg.SERIES[0])
        axes.set_title("0.123456 and #id")
        text = svg.render(figure, "f-x", "a line")
    assert "0.123456 and #id" in text
    assert not re.search(r'[ "]\d+\.\d{3,}', text.replace("0.123456", ""))
    ids = re.findall(r'\bid="([^"]+)"', text)
    named = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)}
    assert named == set(ids)
    assert len(ids) == len(named)
    assert "<g/>" not in text
