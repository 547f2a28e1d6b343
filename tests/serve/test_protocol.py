"""The messages between the front and the lead, and the flags of `serve`."""

from __future__ import annotations

import pytest

from mpissd.common.errors import ConfigError, ProtocolError
from mpissd.serve.config import KEY_VARIABLE, ServeConfig, is_local
from mpissd.serve.protocol import (
    Cancel,
    End,
    Message,
    Ready,
    Stats,
    Submit,
    Tokens,
    pack,
    unpack,
)


@pytest.mark.parametrize(
    "message",
    [
        Submit(3, [1, 2], 5, temperature=0.5, top_p=0.9, seed=7, logprobs=True, deadline_s=2.5),
        Cancel(3),
        Ready("é\n", 2048, [0, 2], 16, "ssd", 97),
        Tokens(3, [5, 6], ["cache", "bonus"], [-0.5, -1.25]),
        End(3, "stop", drafted=8, accepted=5, hits=1, rounds=2),
        End(3, "refused", why="too long"),
        Stats(running=2, waiting=1, mode="sd", draft="lost"),
    ],
)
def test_a_message_is_one_line_and_comes_back(message: Message) -> None:
    line = pack(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert unpack(line) == message


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b'{"op": "fly"}', b'{"id": 3}', b'{"op": "cancel"}', b"\xff", b'{"op": ["end"]}'],
)
def test_what_is_no_message_is_told_apart(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="no message"):
        unpack(line)


def test_nobody_else_is_let_in_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert ServeConfig().key is None and is_local(ServeConfig().host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="without api_key"):
            ServeConfig(host=host)
        assert ServeConfig(host=host, api_key="k").key == "k"
    monkeypatch.setenv(KEY_VARIABLE, "from outside")
    assert ServeConfig(host="0.0.0.0").key == "from outside"
    assert all(map(is_local, ("localhost", "127.8.8.8", "::1", "[::1]")))
