"""Open-loop load: arrival times, the end of each request, and the row that reports it."""

import asyncio
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.cli.arguments import parse
from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.flags import parse_into, without
from mpissd.lab.load.command import (
    Client,
    Load,
    LoadRow,
    Reply,
    Served,
    load,
    loads,
    poisson,
    row_of,
)
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.sse import StreamEvent
from tests.needs import module
from tests.serve.fake_lead import Script
from tests.text import tiny


def prompts(folder: Path, *lines: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def config(folder: Path, **flags: str) -> LoadConfig:
    lines = [{"prompt": f"number {n}", "max_tokens": n + 1} for n in range(5)]
    return parse_into(LoadConfig, {"prompts": prompts(folder, *lines), **flags})


def test_poisson_arrivals_are_the_seeds_and_stretch_with_the_rate() -> None:
    times = poisson(5.0, 400.0, None, seed=3)
    assert times == poisson(5.0, 400.0, None, seed=3) != poisson(5.0, 400.0, None, seed=4)
    assert np.allclose(poisson(10.0, 200.0, None, seed=3), np.array(times) / 2)
    gaps = np.diff(times)
    mean = 1 / 5.0
    assert abs(gaps.mean() - mean) < 4 * mean / math.sqrt(len(gaps))
    assert abs(gaps.std() / mean - 1) < 0.15  # a Poisson process: as much spread as mean
    assert len(poisson(3.0, 60.0, 17, seed=0)) == 17
    assert len(poisson(0.001, 0.1, None, seed=0)) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rate": "0"}, "rate=0"),
        ({"rate": "2,x"}, "rate=x"),
        ({"rate": "inf"}, "rate=inf without requests"),
        ({"requests": "0"}, "requests=0"),
    ],
)
def test_what_cannot_be_a_load(tmp_path: Path, flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(tmp_path, **flags)


def test_a_load_needs_prompts_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompts: needed"):
        LoadConfig()
    bad = prompts(tmp_path, {"prompt": "x", "max_tokens": 0})
    with pytest.raises(ConfigError, match="line 1: max_tokens"):
        list(loads(LoadConfig(prompts=bad)))


def test_goodput_counts_what_kept_the_objective(tmp_path: Path) -> None:
    speculation = {"drafted": 8, "accepted": 5, "hits": 2, "rounds": 3}
    served = [
        Served(0.0, 200, 0.5, 1.4, 10, 7, speculation=speculation),  # good: .1 s a token
        Served(1.0, 200, 1.5, 1.6, 10, 7, speculation=speculation),  # its first token is late
        Served(2.0, 200, 0.5, 1.5, 10, 7),  # .111 s a token
        Served(3.0, 200, 0.7, 0.7, 1, 7),  # one token has no further ones
        Served(4.0, 429, late_s=0.25),
        Served(4.5, 599),
    ]
    named = {**dict.fromkeys(("load_id", "server", "model"), "x"), "provenance": {}}
    about = {"mode": "ssd", "tp": 1, "unknown": 3}
    row = row_of(config(tmp_path), Load(2.0, 5.0, ()), served, about, named)
    counts = row.num_requests, row.num_answered, row.num_refused, row.num_failed
    assert counts == (6, 4, 1, 1)
    assert row.wall_s == 4.5 and row.num_tokens == 31, "what was not answered takes its time"
    assert row.tok_per_s == pytest.approx(31 / 4.5)
    assert row.goodput_per_s == pytest.approx(2 / 4.5)
    assert row.good_share == pytest.approx(1 / 3)
    assert row.most_together == 2 and row.client_late_s == 0.25
    assert (row.drafted, row.rounds) == (16, 6) and (row.mode, row.tp) == ("ssd", 1)
    assert row.tpot_s is not None and row.tpot_s["p50"] == pytest.approx(0.1)
    assert row.ttft_s is not None and row.ttft_s["mean"] == pytest.approx(0.8)
    assert LoadRow(**json.loads(json.dumps(asdict(row)))) == row


def test_a_server_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over HTTP: a row a rate, the counts of the server, and times that its pace allows."""
    module("uvicorn", "the extra serve")
    from tests.serve.rig import serving, tokenizer

    pace = 0.02
    script = Script([tiny.of_byte(65)] * 50, pace_s=pace, burst=1)
    about = {"mode": "ssd", "tp": 1, "num_drafts": 1, "world_size": 2}
    with serving(tokenizer(tmp_path), script, about=about) as rig:
        flags = {"url": f"{rig.url}/v1", "rate": "20,40", "requests": "10", "out": str(tmp_path)}
        assert load(config(tmp_path, **flags)) == 0
    rows = [LoadRow(**json.loads(x)) for x in (tmp_path / "loads.jsonl").read_text().splitlines()]
    assert [each.rate for each in rows] == [20, 40]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["load_id"] == rows[-1].load_id
    for each in rows:
        assert each.num_answered == 10 and (each.mode, each.world_size) == ("ssd", 2)
        assert (each.backend, each.device_name, each.draws) == ("numpy", "a device", "host")
        assert each.num_tokens == 2 * (1 + 2 + 3 + 4 + 5)
        assert (each.drafted, each.accepted, each.rounds) == (80, 50, 40)
        assert each.ttft_s is not None and each.ttft_s["p50"] >= pace
        numbers = np.load(tmp_path / "loads" / f"{each.load_id}.npz")
        assert (numbers["status"] == 200).all() and len(numbers["ttft_s"]) == 10
        assert (numbers["latency_s"] >= 0.99 * pace * numbers["num_tokens"]).all()


def test_refusals_are_no_deaths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module("uvicorn", "the extra serve")
    from tests.serve.rig import serving, tokenizer

    script = Script([tiny.of_byte(65)] * 50, pace_s=0.05, burst=1, max_running=1)
    with serving(tokenizer(tmp_path), script, max_queue=1) as rig:
        flags = {"url": f"{rig.url}/v1", "out": str(tmp_path)}
        assert load(config(tmp_path, **flags, rate="1000", requests="20")) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["num_answered"] + found["num_refused"] == 20 > 2 * found["num_answered"] > 3
        script.dies_after = script.rounds + 1
        assert load(config(tmp_path, **flags, rate="1000", requests="3")) == 5
        assert "none of 3 was answered" in capsys.readouterr().err
    assert load(config(tmp_path, **flags)) == 5
    assert "no models there" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--api_key=k"], ["--api-key=k"], ["--api_key", "k"]])
def test_no_row_keeps_a_key_in_any_form_that_is_read(form: list[str]) -> None:
    before, behind = ["load", "--prompts=p"], ["--seed=1"]
    command = parse([*before, *form, *behind])
    assert command.config.api_key == "k" and command.config.seed == 1
    assert without([*before, *form, *behind], "api_key") == [*before, *behind]


def test_another_server_is_one_line(tmp_path: Path) -> None:
    httpx = module("httpx", "the extra serve")
    with pytest.raises(ConfigError, match="url=http://h:port/v1"):
        load(config(tmp_path, url="http://h:port/v1"))
    given = config(tmp_path, url="http://h/v1", requests="2", rate="100")

    async def asked(models: Any, *lines: str) -> list[Served]:
        def answer(request: Any) -> Any:
            if request.method == "GET":
                return httpx.Response(200, json=models)
            return httpx.Response(200, text="".join(f"data:{line}\n\n" for line in lines))

        async with Client(given) as client:
            client._http = httpx.AsyncClient(
                base_url="http://h/v1/", transport=httpx.MockTransport(answer)
            )
            await client.about()
            (planned,) = loads(given)
            served = await client.send_all(planned)
            named = {**dict.fromkeys(("load_id", "server", "model"), "x"), "provenance": {}}
            about = {**await client.about(), "mode": None}
            json.dumps(asdict(row_of(given, planned, served, about, named)), allow_nan=False)
            return served

    models = {"data": [{"id": "m", "mpissd": ["ssd"]}, {"id": "m", "mpissd": {"tp": "1"}}]}
    a, end = '{"choices": [{"text": "a"}]}', '{"choices": [{"finish_reason": "length"}]}'
    broken = [[line, end] for line in ("[]", "5", '{"choices": [7]}', "{", "[" * 10**5)]
    for lines in (*broken, [a], [a, '{"error": {}, "choices": null}'], [a, '{"error": "x"}', end]):
        assert [each.status for each in asyncio.run(asked(models, *lines))] == [599, 599]
    usages = [
        "null", "[]", '{"completion_tokens": null, "prompt_tokens": "5"}',
        '{"completion_tokens": 4294967296}',
        '{"completion_tokens": 0, "speculation": {"drafted": null}}',
    ]  # fmt: skip
    for usage in usages:
        lines = a, a, end, f'{{"choices": [], "usage": {usage}}}'
        assert [e.num_tokens for e in asyncio.run(asked(models, *lines, "[DONE]"))] == [2, 2]
    assert asyncio.run(asked(models, "[DONE]", "{"))[0].status == 200
    for other in ([], {"data": ["m"]}, {"data": 5}, {"data": [{"id": 5}]}):
        with pytest.raises(FaultError, match="no models there"):
            asyncio.run(asked(other, "{}"))


@pytest.mark.parametrize(
    "name", ["content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call"]
)
def test_times_are_of_generated_tokens(name: str) -> None:
    """From the first one to the end, whatever member of the chat's delta holds them."""
    answer = Reply()
    deltas = [{"role": "assistant", "content": ""}, {name: ["x"]}, {name: "x"}, {}, {name: "x"}]
    for number, delta in enumerate([*deltas, None]):
        choice = {"delta": delta, "finish_reason": None if delta is not None else "stop"}
        answer.add(StreamEvent("message", json.dumps({"choices": [choice]})), float(number))
    assert (answer.first_s, answer.last_s, answer.num_chunks) == (1.0, 5.0, 3)
    with pytest.raises(ValueError, match="the server reports"):
        answer.add(StreamEvent("error", "{}"), 6.0)
