"""Text while it arrives: only whole characters, and nothing after a stop."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.text import TextEndings
from mpissd.engine.workload.tokenizer import AnswerText, Tokenizer, load_tokenizer
from tests.text import tiny

END = 1  # <|e|>
TOKENIZERS: list[Tokenizer] = []


@pytest.fixture(autouse=True, scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    TOKENIZERS[:] = [load_tokenizer(str(tiny.write(tmp_path_factory.mktemp("stream"))))]


def pieces(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    stops: Sequence[str] = (),
    ends: Collection[int] = (),
) -> list[str]:
    """The text that each token completes, and the rest at the end."""
    text = AnswerText(tokenizer, stops, ends)
    return [*(text.push(token) for token in tokens), text.flush()]


def of_bytes(text: str) -> list[int]:
    return [tiny.of_byte(byte) for byte in text.encode()]


@given(st.lists(st.integers(0, 263), max_size=30), st.text(max_size=9))
def test_pieces_are_whole_characters_of_the_text(tokens: list[int], text: str) -> None:
    found = pieces(TOKENIZERS[0], of_bytes(text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in text
    assert "".join(pieces(TOKENIZERS[0], tokens)) == TOKENIZERS[0].decode(tokens)
    assert pieces(TOKENIZERS[0], of_bytes("é")[:1]) == ["", "\ufffd"]


@given(st.data(), st.lists(st.text("helo", min_size=1, max_size=4), max_size=3))
def test_a_text_is_cut_before_its_first_stop(data: st.DataObject, stops: list[str]) -> None:
    """The tiny vocabulary has tokens of one letter and of several."""
    tokens = data.draw(
        st.lists(st.sampled_from([*of_bytes("helo"), *range(259, 264)]), max_size=12)
    )
    text, shown, all_of_it = AnswerText(TOKENIZERS[0], stops, {END}), "", ""
    for n, token in enumerate(tokens, 1):
        shown += text.push(token)
        all_of_it = TOKENIZERS[0].decode(tokens[:n])
        ends = [at for stop in stops if (at := all_of_it.find(stop)) >= 0]
        assert (text.ended == "stop") == bool(ends)
        assert len(shown) <= min(ends, default=len(all_of_it))
        if ends:
            assert shown == all_of_it[: min(ends)] and text.flush() == ""
            return
    assert shown + text.flush() == all_of_it


def test_a_stop_token_ends_the_text_and_gives_what_was_held() -> None:
    assert pieces(TOKENIZERS[0], [*of_bytes("a"), END, *of_bytes("b")], ["ab"], {END}) == [
        "",
        "a",
        "",
        "",
    ]


def test_endings_count_the_tokens_up_to_the_one_that_ends() -> None:
    endings = TextEndings(TOKENIZERS[0], ["lo\n"], {END}, {7: 99, 8: 99, 9: 5})
    assert endings.kept(7, 0, of_bytes("hel")) is None
    assert endings.kept(8, 0, [5, END, 9]) == 2
    assert endings.kept(7, 3, of_bytes("lo\nxx")) == 3
    assert endings.kept(7, 0, of_bytes("\n")) is None  # an id that is used again starts afresh
    assert [endings.kept(9, 0, [3, 4]), endings.kept(9, 2, [3, 4, 5, END])] == [None, 3]


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    endings = TextEndings(None, [], {END}, {0: 99})
    assert [endings.kept(0, 0, [3, 4]), endings.kept(0, 2, [END])] == [None, 1]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        TextEndings(None, ["x"], {END}, {})


def test_decoders_that_drop_a_first_space_keep_the_spaces_between(tmp_path: Path) -> None:
    """A SentencePiece vocabulary marks words by ▁, and its decoder strips the first."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models

    raw = Raw(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, "c"))
    raw.decoder = decoders.Metaspace()
    raw.save(str(tmp_path / "tokenizer.json"))
    assert "".join(pieces(load_tokenizer(str(tmp_path)), [0, 1, 2, 1])) == "a bc b"
