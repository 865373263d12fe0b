"""The drops of a run over the lives of its trainers."""

from __future__ import annotations

from pathlib import Path

from services.trainer.drops import FILE, Drops, read_drops


def test_counts_and_names_outlive_the_process_and_a_torn_last_line(tmp_path: Path) -> None:
    first = Drops.of(tmp_path, 1, {})
    assert first.add("a", "1-0", "stale")
    assert first.add("b", "", "preference")
    assert first.add("c", "2-0", "payload_damaged", buried=True)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"trajectory":"d"')

    second = Drops.of(tmp_path, 2, {})

    assert second.counts == {"stale": 1, "preference": 1, "payload_damaged": 1}
    assert second.let_go() == {"a", "b"}
    assert (second.begun("a", "1-0"), second.begun("a", "9-0"), second.begun("c", "2-0")) == ("stale", None, None)
    assert not second.add("c", "2-0", "payload_damaged", buried=True)
    assert second.add("d", "3-0", "stale")
    assert [drop.trajectory for drop in read_drops(tmp_path / FILE)] == ["a", "b", "c", "d"]


def test_what_is_done_is_not_begun(tmp_path: Path) -> None:
    drops = Drops.of(tmp_path, 1, {})
    drops.add("a", "1-0", "stale")
    assert drops.begun("a", "1-0") == "stale"
    drops.done("a", "1-0")
    assert drops.begun("a", "1-0") is None
    assert drops.counts == {"stale": 1}


def test_a_trainer_that_was_replaced_adds_nothing_that_counts(tmp_path: Path) -> None:
    stopped = Drops.of(tmp_path, 1, {})
    stopped.add("a", "1-0", "stale")
    Drops.of(tmp_path, 2, {})
    stopped.add("b", "2-0", "stale")

    third = Drops.of(tmp_path, 3, {})

    assert third.counts == {"stale": 1}
    assert third.let_go() == {"a"}
    assert third.begun("b", "2-0") is None


def test_what_an_earlier_release_has_counted_without_a_line_still_counts(tmp_path: Path) -> None:
    assert Drops.of(tmp_path, 1, {"stale": 3}).counts == {"stale": 3}
