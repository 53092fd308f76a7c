"""The time of a run is divided among the operations, without gaps or overlaps."""

import pytest

from jaxprtool.commands.profile.lines import HANDED_ON, TimeSpan, clipped, divided


def test_operations_that_run_at_the_same_time_share_it():
    spans = [TimeSpan(0, 10, "a"), TimeSpan(4, 6, "b")]
    assert divided(spans) == {"a": 9, "b": 1}


def test_a_loop_has_only_the_time_when_no_operation_runs():
    spans = [TimeSpan(0, 10, "loop", 2), TimeSpan(1, 4, "a"), TimeSpan(5, 9, "a")]
    assert divided(spans) == {"loop": 3, "a": 7}


def test_of_nested_loops_the_inner_one_has_the_overhead():
    spans = [TimeSpan(0, 10, "outer", 2), TimeSpan(2, 8, "inner", 2), TimeSpan(3, 5, "a")]
    assert divided(spans) == {"outer": 4, "inner": 4, "a": 2}


def test_operations_of_the_host_have_the_remaining_time():
    spans = [TimeSpan(0, 10, "dispatch", 5), TimeSpan(2, 8, "between", 3), TimeSpan(3, 5, "a")]
    assert divided(spans) == {"dispatch": 4, "between": 4, "a": 2}


def test_work_on_other_threads_has_the_time_that_others_leave_idle():
    # Two threads: from 0 to 4 both are busy, from 4 to 8 one of them, then none.
    spans = [TimeSpan(0, 4, "a"), TimeSpan(0, 8, "b"), TimeSpan(0, 10, "product", HANDED_ON)]
    assert divided(spans) == {"a": 2, "b": 4, "product": 4}


def test_the_parts_add_up_to_the_busy_time():
    spans = [TimeSpan(i % 7, i % 7 + i % 5 + 1, i % 3, i % 4) for i in range(50)]
    assert sum(divided(spans).values()) == pytest.approx(11)


def test_a_span_belongs_to_the_window_in_which_it_starts():
    windows = [(0, 10), (20, 30)]
    spans = [
        TimeSpan(5, 25, "a"),
        TimeSpan(12, 25, "b"),
        TimeSpan(21, 22, "c"),
        TimeSpan(31, 32, "d"),
    ]
    assert clipped(spans, windows) == [TimeSpan(5, 10, "a"), TimeSpan(21, 22, "c")]
