"""Row and answers of a text run: the fields for prompts, sampling, weights, failed gates. An
answer on the screen: wrapped by words, coloured by source, numbers next to it."""

import hashlib
import json
import os
import pty
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Outcome, Source, Speculation
from mpissd.common.row import Row, flat
from mpissd.engine.comm.topology import Refused
from mpissd.engine.model.transformer.sources import open_checkpoint, origin_of
from mpissd.engine.round.target import RoundResult
from mpissd.engine.text.answer import AnswerText
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.lab.measure import beside, run
from mpissd.lab.show import MARGIN, Meter, Painter, Piece, Show, harmless, width_of
from mpissd.lab.tables.pair import check_alike
from tests.text import tiny
from tests.text.screen import Screen
from tests.tiny_pair import TinyPair, tiny_pair

TWO = "1,2,3;4,5"


def answered(pair: TinyPair, out: Path, **flags: Any) -> dict[str, Any]:
    """The row of a run of text in this process."""
    told = {"workload": "text", "backend": "numpy", "forward": "transformer", "progress": "off"}
    given = {**told, "mode": "ar", "prompt_ids": TWO, "num_tokens": 8, **flags}
    if given["mode"] != "ar":
        given |= {"draft": str(pair.draft), "num_drafts": 0}
    assert run.execute(RunConfig(target=str(pair.target), out=str(out), **given)) == 0
    return flat(json.loads((out / "runs.jsonl").read_text().splitlines()[-1]))


def test_a_row_tells_its_prompts_and_how_it_sampled(pair: TinyPair, tmp_path: Path) -> None:
    row = answered(pair, tmp_path, temperature=0.5, top_p=0.9)
    told = hashlib.sha256(b"1 2 3\n4 5\n").hexdigest()
    assert (row["top_p"], row["stop"], row["prompts_sha256"]) == (0.9, [], told)
    assert row["lm_head"] is True
    other = answered(pair, tmp_path, temperature=0.5, top_p=0.9, prompt_ids="1,2,4;4,5")
    with pytest.raises(ConfigError, match="prompts_sha256="):
        check_alike(Row.from_dict(row), Row.from_dict(other))
    with pytest.raises(ConfigError, match="top_p="):
        check_alike(Row.from_dict(row), Row.from_dict({**row, "top_p": 1.0}))
    older = {name: value for name, value in row.items() if name not in ("top_p", "prompts_sha256")}
    check_alike(Row.from_dict(older), Row.from_dict({**row, "tok_per_s": 1.0}))


