"""The core of the engine: the round of the target and the round of the draft.

In round r the target sends the draft outcome r - 1 (the accepted and bonus tokens of the round
before), receives speculation r (drafted tokens), verifies it and decides outcome r. The draft
answers an outcome, then drafts branches for the likely next outcomes until one of them arrives.

Read the modules in this order: common/rounds.py (the content of messages), oracle (decides tokens),
speculator and target (the target's round), law/tree.py and law/fanout.py, branches (drafts and the
speculation cache), draft (the draft's round), rows and sequence (what a forward computes, and where
the KV cache stores it), scheduler (which requests join and leave).

The core imports no workload, job or feature (tests/test_layers.py). Subclasses or callbacks of
these interfaces extend it:

- A TargetOracle or DraftOracle decides tokens. A law.lookup.Lookup drafts without a model.
- A Speculator obtains the drafted tokens (features.device_rounds, features.draft_loss), and
  `Placement.batches` stores them in the KV cache (engine.trees).
- A worker launches forwards (features.device_rounds, features.joined_growth), and Forwards compute
  them (features.pool).
- A RoundObserver reads each judged round and works while the target verifies (features.learning,
  serve.driver).
- `refresh` of draft.serve works between two rounds of the draft and may change its weights
  (features.learning). `TargetLoop.control` limits the next round (serve.driver).
"""
