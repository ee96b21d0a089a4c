"""Records: what is read is what was written, as far as it was; and what a record says of a request."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from monitor_support import finish, greedy, watched

from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.explain import explain
from pagedkv.monitor.frames import Frames
from pagedkv.monitor.picture import Picture
from pagedkv.monitor.record import Record, RecordWriter
from pagedkv.serve.replaying import Order, Player


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record of requests that wait, are preempted, and find each other's prefix."""
    path = tmp_path / "a.pkv"
    engine, monitor, clock = watched(7, max_batch_size=3)
    writer = RecordWriter(monitor, path)
    monitor.listeners.append(writer)
    for number in range(4):
        engine.add_request([number] * 20, greedy(40), request_id=f"different-{number}")
        clock.now += 0.25
    finish(engine, clock, 0.5)
    for number in range(2):
        engine.add_request("a" * 40, greedy(2), request_id=f"same-{number + 1}")
    finish(engine, clock, 0.5)
    engine.add_request([0] * 20, greedy(2), request_id="again-1", namespace="salt")
    finish(engine, clock, 0.5)
    writer.close()
    return path


def test_a_record_ends_with_the_picture_that_there_was(tmp_path: Path) -> None:
    engine, monitor, clock = watched()
    writer = RecordWriter(monitor, tmp_path / "a.pkv")
    monitor.listeners.append(writer)
    for text in ("a" * 40, "b" * 20, "a" * 40):
        engine.add_request(text, greedy(3))
    for _ in range(3):
        clock.now += 1.0
        engine.step()
    writer.close()
    seen = Picture()
    for moment in Record(tmp_path / "a.pkv"):
        seen.apply(moment.frame)
    now = Picture()
    now.apply(Frames(monitor, every_token=False).take(monitor.refresh()))
    for name in ("state", "account", "parent", "since"):
        assert getattr(seen, name).tolist() == getattr(now, name).tolist(), name
    assert {row: pages.tolist() for row, pages in seen.tables.items()} == {
        row: pages.tolist() for row, pages in now.tables.items()
    }
    finish(engine)


def test_a_record_that_was_cut_off_is_read_up_to_there(path: Path, tmp_path: Path) -> None:
    """FAILURES 128: at every length, the steps that are whole, or a refusal."""
    content, whole = path.read_bytes(), len(Record(path))
    cut, lengths = tmp_path / "cut.pkv", []
    for end in range(0, len(content), 37):
        cut.write_bytes(content[:end])
        with contextlib.suppress(InvalidRequestError):
            lengths.append(len(Record(cut)))
    assert lengths == sorted(lengths)
    assert 0 < lengths[len(lengths) // 2] < whole


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("hello")
    with pytest.raises(InvalidRequestError, match="is no record of pagedkv"):
        Record(other)
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        Record(tmp_path / "none")


def test_explain_says_why_a_request_waited_and_was_preempted(path: Path) -> None:
    record = Record(path)
    every = {name: "\n".join(explain(record, name)) for name in ("different-3", "same-2", "again-1")}
    assert "came with 20 prompt tokens, and asked for 40 at most" in every["different-3"]
    assert "nothing of its prompt was cached; of the rest, nobody has sent it before" in every["different-3"]
    assert "ended by length with 40 tokens" in every["different-3"]
    assert "waited for its prefix, which another request is just computing" in every["same-2"]
    assert "32 prompt tokens were cached; of the rest, only its last tokens were left" in every["same-2"]
    assert "only another tenant or salt has had it" in every["again-1"]
    together = "\n".join("\n".join(explain(record, f"different-{number}")) for number in range(4))
    assert "lost its pages to make room for others (time 1), and waited again" in together
    assert "waited for pages: it needs" in together


def test_explain_needs_one_request(path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="2 requests begin with 'same': same-1, same-2"):
        list(explain(Record(path), "same"))
    with pytest.raises(InvalidRequestError, match="no request 'nobody' in this record; it has 7"):
        list(explain(Record(path), "nobody"))


def test_a_player_shows_at_every_place_what_playing_up_to_it_shows(path: Path) -> None:
    record = Record(path)
    player, straight, looks = Player(record), Picture(), []
    for moment in record:
        straight.apply(moment.frame)
        looks.append((straight.state.tolist(), {row: ids.tolist() for row, ids in straight.tables.items()}))
    last = len(record) - 1
    for number in (last, 0, last // 2, last // 2 + 1, 3, last, -5, 10**6):
        player.obey(Order(frame=max(number, 0)))
        at = min(max(number, 0), last)
        assert player.at == at
        assert player.picture.state.tolist() == looks[at][0]
        assert {row: ids.tolist() for row, ids in player.picture.tables.items()} == looks[at][1]


def test_a_player_plays_by_the_time_of_the_record(path: Path) -> None:
    player = Player(Record(path))
    player.obey(Order(play=True))
    player.advance(5.0)
    begin = player.times[0]
    assert player.times[player.at] <= begin + 5.0 < player.times[player.at + 1]
    player.obey(Order(speed=1000.0))
    player.advance(5.0)
    assert (player.at, player.playing) == (len(player.times) - 1, False)
    player.obey(Order(step=-1))
    assert player.at == len(player.times) - 2
    player.obey(Order(frame=len(player.times) - 1))
    player.obey(Order(play=True))
    assert (player.at, player.playing) == (0, True)