def test_a_row_doubts_its_draft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If not, the run prints it once on stderr; for a plain draft it is unknown."""
    pair = tiny_pair(tmp_path / "pair", masks=0)
    assert answered(pair, tmp_path, mode="sd")["weights"]["draft"]["made_for_target"] is None
    assert "was made for" not in capfd.readouterr().err
    other = tiny_pair(tmp_path / "other", seed=7).target
    config = pair.draft / "config.json"
    told = json.loads(config.read_text())
    for maker, expected in ((pair.target, True), (other, False)):
        about = origin_of(open_checkpoint(str(maker)))
        config.write_text(json.dumps({**told, "mpissd": about}))
        for _ in range(2):
            row = answered(pair, tmp_path, mode="sd")
            assert row["weights"]["draft"]["made_for_target"] is expected
        lines = [line for line in capfd.readouterr().err.splitlines() if "was made for" in line]
        assert len(lines) == (not expected) and all(x.startswith("mpissd: draft=") for x in lines)


def test_flagged_answers(pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "violations", lambda *_: ["batch_size is 4", "so it is"])
    with pytest.raises(Refused):
        answered(pair, tmp_path)
    (path,) = (tmp_path / "text").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["gates"] for line in lines] == [["batch_size is 4", "so it is"]] * 2
    assert json.loads((tmp_path / "flagged.jsonl").read_text())["gates"] == lines[0]["gates"]


def test_rivals_answer_the_same_prompt(
    pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(beside, "_LATE_S", 1e9)
    monkeypatch.setattr(beside, "_PASS_S", 1e-9)
    flags: dict[str, Any] = {"mode": "sd", "beside": "all", "prompt_ids": "1,2,3", "lookahead": 2}
    flags["beside_s"] = 0
    answered(pair, tmp_path, **flags, num_tokens=30)
    *_, row = capsys.readouterr().out.splitlines()
    uses = json.loads(row)["beside"]["uses"]
    names = [use["name"] for use in uses]
    assert names[:2] == ["SD inline K=2 on 1 core", "AR on 1 core"]
    # Its best K, if another, and its draft with masks.
    assert all(re.match(r"SD inline (in one forward )?K=", name) for name in names[2:])
    counts = [len(use["speeds"]) for use in uses]  # a slow use is not measured again
    assert counts[1] == max(counts) == 3 and min(counts) >= 2 and min(uses[-1]["speeds"]) > 0
    rows = [flat(json.loads(x)) for x in (tmp_path / "beside/runs.jsonl").read_text().splitlines()]
    counted = rows[len(uses) :]  # after the warm-up, from the second use on
    assert (counted[0]["mode"], len(counted)) == ("ar", sum(counts))
    assert {row["num_tokens"] for row in counted} == {30}
    answered(pair, tmp_path, **flags, num_tokens=4)  # another configuration
    assert "an answer of fewer than 6 rounds" in capsys.readouterr().out
    answered(pair, tmp_path / "all", **flags | {"prompt_ids": "1,2;3;4;5,6"}, num_tokens=50)
    assert "core, on 3 of 4 prompts." in " ".join(capsys.readouterr().out.split())
    rows = [json.loads(x) for x in (tmp_path / "all/beside/runs.jsonl").read_text().splitlines()]
    turns = {(row["provenance"]["sweep"]["turn"], flat(row)["prompts_sha256"]) for row in rows}
    assert [turn for turn, _ in sorted(turns)] == [0, 1, 2, 3]
    assert len({own for _, own in turns}) == 3
    answered(pair, tmp_path, mode="ar", beside="ar")
    assert "→ Cannot tell what pays: no two uses were measured" in capsys.readouterr().out
    (tmp_path / "beside" / "beside").touch()
    answered(pair, tmp_path / "beside", **flags)  # the answer and its row are kept
    assert "no comparison: out=" in capsys.readouterr().out


def test_a_terminal_gets_the_answer_and_where_its_row_is(
    pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lead, follower = pty.openpty()
    monkeypatch.setenv("MPISSD_TERMINAL", f"{os.uname().nodename}:{os.ttyname(follower)}")
    try:
        answered(pair, tmp_path, mode="sd", beside="ar", beside_s=0)
        *told, _, last = capsys.readouterr().out.splitlines()
        assert any(line.startswith("→") for line in told)
        assert last.endswith(f"last line of {tmp_path}/runs.jsonl")
        answered(pair, tmp_path, json=True)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["mode"] == "ar"
    finally:
        os.close(lead)
        os.close(follower)


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
        show = Show(AnswerText(words, stop, {1}, ()), lambda new, _: None, has_cache=True)
        show.take(a_round([0], [rounds], [4], letters[0]))
        assert show.is_over and show.meter.num_tokens == kept


def test_the_first_sequence_is_shown_wherever_it_stands_in_the_batch(words: Tokenizer) -> None:
    shown: list[Piece] = []
    show = Show(AnswerText(words, [], {1}, ()), lambda new, _: shown.extend(new), has_cache=True)
    letters = [tiny.of_byte(ord(c)) for c in "abcdef"]
    show.take(a_round([3, 0], [letters[:4], letters[:4]], [4, 2], letters[5]))
    assert shown == [("a", "cache"), ("b", "cache"), ("f", "bonus")]
    show.take(a_round([3], [letters[:4]], [4], letters[5]))  # sequence 0 is gone
    assert len(shown) == 3 and show.meter.num_rounds == 1
