"""Lets vLLM use drafts of `mpissd draft`, through its interface for custom proposers.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "mpissd.vllm.Proposer", "num_speculative_tokens": 3}'

The environment variable MPISSD_DRAFT is a draft process's socket, a path or tcp://HOST:PORT, or the
flags (--pair=smollm2) or the whole command of a draft process to start. MPISSD_PATIENCE_MS is the
longest wait for drafts in a step. Drafts are used only while they save time (MPISSD_ALWAYS=1:
always). If PROMETHEUS_MULTIPROC_DIR names a folder, counts are published there as metrics.
"""

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.features.draft_client import LOG, DraftClient

_PATIENCE_MS = "200"
_REPORT_S = 60.0
_MOST_ROWS = 16  # the draft's batch size, unless its flags give another
_MOST_TOKENS = 4096


@cache  # a process may register the metric only once
def _metric() -> Any:
    from prometheus_client import Counter as Metric  # vLLM's

    return Metric("vllm:mpissd", "Counts of the client of mpissd's draft", ["count"])


class Proposer:
    """Proposes to vLLM the greedy tokens of a draft process, without probabilities. client: the
    connection to the draft process; None on a rank whose proposals vLLM does not read."""

    client: DraftClient | None = None

    def __init__(self, vllm_config: Any) -> None:
        """Starts a draft process while vLLM loads. Raises KeyError without MPISSD_DRAFT."""
        parallel = vllm_config.parallel_config
        self._reported = perf_counter()
        self._published = Counter[str]()
        self._publishes = True
        group = parallel.tensor_parallel_size
        group *= getattr(parallel, "prefill_context_parallel_size", 1)
        if parallel.rank % group == 0:  # one rank of the last pipeline stage asks for drafts
            self.client = DraftClient(
                os.environ["MPISSD_DRAFT"],
                vllm_config.speculative_config.num_speculative_tokens,
                float(os.environ.get("MPISSD_PATIENCE_MS", _PATIENCE_MS)) / 1e3,
                batch=min(vllm_config.scheduler_config.max_num_seqs, _MOST_ROWS),
                longest=min(vllm_config.model_config.max_model_len, _MOST_TOKENS),
            )
            if self.client.address is None:
                self.client.drafts([(np.zeros(1, np.int32), 1)])

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the draft process loads the draft model. vLLM calls this method on CPUs."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Returns the draft tokens of each row, [] for a row without new tokens. sampled_token_ids:
        for each row, the draft tokens accepted last and the bonus token. num_tokens_no_spec: each
        row's number of tokens so far, int32 [≥ rows]. token_ids_cpu: int32 [≥ rows, length]."""
        answers: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.client is None:
            return answers
        rows = {
            row: (token_ids_cpu[row, : num_tokens_no_spec[row]].copy(), len(new))
            for row, new in enumerate(sampled_token_ids)
            if len(new)  # no new tokens: only a part of the prompt was computed
        }
        for row, tokens in zip(rows, self.client.drafts([*rows.values()]), strict=True):
            answers[row] = tokens
        if self._publishes and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            try:
                for name, count in (self.client.counts - self._published).items():
                    _metric().labels(name).inc(count)
            except Exception as error:  # noqa: BLE001  (none may reach vLLM)
                self._publishes = False
                LOG.warning("mpissd: counts are not published: %s", error)
            self._published = self.client.counts.copy()
        if perf_counter() - self._reported > _REPORT_S:
            self._reported = perf_counter()
            LOG.info("mpissd: drafts so far: %s", dict(self.client.counts))
        return answers
