"""The page of `/`: its policy, the counters that it shows, and the page in a browser."""

import base64
import hashlib
import re
import subprocess
from pathlib import Path

from mpissd.engine.text.tokenizer import Tokenizer
from tests.needs import missing, module, needs
from tests.scripts import until
from tests.serve.fake_lead import Script
from tests.text import tiny

module("uvicorn", "the extra serve")
httpx = module("httpx", "the extra serve")
from tests.serve.rig import serving  # noqa: E402

LETTER = tiny.of_byte(65)


def test_the_page_is_open_and_trusts_only_itself(words: Tokenizer) -> None:
    with serving(words, Script([LETTER]), api_key="k") as rig:
        page = httpx.get(rig.url)
        assert page.is_success and httpx.get(f"{rig.url}/v1/models").status_code == 401
    policy = dict(re.findall(r"([a-z-]+) ([^;]*)", page.headers["content-security-policy"]))
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    none = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert policy == {**none, "connect-src": "'self'", "img-src": "data:"}
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|write\(|Storage|cookie", page.text)


def test_counters_rise_while_an_answer_arrives(words: Tokenizer) -> None:
    with serving(words, Script([LETTER] * 390, pace_s=0.05)) as rig, rig.send(b'{"prompt": "x"}'):
        wanted = r'{kind="completion"} [1-9](.|\n)*rounds_total [1-9](.|\n)*outstanding 1\.0'
        until(lambda: re.search(wanted, httpx.get(f"{rig.url}/metrics").text))


@needs("chromium", not missing("chromium"))
def test_a_browser_shows_who_serves(words: Tokenizer, tmp_path: Path) -> None:
    options = "--headless --no-sandbox --disable-gpu --virtual-time-budget=4000 --dump-dom".split()
    with serving(words, Script([LETTER]), {"draft": "little", "tp": 2, "num_drafts": 1}) as rig:
        command = ["chromium", *options, f"--user-data-dir={tmp_path}", rig.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    shown = " ".join(re.sub(r"<[^>]*>", " ", done.stdout.partition("</style>")[2]).split())
    assert re.search("with little · .*T = 2, D = 1 · a device · context 400 Ready", shown)
