"""The page of `/`: its policy, the counters that it shows, and the page in a browser."""

import base64
import hashlib
import re
import subprocess
from pathlib import Path

from mpissd.engine.workload.tokenizer import Tokenizer
from tests.needs import missing, module, needs
from tests.scripts import until
from tests.serve.fake_lead import Script
from tests.text import tiny

module("uvicorn", "the extra serve")
httpx = module("httpx", "the extra serve")
from tests.serve.rig import serving  # noqa: E402

LETTER = tiny.of_byte(65)


def test_the_page_is_open_and_trusts_only_itself(words: Tokenizer) -> None:
    """Its policy allows its own style and script, and nothing from another place."""
    with serving(words, Script([LETTER]), api_key="k") as rig:
        page = httpx.get(rig.url)
        assert page.is_success and httpx.get(f"{rig.url}/v1/models").status_code == 401
    header = page.headers["content-security-policy"]
    policy = dict(part.split(" ", 1) for part in header.split("; "))
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    none = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert policy == {**none, "connect-src": "'self'", "img-src": "data:"}
    assert set(re.findall(r"\w+:\s*//\S*", page.text)) <= {"http://www.w3.org/2000/svg'"}
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|eval\(", page.text)
    assert not re.search(r"Storage|cookie", page.text)  # the key stays in memory


def test_counters_rise_while_an_answer_arrives(words: Tokenizer) -> None:
    script = Script([LETTER] * 390, pace_s=0.05)
    with serving(words, script) as rig, rig.send(b'{"prompt": "x"}'):

        def rises() -> bool:
            text = httpx.get(f"{rig.url}/metrics").text
            count = re.search(r'tokens_total{kind="completion"} ([\d.]+)', text)
            rounds = re.search(r"answer_rounds_total ([\d.]+)", text)
            assert "outstanding 1.0" in text, "the answer has ended"
            return bool(count and rounds and float(count[1]) == 2 * float(rounds[1]) > 0)

        until(lambda: "outstanding 1.0" in httpx.get(f"{rig.url}/metrics").text)
        until(rises)


@needs("chromium", not missing("chromium"))
def test_a_browser_shows_who_serves(words: Tokenizer, tmp_path: Path) -> None:
    options = "--headless --no-sandbox --disable-gpu --virtual-time-budget=4000 --dump-dom".split()
    about = {"mode": "ssd", "draft": "little", "tp": 2, "num_drafts": 1, "lookahead": 4}
    with serving(words, Script([LETTER]), about) as rig:
        command = ["chromium", *options, f"--user-data-dir={tmp_path}", rig.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    header = done.stdout.partition("</style>")[2].partition("<dl")[0]
    shown = " ".join(re.sub(r"<[^>]*>", " ", header).split())
    assert "with little · ssd, K = 4 · T = 2, D = 1 · a device · context 400 Ready" in shown
