"""An answer on the screen: wrapped by words, coloured by source, numbers next to it."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.rounds import Outcome, Source, Speculation
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.workload.tokenizer import AnswerText, Tokenizer
from mpissd.lab.show import MARGIN, Meter, Painter, Piece, Show, harmless, width_of
from tests.text import tiny
from tests.text.screen import Screen

GREEN, YELLOW = "32", "33"


def painted(pieces: list[Piece], columns: int, *, colours: bool = True, margin: str = "") -> Screen:
    screen = Screen(columns)
    painter = Painter(screen.write, columns, colours=colours)
    for piece in pieces:
        painter.add([piece], margin)
    painter.end()
    return screen


def split(text: str, size: int, source: str = "bonus") -> list[Piece]:
    return [(text[at : at + size], source) for at in range(0, len(text), size)]


def test_words_wrap_whole_also_where_a_word_arrives_in_parts() -> None:
    text = "speculative decoding drafts tokens ahead"
    screen = painted(split(text, 3), 22, colours=False)
    assert screen.lines == ["speculative decoding", "drafts tokens ahead", ""]


@given(st.text("ab \n日é👋", max_size=120), st.integers(1, 7), st.integers(30, 110))
def test_no_character_is_lost_or_leaves_its_column(text: str, size: int, columns: int) -> None:
    """Screen asserts that nothing is written beyond the last column."""
    screen = painted(split(text, size, "cache"), columns, margin="2.00 tok/round")
    width = columns - MARGIN - 3 if columns >= 72 else columns
    left = "".join(c for row in screen.cells for c, _ in row[:width])
    assert left.split() == [] or "".join(left.split()) == "".join(text.split())
    assert max(sum(map(width_of, line[:width])) for line in screen.lines) <= columns


def test_every_token_has_the_colour_of_its_source_also_where_its_word_moved() -> None:
    pieces = [("green", "cache"), ("yel", "jit"), ("low", "fast"), ("plain", "bonus")] * 9
    screen = painted(pieces, 90)
    assert screen.coloured(GREEN) == "green" * 9
    assert screen.coloured(YELLOW) == "yellow" * 9
    assert len(screen.lines) > 2


def test_numbers_stand_in_the_margin_of_every_line() -> None:
    screen = painted(split("word " * 30, 5), 100, margin="2.50 tok/round")
    full = [line for line in screen.lines if line]
    assert len(full) > 2 and all(line.endswith("2.50 tok/round") for line in full)
    assert painted([("\n\n", "bonus")], 100, margin="2.50 tok/round").lines == [""] * 4
    narrow = painted(split("word " * 30, 5), 60, margin="2.50 tok/round")
    assert not any("tok/round" in line for line in narrow.lines)


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\tc\r\nd\x07\x9b") == "a\ufffd[2Jb    c\nd\ufffd\ufffd"
    painted([("\x1b]0;title\x07\x1b[2J", "bonus")], 80)  # Screen refuses control characters


def test_a_meter_leaves_out_the_round_that_waits_for_the_prompt() -> None:
    ticks = count(0, 2)  # each round takes 2 s
    meter = Meter(has_cache=True, clock=lambda: float(next(ticks)))
    meter.count(5, 1, 0)
    assert (meter.first_s, meter.hit_rate, meter.tok_per_s) == (2.0, None, None)
    meter.count(10, 2, 1)
    meter.count(12, 3, 1)
    assert meter.hit_rate == 0.5 and meter.tokens_a_round == 4
    assert meter.tok_per_s == pytest.approx((12 - 5) / 4)
    assert len(meter.short()) <= MARGIN
    assert meter.long().startswith("12 tokens in 3 rounds, 4.00 a round, hit rate 0.50, 1.8 tok/s")
    meter.has_cache = False
    assert meter.hit_rate is None and "hits" not in meter.short()


def a_round(
    ids: list[int], drafts: list[list[int]], accepted: list[int], bonus: int
) -> RoundResult:
    speculation = Speculation.empty(0, len(ids), 4)
    for row, tokens in enumerate(drafts):
        speculation.tokens[row, : len(tokens)] = tokens
        speculation.num_draft[row] = len(tokens)
        speculation.source[row], speculation.hit[row] = Source.CACHE, 1
    rows = [(name, 0, 0, k, bonus) for name, k in zip(ids, accepted, strict=True)]
    return RoundResult(speculation, Outcome(1, np.array(rows, np.int32)), 0.0)


def test_tokens_behind_the_end_of_an_answer_are_not_counted(words: Tokenizer) -> None:
    letters = [tiny.of_byte(ord(c)) for c in "abcd"]
    for stop, rounds, kept in ([["bc"], letters, 3], [[], [letters[0], 1, *letters[2:]], 2]):
        show = Show(AnswerText(words, stop, {1}), lambda new, _: None, has_cache=True)
        show.take(a_round([0], [rounds], [4], letters[0]))
        assert show.is_over and show.meter.num_tokens == kept


def test_the_first_sequence_is_shown_wherever_it_stands_in_the_batch(words: Tokenizer) -> None:
    shown: list[Piece] = []
    show = Show(AnswerText(words, [], {1}), lambda new, _: shown.extend(new), has_cache=True)
    letters = [tiny.of_byte(ord(c)) for c in "abcdef"]
    show.take(a_round([3, 0], [letters[:4], letters[:4]], [4, 2], letters[5]))
    assert shown == [("a", "cache"), ("b", "cache"), ("f", "bonus")]
    show.take(a_round([3], [letters[:4]], [4], letters[5]))  # sequence 0 is gone
    assert len(shown) == 3 and show.meter.num_rounds == 1


def test_a_terminal_is_opened_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os
    import pty

    from mpissd.lab import show

    lead, follower = pty.openpty()
    path, host = os.ttyname(follower), os.uname().nodename
    try:
        monkeypatch.setenv(show.VARIABLE, f"{host}:{path}")
        with show.open_terminal() as found:
            assert found is not None and show.columns_of(found) == 80
            found.write("hello\n")
            found.flush()
        assert os.read(lead, 100) == b"hello\r\n"
        for other in (f"elsewhere:{path}", f"{host}:{tmp_path / 'none'}", f"{host}:/dev/null", ""):
            monkeypatch.setenv(show.VARIABLE, other)
            with show.open_terminal() as found:
                assert found is None
    finally:
        os.close(lead)
        os.close(follower)
