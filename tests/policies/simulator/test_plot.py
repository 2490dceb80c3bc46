"""The picture of a simulation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.policies.simulator.plot import check_plot, draw, save_plot
from octavo.policies.simulator.rows import Kind, Row


def _row(kind: Kind, policy: str, share: float, hit_ratio: float | None, trace: str = "chat") -> Row:
    return Row(trace, kind, policy, round(1000 * share), share, 16, 50, hit_ratio=hit_ratio)


ROWS = [
    _row(Kind.POLICY, "lru", 0.10, 0.3),
    _row(Kind.POLICY, "lru", 0.01, 0.1),
    _row(Kind.POLICY, "lfu", 0.01, 0.15),
    _row(Kind.POLICY, "lfu", 0.10, None),
    _row(Kind.POLICY, "broken", 0.01, None),
    _row(Kind.OPTIMUM, "optimum", 0.01, 0.4),
    _row(Kind.OPTIMUM, "optimum", 0.10, 0.5),
    _row(Kind.BOUND, "bound", 0.01, 0.45),
    _row(Kind.LIMIT, "limit", 1.0, 0.6),
]


def test_a_line_for_each_policy_over_a_logarithmic_capacity() -> None:
    (axes,) = draw(ROWS).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines) == ["lru", "lfu", "optimum", "bound", "no eviction"]
    assert lines["lru"].get_xydata().tolist() == [[0.01, 0.1], [0.10, 0.3]]  # type: ignore[union-attr]  # an array
    assert lines["lfu"].get_xydata().tolist() == [[0.01, 0.15]]  # type: ignore[union-attr]  # an array
    assert (lines["optimum"].get_linestyle(), lines["no eviction"].get_linestyle()) == ("--", ":")
    assert list(lines["no eviction"].get_ydata()) == [0.6, 0.6]  # type: ignore[arg-type]  # an array
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1%", "2%", "5%", "10%"]
    assert axes.get_title() == "chat"


def test_a_panel_for_each_trace() -> None:
    rows = [*ROWS, *(row._replace(trace=name) for name in ("code", "rag") for row in ROWS[:2])]
    assert [axes.get_title() for axes in draw(rows).axes] == ["chat", "code", "rag"]


@pytest.mark.parametrize("rows", [[], ROWS[3:5], ROWS[1:2], ROWS[-1:], ROWS])
def test_it_is_a_png_whatever_there_is_to_show(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    save_plot(rows, path)
    written = path.read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert written[-8:-4] == b"IEND"


def test_nothing_is_registered_globally() -> None:
    draw(ROWS)
    assert "matplotlib.pyplot" not in sys.modules


def test_the_same_rows_give_the_same_picture(tmp_path: Path) -> None:
    save_plot(ROWS, tmp_path / "a.png")
    save_plot(ROWS, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'octavo\[bench\]'"):
        check_plot(tmp_path / "out.png")


def test_a_file_that_cannot_be_is_told_early(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"ends in \.png, not 'out\.svg'"):
        check_plot(tmp_path / "out.svg")
    with pytest.raises(InvalidRequest, match="there is no folder"):
        check_plot(tmp_path / "missing" / "out.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(InvalidRequest, match="cannot be saved"):
        save_plot(ROWS, tmp_path / "taken.png")
