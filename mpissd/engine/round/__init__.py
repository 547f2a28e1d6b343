"""The core: the target's round and the draft's round, and what they work on.

Read it in this order: common/rounds.py (what the messages carry), oracle (who decides tokens),
speculator and target (the target's round), draft (the draft's round), branches (drafts and the
cache), rows and sequence (what a forward computes, and where it is stored), scheduler (who joins
and leaves); before branches law/tree.py and law/fanout.py. A round r of the target asks for
speculation r with outcome r - 1, verifies it and decides outcome r, which the next round sends. The
draft answers, then grows branches for the likely outcomes until the next one arrives.

The core imports no workload, job or feature (tests/test_layers.py). What attaches to the core:

- An *oracle* decides tokens; a drafting method is a DraftOracle, a lookup without a model is a
  law.lookup.Lookup, and a source of drafts elsewhere is a Speculator.
- A Speculator replaces where drafts come from (features.device_rounds, features.draft_loss), and
  `Placement.batches` how they are stored in the KV cache (features.trees).
- A worker replaces how forwards are launched (features.device_rounds, features.joined_growth),
  and Forwards what computes them (features.pool).
- A RoundObserver sees each judged round and works while the target verifies; it changes nothing
  (features.learning, serve.driver).
- `refresh` of draft.serve works between two rounds of the draft and may change its weights
  (features.learning). `TargetLoop.control` limits the next round (serve.driver).
"""
