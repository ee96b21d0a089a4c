"""demo/workload.py: what the demonstration's chats must be like for the demonstration to show anything."""

from __future__ import annotations

import re
import statistics

import pytest

from pagedkv.demo.workload import LONGEST_WORKLOAD, SYSTEM_PROMPT, make_chats
from pagedkv.errors import InvalidRequestError

CHATS = make_chats(2000, seed=7)


def words_and_marks(text: str) -> int:
    """A stand-in for tokens: every word and every punctuation mark."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def test_a_seed_gives_the_same_chats_and_another_seed_others() -> None:
    assert make_chats(50, seed=7) == CHATS[:50]
    assert make_chats(50, seed=8) != CHATS[:50]


def test_all_chats_share_one_system_prompt_of_some_pages() -> None:
    assert {chat.system for chat in CHATS} == {SYSTEM_PROMPT}
    assert 150 <= words_and_marks(SYSTEM_PROMPT) <= 210


def test_the_largest_workload_asks_no_question_twice() -> None:
    chats = make_chats(LONGEST_WORKLOAD, seed=7)
    assert len({chat.user for chat in chats}) == len(chats) == LONGEST_WORKLOAD


def test_prompts_vary_from_one_line_to_a_page_of_notes() -> None:
    lengths = sorted(words_and_marks(chat.user) for chat in CHATS)
    assert lengths[0] <= 15
    assert 250 <= lengths[-1] <= 350
    assert statistics.median(lengths) < 30
    assert 0.15 < sum(length > 60 for length in lengths) / len(lengths) < 0.35


def test_every_question_reads_as_a_sentence() -> None:
    for chat in CHATS:
        assert chat.user == chat.user.strip()
        assert not re.search(r"[{}]|  |(^|\W)a [aeio]\w", chat.user)


def test_answers_are_mostly_short_and_sometimes_long() -> None:
    lengths = [chat.max_tokens for chat in CHATS]
    assert (min(lengths), max(lengths)) == (8, 192)
    assert 45 <= statistics.mean(lengths) <= 65
    assert statistics.median(lengths) < statistics.mean(lengths) - 10
    assert sum(length in (8, 192) for length in lengths) < 0.1 * len(lengths)


@pytest.mark.parametrize("count", [-1, LONGEST_WORKLOAD + 1])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(count)):
        make_chats(count, seed=7)


def test_no_chats_are_no_chats() -> None:
    assert make_chats(0, seed=7) == []
